"""Networks that stall: how soon a node finds it, what becomes of its name and its questions."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, ConnectionLost, Message, Node, Options
from tests.client.proxy import Lost, Proxy
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.sql.conftest import World

FAULT = "the network stalls"
RULES = ("user1 WRITER Topic NEWS W 3600", "user2 READER* Topic NEWS R 3600")
SECONDS = 120
# What a busy machine may add; without what is tested it takes hours.
GRACE = 30


DEFAULTS = Options()
SHORT = Options(
    probe_interval=timedelta(seconds=1),
    probe_timeout=timedelta(seconds=1),
    backoff_least=timedelta(milliseconds=20),
    backoff_most=timedelta(milliseconds=200),
)


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


@pytest.mark.parametrize("lost", ["requests", "answers", "all"])
def test_a_node_that_only_waits_finds_it_within_the_limit_of_the_probe(
    server: TestedServer, world: World, proxy: Proxy, lost: Lost
) -> None:
    world.rules(*RULES)
    dsn = make_conninfo(server.url("user2"), host="127.0.0.1", port=proxy.port)
    options = DEFAULTS if size(0, 1) and lost == "all" else SHORT
    limit = (options.probe_interval + options.probe_timeout).total_seconds()
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
    dsn = make_conninfo(server.url("user2"), host="127.0.0.1", port=proxy.port, connect_timeout=2)
    with Node("READER.1", dsn, options=SHORT) as node, ThreadPoolExecutor() as pool:
        waiting = pool.submit(back_in_thread, node)
        proxy.stall(new=True)
        until(lambda: not node.is_healthy)
        until(lambda: node._link._listening.backoff.attempts >= 2)
        proxy.heal()
        healed = monotonic()
        waiting.result(SECONDS)
        seconds = monotonic() - healed
        sessions = world.owner.connection.execute(
            "SELECT count(*) FROM psqlmessages_client WHERE ident = 'READER.1'"
        ).fetchone()
    counted(FAULT, "new connections too, then it heals: back after", seconds=seconds)
    assert sessions == (1,)
    assert seconds < GRACE


def until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(SECONDS * 100):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never was so")


# Questions

ASKING = Options(probe_timeout=timedelta(seconds=0.5), answer_timeout=timedelta(seconds=60))
TIMEOUT = timedelta(seconds=1)


def failed(future: Future[Any]) -> tuple[type[BaseException], float]:
    error = future.exception(SECONDS)
    assert error is not None
    return type(error), monotonic()


def test_a_question_on_a_stalled_network_ends_with_its_timeout(
    server: TestedServer, world: World, proxy: Proxy
) -> None:
    """Also where another thread of the node waits for an answer that does not come."""
    world.rules("user1 ASKER* Rpc CALLEE W 60", "user2 CALLEE Rpc NOBODY W 60")
    dsn = make_conninfo(server.url("user1"), host="127.0.0.1", port=proxy.port)

    async def ask() -> tuple[type[BaseException], float]:
        async with AsyncNode("ASKER.2", dsn, options=ASKING) as node:
            await asyncio.to_thread(proxy.stall)
            began = monotonic()
            try:
                await node.call("CALLEE", "?", timeout=TIMEOUT)
            except Exception as error:  # noqa: BLE001 - told to the test
                return type(error), monotonic() - began
        raise AssertionError("it was answered")

    with (
        Node("CALLEE", server.url("user2")),
        Node("ASKER.1", dsn, options=ASKING) as node,
        ThreadPoolExecutor() as pool,
    ):
        reading = pool.submit(lambda: list(node.messages()))
        proxy.stall()
        stuck = pool.submit(node.topic_status, "NEWS")
        began = monotonic()
        kind, ended = failed(pool.submit(node.call, "CALLEE", "?", timeout=TIMEOUT))
        asynchronous, also = asyncio.run(ask())
        node.stop()
        counted(
            FAULT, f"a question with a timeout of 1 s: {kind.__name__}, {asynchronous.__name__}",
            seconds=ended - began, asyncio_seconds=also,
        )  # fmt: skip
        assert issubclass(kind, ConnectionLost)
        assert issubclass(asynchronous, TimeoutError | ConnectionLost)
        assert max(ended - began, also) < TIMEOUT.total_seconds() + GRACE
        proxy.refuse()
        reading.result(SECONDS)
        assert isinstance(stuck.exception(SECONDS), ConnectionLost)
