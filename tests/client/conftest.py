"""Fixtures: rules of two nodes on the real database."""

from collections.abc import Callable, Iterator

import psycopg
import pytest

from psqlmessages import AsyncNode, Node, Options
from psqlmessages.client import async_link, link, queue_async_taker
from tests.client.programs import LONG_CLOSING
from tests.conftest import TestedServer

Rule = tuple[str, str, str, str, str, int]
AddRules = Callable[..., None]

CONVERSATION: tuple[Rule, ...] = (
    ("user1", "NODE1", "Rpc", "NODE2", "W", 60),
    ("user2", "NODE2", "Rpc", "NODE1", "W", 60),
    ("user1", "NODE1", "Topic", "ORDERS", "RW", 60),
    ("user2", "NODE2", "Topic", "ORDERS", "RW", 60),
    ("user2", "NODE2", "Topic", "ORDERS.*", "RW", 60),
    ("user1", "NODE1", "Topic", "ORDERS.*", "RW", 60),
    ("user2", "NODE2", "Topic", "ORDERS*", "O", 60),
)


@pytest.fixture
def owner(server: TestedServer) -> Iterator[psycopg.Connection]:
    """A connection of the owner of the tables."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        yield connection


@pytest.fixture
def superuser(server: TestedServer) -> Iterator[psycopg.Connection]:
    """A connection that may end those of others."""
    with psycopg.connect(server.superuser_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def add_rules(owner: psycopg.Connection) -> Iterator[AddRules]:
    """Add rules, which are gone after the test."""

    def add(*rules: Rule) -> None:
        with owner.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
                " VALUES (%s, %s, %s, %s, %s, %s)",
                rules,
            )

    yield add
    owner.execute("DELETE FROM messages.auth")


@pytest.fixture
def long_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a close that does not end at once last so long that no machine is as slow."""
    for module in (async_link, link, queue_async_taker):
        monkeypatch.setattr(module, "_CLOSING_SECONDS", LONG_CLOSING)


@pytest.fixture
def conversation(add_rules: AddRules) -> None:
    """NODE1 of user1 and NODE2 of user2 may call each other and share the topic ORDERS."""
    add_rules(*CONVERSATION)


@pytest.fixture
def node1(server: TestedServer, conversation: None) -> Iterator[Node]:
    """NODE1, connected."""
    with Node("NODE1", server.url("user1")) as node:
        yield node


@pytest.fixture
def node2(server: TestedServer, conversation: None) -> Iterator[Node]:
    """NODE2, connected."""
    with Node("NODE2", server.url("user2")) as node:
        yield node


@pytest.fixture
def new_async_node(server: TestedServer, conversation: None) -> Callable[..., AsyncNode]:
    """Make NODE1 or NODE2 for asyncio, not yet connected."""

    def make(ident: str, options: Options | None = None) -> AsyncNode:
        return AsyncNode(ident, server.url(ident.replace("NODE", "user")), options=options)

    return make
