"""Readers that wait for what a transaction has in hand, whose end nobody tells of."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from psqlmessages import AsyncNode, Node
from tests.conftest import TestedServer
from tests.queues.client.conftest import QUICK, SOON
from tests.reliability.counts import counted
from tests.sql.conftest import World

Waiter = Callable[[TestedServer], list[object]]

WAITED_FOR = "SELECT awaited_until > clock_timestamp() FROM psqlmessages_queue WHERE name = 'Q'"


def by_node(server: TestedServer) -> list[object]:
    with Node("READER", server.url("user2"), options=QUICK) as node:
        return [element.body for element in node.reserve("Q", timeout=SOON)]


def by_async_node(server: TestedServer) -> list[object]:
    async def take() -> list[object]:
        async with AsyncNode("READER", server.url("user2"), options=QUICK) as node:
            return [element.body for element in await node.reserve("Q", timeout=SOON)]

    return asyncio.run(take())


@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize("waiter", [by_node, by_async_node])
def test_what_a_killed_session_had_taken_is_taken_within_a_second(
    queues: World, writer: Node, server: TestedServer, waiter: Waiter
) -> None:
    writer.push("Q", "x")
    holder = queues.program("user2")
    holder.connection.execute("BEGIN")
    assert [row.body for row in holder.elements("pop", "READER", "Q")] == ["x"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(waiter, server)
        queues.wait_for(WAITED_FOR)
        queues.kill(holder)
        killed_at = monotonic()
        assert waiting.result(SOON.total_seconds()) == ["x"]
        seconds = monotonic() - killed_at
    counted(
        "a reader is killed between fetch and commit",
        f"an element that it had popped, until one that waits has it, {waiter.__name__}",
        elements=1,
        lost=0,
        seconds=round(seconds, 2),
    )
