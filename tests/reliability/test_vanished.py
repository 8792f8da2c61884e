"""Hosts that vanish without a word, and what else than nodes meets a network that stalls."""

import socket
from collections import Counter
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import IdentTaken, Node, Options
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.exchanges.conftest import field, namespace
from tests.exchanges.field import Field, working
from tests.reliability.counts import counted, size
from tests.reliability.victims import told
from tests.sql.conftest import World

__all__ = ["field"]

FAULT = "the network stalls"
# Of Linux.
TCP_REPAIR = 19
SECONDS = 90
# What a busy machine may add; without what is tested it takes hours.
GRACE = 30
QUICK = Options(
    probe_interval=timedelta(seconds=1),
    probe_timeout=timedelta(seconds=1),
    answer_timeout=timedelta(seconds=5),
    backoff_least=timedelta(milliseconds=20),
    backoff_most=timedelta(milliseconds=200),
)


def through(proxy: Proxy, dsn: str, **more: Any) -> str:
    return make_conninfo(dsn, host="127.0.0.1", port=proxy.port, **more)


@pytest.fixture
def mortal_host() -> None:
    """Skip unless a socket may go without a word to its other end."""
    with socket.socket() as one:
        try:
            one.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except PermissionError as error:
            pytest.skip(f"only root may let a connection vanish: {error}")


@pytest.mark.nightly  # 13 seconds until the keepalives have found it
@pytest.mark.usefixtures("mortal_host")
def test_a_host_that_vanishes_leaves_its_name_within_the_keepalives(
    server: TestedServer, world: World, proxy: Proxy
) -> None:
    world.rules("user1 NODE1 Topic T RW 60", "user1 WATCHER Topic T RW 60")
    # Shorter than the 10 + 3 * 5 s a node asks for by itself, and time for others to be refused.
    idle = 10
    dsn = through(proxy, server.url("user1"), keepalives_idle=idle, keepalives_interval=1)
    with Node("WATCHER", server.url("user1")) as watcher:
        watcher.topic_listen("T")
        vanished = Node("NODE1", dsn)
        vanished.open()
        vanished.topic_notify("T")
        proxy.vanish()
        began = monotonic()
        with pytest.raises(IdentTaken) as refused:
            Node("NODE1", server.url("user1")).open()
        crashes = told(watcher, "NODE1")
        seconds = monotonic() - began
        with Node("NODE1", server.url("user1")) as heir:
            assert heir.topic_status("T").notifiers == ()
        vanished.close()
    counted(
        FAULT, f"a host vanishes, keepalives_idle={idle}: its name taken with error 8, then free",
        error=refused.value.number, crashes_told=crashes, seconds=seconds,
    )  # fmt: skip
    assert crashes == 1
    assert seconds < idle + 3 + GRACE


def test_without_ours_the_servers_own_keepalives_would_wait_for_hours(
    server: TestedServer, world: World
) -> None:
    world.rules("user1 NODE1 Topic T RW 60")
    with psycopg.connect(server.url("user1")) as plain:
        hours = int(plain.execute("SHOW tcp_keepalives_idle").fetchone()[0]) / 3600
    with Node("NODE1", server.url("user1")) as node:
        row = node._link.connection.execute(
            "SELECT current_setting('tcp_keepalives_idle'),"
            " current_setting('tcp_keepalives_interval'), current_setting('tcp_keepalives_count')"
        ).fetchone()
    assert hours >= 1
    assert row == ("10", "5", "3")
    short = make_conninfo(server.url("user1"), keepalives=0, keepalives_idle=4000)
    with Node("NODE1", short) as node:
        row = node._link.connection.execute("SHOW tcp_keepalives_idle").fetchone()
        assert row == ("4000",)


@pytest.mark.nightly  # 15 seconds for the lease of what an answer held that never came
@pytest.mark.django_db(transaction=True)
def test_an_exchange_amid_its_batches_loses_and_doubles_nothing(
    field: Field, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements go from a namespace that stalls into itself and into another database."""
    messages, stalls = size(200, 4_000), size(1, 5)
    # As its defaults are, a stall holds up a loop for a minute, and what it had reserved for two.
    monkeypatch.setattr("psqlmessages.graph.loops._ANSWER_SECONDS", 5)
    monkeypatch.setattr("psqlmessages.graph.routing_calls.LEASE_SECONDS", 15)
    numbers = [str(number) for number in range(messages)]
    with namespace("far", HOST="127.0.0.1", PORT=str(proxy.port)):
        field.define(x1={"consumer": {"wsize": 10}, "src": "far/a", "dst": ["far/b", "c"]})
        with working():
            field.default.push_many("a", numbers)
            for stall in range(1, stalls + 1):
                part = messages * stall // (stalls + 1)
                field.until(lambda: len(field.default.bodies("b")) >= part, SECONDS)  # noqa: B023
                proxy.stall()
            field.until(lambda: not field.default.bodies("a"), SECONDS)
    arrived = {queue: Counter(field.default.bodies(queue)) for queue in ("b", "c")}
    counted(
        FAULT, "an exchange between databases, amid its batches", stalls=stalls, messages=messages,
        lost=sum(messages - len(bodies) for bodies in arrived.values()),
        doubled=sum(bodies.total() - len(bodies) for bodies in arrived.values()),
    )  # fmt: skip
    assert arrived["b"] == arrived["c"] == Counter(numbers)
