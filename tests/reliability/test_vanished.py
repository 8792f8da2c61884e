"""Hosts that vanish without a word, and what else than nodes meets a network that stalls."""

import asyncio
import socket
import threading
from collections import Counter
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import IdentTaken, Node, Options, ServerUnreachable
from psqlmessages.client.messages import Message
from psqlmessages.handlers import Registry
from psqlmessages.monitor.reading import Reader
from psqlmessages.pubsub.pubsub import PubSub
from psqlmessages.rest.pool import Pool
from psqlmessages.runner import Runner
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.exchanges.conftest import field, namespace
from tests.exchanges.field import Field, working
from tests.reliability.counts import counted, size
from tests.reliability.crashes import told
from tests.sql.conftest import World
from tests.web.receivers import Box, opened

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


@pytest.mark.nightly  # REST waits 10 seconds for an answer that does not come
def test_a_hub_a_bus_rest_and_the_monitor_return_from_a_stall(
    server: TestedServer, world: World, proxy: Proxy
) -> None:
    world.rules("psqlmessages NODE1 Topic T RW 60", "psqlmessages OTHER Topic T RW 60")
    dsn = through(proxy, server.url())
    heard: list[object] = []

    async def stall() -> dict[str, float]:
        box, pool, reader, took = Box(), Pool(dsn, "pool", 2), Reader(dsn), {}
        async with opened(dsn, QUICK) as hub:
            assert (await hub.init("NODE1", box))["Err"] == "0"
            assert (await hub.run("NODE1", box, "topic_listen", "T"))["Err"] == "0"
            await pool.fetch("SELECT 1")
            await reader.rows("SELECT 1")
            await asyncio.to_thread(proxy.stall)
            began = monotonic()

            async def until_answered(name: str, ask: Any) -> None:
                while True:
                    try:
                        await ask()
                    except (ServerUnreachable, psycopg.Error):
                        await asyncio.to_thread(threading.Event().wait, 0.05)
                    else:
                        took[name] = monotonic() - began
                        return

            async def back() -> None:
                await box.event("reconnected")
                took["hub"] = monotonic() - began

            await asyncio.gather(
                back(),
                until_answered("rest", lambda: pool.fetch("SELECT 1")),
                until_answered("monitor", lambda: reader.rows("SELECT 1")),
            )
            with Node("OTHER", server.url()) as other:
                other.topic_notify("T")
                other.topic_send("T", "after the stall")
            await box.message()
            await reader.close()
            pool._rest()
        return took

    came = threading.Event()
    with PubSub(dsn, interval=0.5, options=QUICK) as bus, PubSub(server.url()) as other:
        bus.on("channel", lambda event: (heard.append(event.payload), came.set()))
        bus.subscribe("channel")
        took = asyncio.run(stall())
        began = monotonic()
        while not bus.is_healthy or not bus.counters.reconnects:
            assert monotonic() - began < SECONDS
            came.wait(0.01)
        other.publish("channel", "after the stall")
        assert came.wait(SECONDS)
    counted(FAULT, "back after, in seconds", bus_reconnects=bus.counters.reconnects, **took)
    assert heard == ["after the stall"]
    # Of the hub by its probe, of the others by the answer that did not come, in 4 and 10 s.
    assert took["hub"] < 3 + GRACE
    assert took["monitor"] < 4 + GRACE
    assert took["rest"] < 10 + GRACE


@pytest.mark.nightly  # stalls of a node are in test_network.py
def test_handlers_answer_again_after_a_stall(
    server: TestedServer, world: World, proxy: Proxy, transactional_db: None
) -> None:
    """The runner of `psqlmessages run`: what comes after the stall is handled once."""
    world.rules("psqlmessages worker Topic T R 60", "user1 SENDER Topic T W 60")
    registry, handled, changed = Registry(), Counter(), threading.Condition()

    def handle(message: Message) -> None:
        with changed:
            handled[message.body] += 1
            changed.notify_all()

    registry.on_topic("T", node="worker", atomic=False)(handle)
    with (
        Node("worker", through(proxy, server.url()), options=QUICK) as node,
        Node("SENDER", server.url("user1")) as sender,
    ):
        sender.topic_notify("T")
        runner = Runner(node, registry, using="default")
        runner.listen()
        running = threading.Thread(target=runner.run)
        running.start()
        stalls = size(2, 5)
        try:
            for stall in range(stalls):
                proxy.stall()
                while node.counters.reconnects <= stall:
                    threading.Event().wait(0.01)
                sender.topic_send_many("T", range(stall * 100, stall * 100 + 100))
                with changed:
                    wanted = stall * 100 + 100
                    assert changed.wait_for(lambda: len(handled) == wanted, SECONDS)  # noqa: B023
        finally:
            runner.stop()
            running.join()
    counted(
        FAULT, "handlers of `run`, messages sent after each stall", stalls=stalls,
        handled=handled.total(), lost=100 * stalls - len(handled),
        doubled=handled.total() - len(handled),
    )  # fmt: skip
    assert handled == Counter(range(100 * stalls))


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
