"""Fixtures: buses on the real database, their events, and a connection that sees the segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from queue import Queue
from typing import Any

import psycopg
import pytest

from psqlmessages import AsyncPubSub, PubSub
from psqlmessages.pubsub import Event
from tests.client.nodes import Driven, end
from tests.conftest import TestedServer
from tests.sql.conftest import Program

SECONDS = 60

NewBus = Callable[..., Any]
Connect = Callable[..., psycopg.Connection]


class Receiver(Queue[Event]):
    @classmethod
    def of(cls, bus: Any, channel: str = "A") -> Receiver:
        """Subscribe to a channel; return its queue of events."""
        receiver = cls()
        bus.subscribe(channel)
        bus.on(channel, receiver)
        return receiver

    def __call__(self, event: Event) -> None:
        self.put(event)

    def event(self) -> Event:
        return self.get(timeout=SECONDS)

    def payload(self) -> Any:
        return self.event().payload

    def payloads(self, last: object) -> list[Any]:
        return list(iter(self.payload, last))


def end_backend(superuser: psycopg.Connection, connection: Any) -> None:
    pid = connection.info.backend_pid
    assert superuser.execute("SELECT pg_terminate_backend(%s, 60000)", (pid,)).fetchone() == (True,)


class DrivenPubSub(Driven):
    kind = AsyncPubSub


KINDS: dict[str, type] = {"PubSub": PubSub, "AsyncPubSub": DrivenPubSub}


def buses(server: TestedServer, kind: type) -> Iterator[NewBus]:
    with ExitStack() as opened:

        def new(connection: Any = "", **settings: Any) -> Any:
            bus = kind(connection or server.url("user1"), **settings)
            opened.callback(end, bus)
            return bus

        yield new


@pytest.fixture
def new_bus(server: TestedServer) -> Iterator[NewBus]:
    yield from buses(server, PubSub)


@pytest.fixture(params=KINDS)
def any_bus(request, server: TestedServer) -> Iterator[NewBus]:
    yield from buses(server, KINDS[request.param])


@pytest.fixture
def connect(server: TestedServer) -> Iterator[Connect]:
    with ExitStack() as opened:

        def make(role: str = "user2", *, autocommit: bool = True) -> psycopg.Connection:
            connection = psycopg.connect(server.url(role), autocommit=autocommit)
            return opened.enter_context(closing(connection))

        yield make


@pytest.fixture
def superuser(server: TestedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.superuser_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def raw(connect: Connect) -> Callable[[str], object]:
    connection = connect()
    return lambda segment: connection.execute("SELECT pg_notify('A', %s)", (segment,))


@pytest.fixture
def listener(server: TestedServer) -> Iterator[Program]:
    """A plain connection: its payloads are the segments that travelled."""
    with closing(Program(server.url("user2"))) as program:
        program.execute('LISTEN "A"')
        yield program


@pytest.fixture
def bus(server: TestedServer) -> Iterator[PubSub]:
    with PubSub(server.url("user1"), interval=0.1) as bus:
        bus.subscribe("A")
        yield bus


@pytest.fixture
def receiver(bus: PubSub) -> Receiver:
    return Receiver.of(bus)
