"""A lost connection comes back and listens as before."""

import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import ConnectionLost, NodeClosed, Options, PubSub
from psqlmessages.pubsub.statements import Statement
from tests.client.moments import somebody_sleeps, when
from tests.client.programs import PROMPTLY
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.pubsub.conftest import Connect, Ear, NewBus, end_backend, until

# Comes back quickly, and is not lost because the machine stands still.
QUICK = Options(
    backoff_least=timedelta(milliseconds=20),
    backoff_most=timedelta(milliseconds=200),
    probe_timeout=timedelta(seconds=60),
    reconnect_wait=timedelta(seconds=60),
)
# Finds out soon that a network stalls, but not sooner than a machine may stand still.
WATCHFUL = replace(QUICK, probe_timeout=timedelta(seconds=5), answer_timeout=timedelta(seconds=5))

Cut = Callable[[PubSub], None]


@pytest.fixture
def cut(superuser: psycopg.Connection) -> Cut:
    """Cut the connection of a bus."""
    return lambda bus: end_backend(superuser, bus.connection)


@pytest.fixture
def stalling(server: TestedServer, new_bus: NewBus, proxy: Proxy) -> PubSub:
    """A bus behind the proxy, subscribed to channel A."""
    dsn = make_conninfo(server.url("user1"), host="127.0.0.1", port=proxy.port, connect_timeout=90)
    bus = new_bus(dsn, interval=0.1, options=WATCHFUL)
    bus.subscribe("A")
    return bus


@pytest.mark.parametrize("is_given", [True, False])
def test_a_connection_that_was_cut_comes_back_and_listens(
    new_bus: NewBus, connect: Connect, cut: Cut, raw: Any, is_given: bool
) -> None:
    """One that was given is replaced by one with the same parameters."""
    bus, ear = new_bus(connect(autocommit=False) if is_given else "", options=QUICK), Ear()
    bus.subscribe("A")
    bus.subscribe("B")
    bus.on("A", ear)
    role = bus.connection.info.user
    cut(bus)
    until(lambda: bus.counters.reconnects == 1 and bus.is_healthy)
    assert bus.connection.info.user == role
    raw("!again")
    assert ear.payload() == "again"
    bus.publish("A", "myself")
    assert ear.payload() == "myself"
    assert not bus.subscribe("B")
    assert bus.counters.lost_connections == 1


def test_the_keep_alive_finds_a_network_that_stalls(stalling: PubSub, proxy: Proxy) -> None:
    ear = Ear()
    stalling.on("A", ear)
    proxy.stall()
    until(lambda: stalling.counters.reconnects == 1)
    stalling.publish("A", "x")
    assert ear.payload() == "x"


def test_a_publisher_without_subscriptions_finds_a_cut_before_it_sends(
    new_bus: NewBus, cut: Cut, ear: Ear
) -> None:
    bus = new_bus(options=QUICK)
    bus.publish("A", 1)
    cut(bus)
    bus._line._used_at -= 2
    bus.publish("A", 2)
    assert [ear.payload(), ear.payload()] == [1, 2]


def test_what_is_under_way_at_a_cut_says_that_it_may_or_may_not_be_done(
    new_bus: NewBus, superuser: psycopg.Connection, cut: Cut
) -> None:
    bus = new_bus(options=Options())
    bus.open()
    when(somebody_sleeps(superuser, bus.connection.info.backend_pid), lambda: cut(bus))

    def long_one(_: object) -> Any:
        yield Statement("SELECT pg_sleep(30)")

    with pytest.raises(ConnectionLost):
        bus._line.run(long_one)
    bus.publish("A")


def test_a_publish_on_a_stalled_network_does_not_wait_for_ever(
    stalling: PubSub, proxy: Proxy
) -> None:
    stalling._subscriptions._interval = 60
    until(lambda: stalling._subscriptions.next_at() > monotonic() + 10)
    with stalling._line._io:
        # The last keep-alive has had its answer.
        proxy.stall()
    started = monotonic()
    with pytest.raises(ConnectionLost):
        stalling.publish("A", "x" * 100_000)
    assert monotonic() - started < PROMPTLY
    stalling.publish("A", "x")


def test_while_the_server_is_away_calls_wait_a_while_and_close_ends_it_at_once(
    server: TestedServer, new_bus: NewBus, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = make_conninfo(server.url("user1"), host="127.0.0.1", port=proxy.port, connect_timeout=90)
    options = Options(
        reconnect_wait=timedelta(seconds=0.3),
        probe_timeout=timedelta(seconds=5),
        answer_timeout=timedelta(seconds=5),
    )
    bus = new_bus(dsn, interval=0.1, options=options)
    bus.subscribe("A")
    proxy.refuse()
    until(lambda: not bus.is_healthy)
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="is not connected"):
            bus.publish("A")
    started = monotonic()
    bus.close()
    assert monotonic() - started < PROMPTLY
    with pytest.raises(NodeClosed):
        bus.publish("A")
    assert 0 < len(caplog.records) < 8


def test_unfinished_messages_do_not_outlive_the_connection(
    new_bus: NewBus, cut: Cut, connect: Connect
) -> None:
    bus, ear = new_bus(options=QUICK), Ear()
    bus.subscribe("A")
    bus.on("A", ear)
    writer = connect()
    writer.execute("NOTIFY \"A\", '#Ic'")
    until(lambda: bus.counters.received == 1)
    cut(bus)
    until(lambda: bus.counters.reconnects == 1)
    assert bus.counters.unfinished == 1
    writer.execute("NOTIFY \"A\", '$IcOp'")
    assert ear.payload() == "é"


def test_a_bus_closed_by_a_signal_handler_amid_a_call_is_closed(
    new_bus: NewBus, connect: Connect
) -> None:
    bus = new_bus()
    bus.subscribe("A")

    def long_one(_: object) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        assert bus.is_healthy, "it ends with the call"
        yield Statement("SELECT 1")

    former = signal.signal(signal.SIGUSR1, lambda *_: bus.close())
    try:
        bus._line.run(long_one)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert bus.connection is None
    with pytest.raises(NodeClosed):
        bus.publish("A")
