"""A lost connection comes back and listens as before."""

import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages.client.transactions import SqlStatement
from psqlmessages.exceptions import ConnectionLost, NodeClosed, ServerUnreachable
from tests.client.nodes import QUICK
from tests.client.programs import PROMPTLY
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.pubsub.conftest import Connect, NewBus, Receiver, end_backend

# Detects a stalled network soon, but allows for pauses of a slow machine.
WATCHFUL = replace(QUICK, probe_timeout=timedelta(seconds=2), answer_timeout=timedelta(seconds=2))


@pytest.fixture
def stalling(server: TestedServer, any_bus: NewBus, proxy: Proxy) -> Callable[..., Any]:
    """Make a bus behind the proxy, subscribed to channel A."""
    url = make_conninfo(server.url("user1"), host="127.0.0.1", port=proxy.port, connect_timeout=90)

    def make(**settings: Any) -> Any:
        bus = any_bus(url, **{"interval": 0.1, "options": WATCHFUL, **settings})
        bus.subscribe("A")
        return bus

    return make


def long_one(_: object) -> Any:
    yield SqlStatement("SELECT pg_sleep(30)")


@pytest.mark.parametrize("is_given", [True, False])
def test_a_connection_that_was_cut_comes_back_and_listens(
    any_bus: NewBus, new_bus: NewBus, connect: Connect, superuser: psycopg.Connection, raw: Any,
    is_given: bool,
):  # fmt: skip
    """A given connection is replaced by one with the same parameters."""
    bus = new_bus(connect(autocommit=False), options=QUICK) if is_given else any_bus(options=QUICK)
    receiver = Receiver.of(bus)
    bus.subscribe("B")
    role = bus.connection.info.user
    end_backend(superuser, bus.connection)
    wait_until(lambda: bus.counters.reconnects == 1 and bus.is_healthy)
    assert bus.connection.info.user == role
    raw("!again")
    assert receiver.payload() == "again"
    bus.publish("A", "myself")
    assert receiver.payload() == "myself"
    assert not bus.subscribe("B")
    assert bus.counters.lost_connections == 1


def test_the_keep_alive_finds_a_stalled_network(stalling: NewBus, proxy: Proxy):
    bus = stalling()
    proxy.stall()
    wait_until(lambda: bus.counters.reconnects >= 1 and bus.is_healthy)
    proxy.refuse()
    wait_until(lambda: not bus.is_healthy)
    with ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(bus.publish, "A")
        wait([publishing], 0.2)
        started = monotonic()
        bus.close()
        assert monotonic() - started < PROMPTLY
        with pytest.raises((NodeClosed, ConnectionLost)):
            publishing.result()


@pytest.mark.parametrize("any_bus", ["PubSub"], indirect=True)
def test_a_publish_on_a_stalled_network_ends(stalling: NewBus, proxy: Proxy):
    bus = stalling(interval=60.0)
    with bus._connection._io:
        proxy.stall()
    started = monotonic()
    with pytest.raises(ConnectionLost):
        bus.publish("A", "x" * 100_000)
    assert monotonic() - started < PROMPTLY
    bus.publish("A", "x")


def test_close_waits_for_no_attempt_to_connect(stalling: NewBus, proxy: Proxy):
    bus = stalling()
    proxy.stall(new=True)
    wait_until(lambda: proxy.accepted > 1)
    started = monotonic()
    bus.close()
    assert monotonic() - started < PROMPTLY
    assert bus.connection is None
    proxy.heal()


def test_a_server_that_ends_the_session_after_the_login_is_unreachable(any_bus: NewBus):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        port = server.getsockname()[1]
        bus = any_bus(f"host=127.0.0.1 port={port} sslmode=disable gssencmode=disable")
        opening = thread.submit(bus.open)
        with server.accept()[0] as session:
            session.recv(1000)
            # AuthenticationOk and ReadyForQuery.
            session.sendall(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I")
            session.recv(1000)
        with pytest.raises(ServerUnreachable, match="cannot connect"):
            opening.result()
    with pytest.raises(ServerUnreachable, match="cannot connect"):
        bus.open()


def test_calls_wait_for_an_absent_server(stalling: NewBus, proxy: Proxy, caplog):
    bus = stalling(options=replace(WATCHFUL, reconnect_wait=timedelta(seconds=0.3)))
    proxy.refuse()
    wait_until(lambda: not bus.is_healthy)
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="is not connected"):
            bus.publish("A")
    assert 0 < len([each for each in caplog.records if each.name.startswith("psqlmessages")]) < 8


@pytest.mark.parametrize("any_bus", ["AsyncPubSub"], indirect=True)
def test_a_call_over_a_lost_link_is_heard(any_bus: NewBus, raw: Any, superuser: psycopg.Connection):
    bus = any_bus(interval=600.0, options=WATCHFUL)
    receiver = Receiver.of(bus)
    try:
        for number in range(2):
            with pytest.raises(ConnectionLost, match="no answer"):
                bus._do(bus._connection.run, long_one)
            wait_until(lambda: bus.is_healthy)
            raw(f"@{number}")
            assert receiver.payload() == number
    finally:
        sleeping = "SELECT pid FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(30)'"
        superuser.execute(f"SELECT pg_terminate_backend(pid, 60000) FROM ({sleeping}) AS found")


def test_a_signal_handler_can_close_a_bus_during_a_call(new_bus: NewBus):
    bus = new_bus()
    bus.subscribe("A")

    def one(_: object) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        assert bus.is_healthy, "it ends with the call"
        yield SqlStatement("SELECT 1")

    former = signal.signal(signal.SIGUSR1, lambda *_: bus.close())
    try:
        bus._connection.run(one)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert bus.connection is None
