"""Fixtures of the clients: WRITER of user1 pushes to Q, READER of user2 takes from it."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from psqlmessages import AsyncNode, Node, Options
from psqlmessages.client import queue_lines
from tests.client.conftest import long_closing
from tests.conftest import TestedServer
from tests.sql.conftest import World, world

__all__ = ["long_closing", "world"]

RULES = (
    "user1 WRITER Queue Q W 1", "user2 READER Queue Q RW 1", "user2 READER Queue Q.* R 1",
    "user1 WRITER Queue Q.* W 1", "user2 READER.* Queue Q R 1",
    "user2 READER Queue __deadletter__ R 1",
)  # fmt: skip
NOW = timedelta(0)
SOON = timedelta(seconds=100)
HOURS = timedelta(hours=12)
# What reconnects, does so quickly, and only where the connection is lost.
QUICK = Options(
    backoff_least=timedelta(milliseconds=20),
    backoff_most=timedelta(milliseconds=200),
    probe_timeout=SOON,
    reconnect_wait=SOON,
)

NewAsyncReader = Callable[..., AsyncNode]


@pytest.fixture
def queues(world: World, long_closing: None) -> World:
    """An empty world with the rules of WRITER and READER."""
    world.rules(*RULES)
    return world


@pytest.fixture
def writer(queues: World, server: TestedServer) -> Iterator[Node]:
    """WRITER, connected."""
    with Node("WRITER", server.url("user1")) as node:
        yield node


@pytest.fixture
def reader(queues: World, server: TestedServer) -> Iterator[Node]:
    """READER, connected."""
    with Node("READER", server.url("user2"), options=QUICK) as node:
        yield node


@pytest.fixture
def new_async_reader(queues: World, server: TestedServer) -> NewAsyncReader:
    """Make READER, or another one, for asyncio, not yet connected."""

    def make(ident: str = "READER") -> AsyncNode:
        return AsyncNode(ident, server.url("user2"), options=QUICK)

    return make


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that waits does not look unless it is told to."""
    monkeypatch.setattr(queue_lines, "_FIRST_PAUSE_SECONDS", HOURS.total_seconds())
    monkeypatch.setattr(queue_lines, "_LONGEST_PAUSE_SECONDS", HOURS.total_seconds())
