"""Fixtures: NODE1 of user1 and NODE2 of user2 in an else empty message system."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from psqlmessages import AsyncNode, Node, Options
from psqlmessages.client import async_queue_consumer, async_session, session
from tests.client.nodes import QUICK, Driven, end
from tests.client.programs import LONG_CLOSING
from tests.conftest import TestedServer
from tests.sql.conftest import World, world

__all__ = ["world"]

RULES = (
    "user1 NODE1 Rpc NODE2 W 60", "user2 NODE2 Rpc NODE1 W 60", "user1 NODE1 Topic ORDERS RW 60",
    "user2 NODE2 Topic ORDERS RW 60", "user2 NODE2 Topic ORDERS.* RW 60",
    "user1 NODE1 Topic ORDERS.* RW 60", "user2 NODE2 Topic ORDERS* O 60",
)  # fmt: skip

NewNode = Callable[..., Any]


@pytest.fixture
def owner(world: World) -> psycopg.Connection:
    return world.owner.connection


@pytest.fixture
def conversation(world: World) -> Iterator[World]:
    """NODE1 of user1 and NODE2 of user2 may call each other and share the topic ORDERS."""
    world.rules(*RULES)
    yield world
    world.owner.connection.execute("DELETE FROM messages.auth")


@pytest.fixture
def long_closing(monkeypatch) -> None:
    """Let a close that hangs last longer than any slow machine would take."""
    for module in (async_session, session, async_queue_consumer):
        monkeypatch.setattr(module, "_CLOSING_SECONDS", LONG_CLOSING)


@pytest.fixture(params=[Node, Driven], ids=["sync", "async"])
def new_node(request, conversation: World) -> Iterator[NewNode]:
    """Open NODE1 or NODE2: a Node, or an AsyncNode that is used like one."""
    made = []

    def make(ident: str = "NODE1", dsn: str | None = None, options: Options = QUICK) -> Any:
        dsn = dsn or conversation.server.url(ident.replace("NODE", "user"))
        node = request.param(ident, dsn, options=options)
        made.append(node)
        node.open()
        return node

    yield make
    for node in made:
        end(node)


@pytest.fixture
def node(new_node: NewNode) -> Any:
    return new_node()


@pytest.fixture
def node1(server: TestedServer, conversation: World) -> Iterator[Node]:
    with Node("NODE1", server.url("user1")) as node:
        yield node


@pytest.fixture
def node2(server: TestedServer, conversation: World) -> Iterator[Node]:
    with Node("NODE2", server.url("user2")) as node:
        yield node


@pytest.fixture
def new_async_node(server: TestedServer, conversation: World) -> Callable[..., AsyncNode]:
    def make(ident: str, options: Options | None = None) -> AsyncNode:
        return AsyncNode(ident, server.url(ident.replace("NODE", "user")), options=options)

    return make
