"""Networks that stall, and hosts that vanish: found within limits, nothing is lost or doubled."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, Message, Node, Options
from psqlmessages.client import async_session
from psqlmessages.exceptions import ConnectionLost
from tests.client.proxy import TCP_REPAIR, Lost, Proxy
from tests.conftest import TestedServer
from tests.reliability.counts import report, size
from tests.reliability.faults import until
from tests.reliability.node_spawner import count_crashes
from tests.reliability.workload import QUICK as OF_WORK
from tests.reliability.workload import Workload
from tests.sql.conftest import World

FAULT = "the network stalls"
SECONDS = 90
# Time for a busy machine.
GRACE = 30
QUICK = Options(
    probe_interval=timedelta(seconds=1), probe_timeout=timedelta(seconds=1),
    answer_timeout=timedelta(seconds=5), backoff_min=timedelta(milliseconds=20),
    backoff_max=timedelta(milliseconds=200),
)  # fmt: skip
STALLS, PART = size(1, 5), size(60, 800)
KINDS = (
    "stream of Node", "stream of AsyncNode", "Node.consume", "AsyncNode.consume", "Node.pop",
    "pop by SQL",
)  # fmt: skip
ASKING = Options(probe_timeout=timedelta(seconds=0.5), answer_timeout=timedelta(seconds=60))
TIMEOUT = timedelta(seconds=1)
RULES = ("user1 WRITER Topic NEWS W 3600", "user2 READER* Topic NEWS R 3600")


def through(proxy: Proxy, dsn: str, **more: Any) -> str:
    return make_conninfo(dsn, host="127.0.0.1", port=proxy.port, **more)


def test_streams_and_queues_through_stalls(world: World, proxy: Proxy):
    options = replace(
        OF_WORK, probe_timeout=timedelta(seconds=2), answer_timeout=timedelta(seconds=5)
    )
    with Workload(
        world, *KINDS, rewrite_dsn=lambda dsn: through(proxy, dsn), options=options,
        lease=timedelta(seconds=10),
    ) as work:  # fmt: skip
        for _ in range(STALLS):
            work.wait_for_writes(PART)
            proxy.stall()
        work.wait_for_writes(PART)
    reconnects = [node.counters.reconnects for node in work.nodes.values()]
    work.report(
        FAULT, "streams and queues during stalls", stalls=STALLS, reconnects=sum(reconnects)
    )
    assert work.counts()["lost_with_the_answer_of_pop"] <= 5 * STALLS
    assert min(reconnects) >= STALLS


def found_at(message: Message) -> float:
    return monotonic() - message.away.total_seconds()


def back(node: Node) -> float:
    """Wait until the node has reconnected; return when it detected the lost connection."""
    return next(found_at(each) for each in node.messages() if each.event == "reconnected")


async def measure(dsn: str, proxy: Proxy, options: Options, lost: Lost) -> tuple[float, float]:
    """Stall the network under two waiting nodes and for new connections; then repair it.

    Return the seconds until both nodes detected it, and from the repair until both reconnected.
    """
    with Node("READER.1", dsn, options=options) as node:
        async with AsyncNode("READER.2", dsn, options=options) as asynchronous:
            returns = (found_at(each) async for each in asynchronous if each.event == "reconnected")
            returned = asyncio.ensure_future(anext(returns))
            waiting = asyncio.create_task(asyncio.to_thread(back, node))
            proxy.stall(lost, new=True)
            stalled = monotonic()
            backoff = node._session._state.backoff
            await asyncio.to_thread(until, lambda: backoff.failures >= 2)
            proxy.heal()
            healed = monotonic()
            return max(await asyncio.gather(waiting, returned)) - stalled, monotonic() - healed


NIGHTLY = [pytest.param(lost, marks=pytest.mark.nightly) for lost in ("requests", "all")]


@pytest.mark.parametrize("lost", ["answers", *NIGHTLY])
def test_a_waiting_node_finds_it_soon(server: TestedServer, world: World, proxy: Proxy, lost: Lost):
    """The proxy delivers delayed packets when the network is repaired."""
    world.rules(*RULES)
    options = Options() if size(0, 1) and lost == "all" else QUICK
    limit = (options.probe_interval + options.probe_timeout).total_seconds()
    dsn = through(proxy, server.url("user2"), connect_timeout=2)
    seconds, returned = asyncio.run(measure(dsn, proxy, options, lost))
    report(
        FAULT, f"{'all packets' if lost == 'all' else lost} lost, waiting nodes",
        limit_seconds=limit, detected_after_seconds=seconds, reconnected_after_seconds=returned,
    )  # fmt: skip
    assert seconds < limit + GRACE
    assert returned < GRACE
    assert world.owner.query("SELECT count(*) FROM psqlmessages_client") == 0


def ended(call: Callable[[], Any]) -> tuple[type[BaseException], float]:
    """Return the error of a call and the seconds until then."""
    began = monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - returned to the test
        return type(error), monotonic() - began
    raise AssertionError("it was answered")


def test_a_stalled_call_times_out(server: TestedServer, world: World, proxy: Proxy, monkeypatch):
    """A call ends in time, also while another thread waits for an answer."""
    monkeypatch.setattr(async_session, "_CLOSING_SECONDS", 0.5)
    world.rules("user1 ASKER* Rpc CALLEE W 60", "user2 CALLEE Rpc NOBODY W 60")
    dsn = through(proxy, server.url("user1"))

    async def ask() -> None:
        async with AsyncNode("ASKER.2", dsn, options=ASKING) as node:
            await asyncio.to_thread(proxy.stall)
            await node.call("CALLEE", "?", timeout=TIMEOUT)

    with (
        Node("CALLEE", server.url("user2")),
        Node("ASKER.1", dsn, options=ASKING) as node,
        ThreadPoolExecutor() as pool,
    ):
        reading = pool.submit(lambda: list(node.messages()))
        proxy.stall()
        stuck = pool.submit(node.topic_status, "NEWS")
        kind, seconds = ended(lambda: node.call("CALLEE", "?", timeout=TIMEOUT))
        asynchronous, also = ended(lambda: asyncio.run(ask()))
        node.stop()
        assert not stuck.done()
        proxy.heal()
        for each in (stuck, reading):
            each.exception(SECONDS)
    report(
        FAULT,
        f"RPC with a timeout of 1 s: raises {kind.__name__} (Node),"
        f" {asynchronous.__name__} (AsyncNode)",
        node_seconds=seconds, async_node_seconds=also,
    )  # fmt: skip
    assert issubclass(kind, ConnectionLost)
    assert issubclass(asynchronous, TimeoutError | ConnectionLost)
    assert max(seconds, also) < TIMEOUT.total_seconds() + GRACE


@pytest.mark.nightly  # 13 seconds until the keepalives have found it
def test_keepalives_free_the_name_of_a_lost_host(server: TestedServer, world: World, proxy: Proxy):
    with socket.socket() as one:
        try:
            one.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except PermissionError as error:
            pytest.skip(f"only root may let a connection vanish: {error}")
    world.rules("user1 NODE1 Topic T RW 60", "user1 WATCHER Topic T RW 60")
    # Shorter than the default of a node, which is 10 + 3 * 5 s.
    idle = 10
    dsn = through(proxy, server.url("user1"), keepalives_idle=idle, keepalives_interval=1)
    with Node("WATCHER", server.url("user1")) as watcher:
        watcher.topic_listen("T")
        vanished = Node("NODE1", dsn)
        vanished.open()
        vanished.topic_notify("T")
        proxy.vanish()
        began = monotonic()
        # Not by `open`, which retries for half a second.
        number, _ = world.program("user1").error("init", "NODE1")
        crashes = count_crashes(watcher, "NODE1")
        seconds = monotonic() - began
        with Node("NODE1", server.url("user1")) as heir:
            assert heir.topic_status("T").notifiers == ()
        vanished.close()
    report(
        FAULT,
        f"a host vanishes, keepalives_idle={idle}: time until its node name is free (error before)",
        error=str(number), crash_events=crashes, seconds=seconds,
    )  # fmt: skip
    assert (number, crashes) == (8, 1)
    assert seconds < idle + 3 + GRACE


def test_without_ours_the_servers_keepalives_would_take_hours(server: TestedServer, world: World):
    world.rules("user1 NODE1 Topic T RW 60")
    with Node("NODE1", server.url("user1")) as node:
        row = node._session._connection.execute(
            "SELECT current_setting('tcp_keepalives_idle'),"
            " current_setting('tcp_keepalives_interval'), current_setting('tcp_keepalives_count')"
        ).fetchone()
    assert row == ("10", "5", "3")
    short = make_conninfo(server.url("user1"), keepalives=0, keepalives_idle=4000)
    with Node("NODE1", short) as node:
        row = node._session._connection.execute("SHOW tcp_keepalives_idle").fetchone()
        assert row == ("4000",)
