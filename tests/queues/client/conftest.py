"""Fixtures of the clients: WRITER of user1 pushes to Q, READER of user2 takes from it."""

from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from psqlmessages import AsyncNode, Node
from psqlmessages.client import wakeups
from tests.client.conftest import long_closing
from tests.client.nodes import NOW, QUICK, Driven, end
from tests.conftest import TestedServer
from tests.sql.conftest import World, world

__all__ = ["NOW", "QUICK", "long_closing", "world"]

RULES = (
    "user1 WRITER Queue Q W 1", "user2 READER Queue Q RW 1", "user2 READER Queue Q.* R 1",
    "user1 WRITER Queue Q.* W 1", "user2 READER.* Queue Q R 1",
    "user2 READER Queue __deadletter__ R 1",
)  # fmt: skip
SOON = timedelta(seconds=100)
HOURS = timedelta(hours=12)
STATE = """
    SELECT body, tries, lease IS NOT NULL AND available_at > clock_timestamp()
    FROM psqlmessages_element ORDER BY id
"""
NewAsyncReader = Callable[..., AsyncNode]


@pytest.fixture
def queues(world: World, long_closing: None) -> World:
    world.rules(*RULES)
    return world


@pytest.fixture
def writer(queues: World, server: TestedServer) -> Iterator[Node]:
    with Node("WRITER", server.url("user1")) as node:
        yield node


@pytest.fixture
def reader(queues: World, server: TestedServer) -> Iterator[Node]:
    with Node("READER", server.url("user2"), options=QUICK) as node:
        yield node


@pytest.fixture
def new_async_reader(queues: World, server: TestedServer) -> NewAsyncReader:
    def make(ident: str = "READER") -> AsyncNode:
        return AsyncNode(ident, server.url("user2"), options=QUICK)

    return make


@pytest.fixture
def no_polling(monkeypatch) -> None:
    """A reader that waits does not look unless it is told to."""
    monkeypatch.setattr(wakeups, "MIN_POLL_SECONDS", HOURS.total_seconds())
    monkeypatch.setattr(wakeups, "MAX_POLL_SECONDS", HOURS.total_seconds())


class Consuming(Driven):
    """An AsyncNode that is used like a Node; a loop that was left has ended."""

    def _each(self, items: AsyncGenerator[Any]) -> Iterator[Any]:
        try:
            yield from super()._each(items)
        finally:
            self._do(items.aclose)


@pytest.fixture(params=[Node, Consuming], ids=["sync", "async"])
def either(queues: World, server: TestedServer, request) -> Iterator[Any]:
    node = request.param("READER", server.url("user2"), options=QUICK)
    node.open()
    yield node
    end(node)


def listened(queues: World) -> None:
    """Wait until somebody waits for the queue Q."""
    waits = "name = 'Q' AND awaited_until > clock_timestamp()"
    queues.wait_for(f"SELECT EXISTS (SELECT FROM psqlmessages_queue WHERE {waits})")


def state(queues: World) -> list[tuple[str, int, bool]]:
    """Body, tries, and whether it is reserved, of each element that is left."""
    return queues.execute(STATE).fetchall()


def left(queues: World) -> tuple[int, int]:
    """How many elements are left, and how many of these have a lease."""
    count = "SELECT count(*), count(lease) FROM psqlmessages_element"
    ((elements, leases),) = queues.execute(count).fetchall()
    return elements, leases
