"""Networks that stall amid everything: found within their limits, nothing is lost or doubled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from psqlmessages import AsyncNode, ConnectionLost, Message, Node, Options
from tests.client.proxy import Lost, Proxy
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.reliability.restarts import until
from tests.reliability.test_vanished import FAULT, GRACE, QUICK, SECONDS, through
from tests.reliability.work import QUICK as OF_WORK
from tests.reliability.work import Work
from tests.sql.conftest import World

STALLS, PART = size(1, 5), size(60, 800)
KINDS = (
    "stream of Node", "stream of AsyncNode", "Node.consume", "AsyncNode.consume", "Node.pop",
    "pop by SQL",
)  # fmt: skip
RULES = ("user1 WRITER Topic NEWS W 3600", "user2 READER* Topic NEWS R 3600")


def test_streams_and_queues_through_stalls(world: World, proxy: Proxy) -> None:
    options = replace(
        OF_WORK, probe_timeout=timedelta(seconds=2), answer_timeout=timedelta(seconds=5)
    )
    # What was reserved by an answer that never came is free again after the lease.
    with Work(
        world, *KINDS, through=lambda dsn: through(proxy, dsn), options=options,
        lease=timedelta(seconds=10),
    ) as work:  # fmt: skip
        for _ in range(STALLS):
            work.go_on(PART)
            proxy.stall()
        work.go_on(PART)
    reconnects = [node.counters.reconnects for node in work.nodes.values()]
    counts = work.counts()
    counted(
        FAULT, "streams and queues, read and pushed to through stalls",
        stalls=STALLS, **counts, reconnects=sum(reconnects),
    )  # fmt: skip
    work.check()
    assert counts["gone_with_the_answer_of_pop"] <= 5 * STALLS
    assert min(reconnects) >= STALLS


def found_at(message: Message) -> float:
    assert message.away is not None
    return monotonic() - message.away.total_seconds()


async def back(node: AsyncNode) -> float:
    """Wait for the return; when it was found that the connection is dead."""
    async for message in node:
        if message.event == "reconnected":
            return found_at(message)
    raise AssertionError("the node has ended")


def back_in_thread(node: Node) -> float:
    return next(found_at(each) for each in node.messages() if each.event == "reconnected")


async def found(dsn: str, proxy: Proxy, options: Options, lost: Lost) -> tuple[float, float]:
    """Stall the network under two nodes that only wait; seconds until found, and until back."""
    with Node("READER.1", dsn, options=options) as node:
        async with AsyncNode("READER.2", dsn, options=options) as asynchronous:
            proxy.stall(lost)
            stalled = monotonic()
            all_found = await asyncio.gather(
                asyncio.to_thread(back_in_thread, node), back(asynchronous)
            )
            return max(all_found) - stalled, monotonic() - stalled


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("requests", marks=pytest.mark.nightly),  # what is lost matters little
        "answers",
        pytest.param("all", marks=pytest.mark.nightly),
    ],
)
def test_a_node_that_only_waits_finds_it_within_the_limit_of_the_probe(
    server: TestedServer, world: World, proxy: Proxy, lost: Lost
) -> None:
    world.rules(*RULES)
    options = Options() if size(0, 1) and lost == "all" else QUICK
    limit = (options.probe_interval + options.probe_timeout).total_seconds()
    dsn = through(proxy, server.url("user2"))
    seconds, returned = asyncio.run(found(dsn, proxy, options, lost))
    counted(
        FAULT, f"{lost} lost, nodes that only wait", limit=limit, found=seconds, back=returned
    )  # fmt: skip
    assert seconds < limit + GRACE


def test_a_black_hole_that_heals_leaves_no_ghost_and_the_node_returns(
    server: TestedServer, world: World, proxy: Proxy
) -> None:
    """New connections are black holes too; what was frozen is delivered once all flows again."""
    world.rules(*RULES)
    dsn = through(proxy, server.url("user2"), connect_timeout=2)
    with Node("READER.1", dsn, options=QUICK) as node, ThreadPoolExecutor() as pool:
        waiting = pool.submit(back_in_thread, node)
        proxy.stall(new=True)
        until(lambda: not node.is_healthy)
        until(lambda: node._link._listening.backoff.attempts >= 2)
        proxy.heal()
        healed = monotonic()
        waiting.result(SECONDS)
        seconds = monotonic() - healed
        registered = world.owner.query(
            "SELECT count(*) FROM psqlmessages_client WHERE ident = 'READER.1'"
        )
    counted(FAULT, "new connections too, then it heals: back after", seconds=seconds)
    assert registered == 1
    assert seconds < GRACE


ASKING = Options(probe_timeout=timedelta(seconds=0.5), answer_timeout=timedelta(seconds=60))
TIMEOUT = timedelta(seconds=1)


def ended(call: Callable[[], Any]) -> tuple[type[BaseException], float]:
    """How a question ends, and after how many seconds."""
    began = monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told to the test
        return type(error), monotonic() - began
    raise AssertionError("it was answered")


def test_a_question_on_a_stalled_network_ends_with_its_timeout(
    server: TestedServer, world: World, proxy: Proxy
) -> None:
    """Also where another thread of the node waits for an answer that does not come."""
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
    counted(
        FAULT, f"a question with a timeout of 1 s: {kind.__name__}, {asynchronous.__name__}",
        seconds=seconds, asyncio_seconds=also,
    )  # fmt: skip
    assert issubclass(kind, ConnectionLost)
    assert issubclass(asynchronous, TimeoutError | ConnectionLost)
    assert max(seconds, also) < TIMEOUT.total_seconds() + GRACE
