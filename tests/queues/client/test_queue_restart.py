"""A server is restarted, or gone for a while, amid waits: they go on, and nothing is lost."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from project.postgres import Server
from psqlmessages import AsyncNode, Element, Node
from psqlmessages.exceptions import ConnectionLost
from tests.queues.client.conftest import QUICK
from tests.servers import SERVER
from tests.temporary_server import temporary_server

ROOT = Path(__file__).parents[3]
LONG = timedelta(minutes=3)
NUMBER = 300
RULES = (
    "('psqlmessages', 'READER*', 'Queue', 'Q', 'R', 5),"
    " ('psqlmessages', 'WRITER', 'Queue', 'Q', 'W', 5)"
)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory, pytestconfig) -> Iterator[Server]:
    """A server of its own, migrated, with rules for one queue."""
    folder = tmp_path_factory.mktemp("restarted")
    with temporary_server(folder, pytestconfig.stash[SERVER].binaries, rules=RULES) as own:
        yield own.server


def push_all(server: Server, middle: threading.Event) -> None:
    """Push numbers, each until it is known to be there: a key makes the second push nothing."""
    with Node("WRITER", server.url(), options=QUICK) as node:
        for number in range(NUMBER):
            if number == NUMBER // 2:
                middle.set()
            while True:
                try:
                    node.push("Q", number, key=str(number))
                    break
                except ConnectionLost:
                    continue


def numbers(taken: list[Element]) -> list[int]:
    return sorted(element.body for element in taken)


@pytest.mark.timeout(600)
def test_nothing_is_lost_when_the_server_is_killed_amid_traffic(restarted: Server):
    middle = threading.Event()
    taken: list[Element] = []

    async def work(node: AsyncNode) -> None:
        async for element in node.consume("Q", duration=timedelta(seconds=10)):
            taken.append(element)
            if len({element.body for element in taken}) == NUMBER:
                node.stop()

    async def test() -> None:
        async with AsyncNode("READER", restarted.url(), options=QUICK) as node:
            working = [asyncio.create_task(work(node)) for _ in range(3)]
            pushing = asyncio.create_task(asyncio.to_thread(push_all, restarted, middle))
            await asyncio.to_thread(middle.wait)
            await asyncio.to_thread(restarted.stop)
            await asyncio.to_thread(restarted.start)
            await pushing
            async with asyncio.timeout(LONG.total_seconds()):
                await asyncio.gather(*working)
            assert node.counters.reconnects == 1

    asyncio.run(test())
    assert {element.body for element in taken} == set(range(NUMBER))
