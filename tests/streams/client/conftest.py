"""Fixtures of the clients: READER of user2 subscribes to what WRITER of user1 publishes."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from psqlmessages import AsyncNode, Node, Options
from psqlmessages.client import subscription
from tests.client.conftest import long_closing
from tests.conftest import TestedServer
from tests.sql.conftest import World

__all__ = ["long_closing"]

RULES = (
    # A topic that no rule names goes with its last subscription and message.
    "user1 WRITER Topic NEWS W 60", *(f"user1 WRITER Topic NEWS.{n} W 60" for n in range(8)),
    "user1 WRITER Topic NEWS* W 60", "user1 WRITER Topic BOTH RW 60",
    "user2 READER Topic NEWS* R 60",
)  # fmt: skip
SOON = timedelta(seconds=60)
# Nothing is found by looking again within a test.
NO_POLLING = Options(stream_poll_interval=timedelta(hours=1))
HOURS = timedelta(hours=12)

NewReader = Callable[..., Node]


@pytest.fixture
def stream(server: TestedServer, long_closing: None) -> Iterator[World]:
    world = World(server)
    tables = "psqlmessages_streammessage, psqlmessages_subscription, messages._last_removed_message"
    world.execute(f"TRUNCATE {tables}")
    world.rules(*RULES)
    yield world
    world.close()


@pytest.fixture
def writer(stream: World, server: TestedServer) -> Iterator[Node]:
    with Node("WRITER", server.url("user1")) as node:
        node.publish("NEWS", "before anyone subscribes")
        yield node


@pytest.fixture
def new_reader(writer: Node, server: TestedServer) -> NewReader:
    def make(options: Options | None = NO_POLLING) -> Node:
        return Node("READER", server.url("user2"), options=options)

    return make


@pytest.fixture
def reader(new_reader: NewReader) -> Iterator[Node]:
    with new_reader() as node:
        yield node


@pytest.fixture
def async_reader(writer: Node, server: TestedServer) -> AsyncNode:
    return AsyncNode("READER", server.url("user2"), options=NO_POLLING)


@pytest.fixture
def no_second_look(monkeypatch) -> None:
    """A reader does not even look again soon after it came."""
    monkeypatch.setattr(subscription, "_FIRST_POLL_SECONDS", HOURS.total_seconds())
