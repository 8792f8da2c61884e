"""Who answers: processes that send back what they are asked, and who asks them, for calls.py.

Every pair of PostgreSQL has a database of its own: a notification wakes all who listen in its
database, and no side shall pay for another's listeners.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import nats
import psycopg

from psqlmessages import AsyncNode, Node
from psqlmessages.client.messages import Message

ASKER, ANSWERER = "ASKER", "ANSWERER"
NOTIFY = "SELECT pg_notify(%s, %s)"
Tell = Callable[[], None]
Ask = Callable[[str], object]
AsyncAsk = Callable[[str], Awaitable[object]]


# Those that answer; each in a process of its own, until it is ended


def answer_by_node(dsn: str, tell: Tell) -> None:
    """Handle calls as docs/reference/client.md shows."""
    with Node(ANSWERER, dsn) as node:
        node.on_rpc(_body)
        tell()
        node.run()


def answer_by_async_node(dsn: str, tell: Tell) -> None:
    """Do the same on asyncio."""

    async def answer() -> None:
        async with AsyncNode(ANSWERER, dsn) as node:
            node.on_rpc(_body)
            tell()
            await node.run()

    asyncio.run(answer())


def _body(message: Message) -> Any:
    return message.body


def answer_by_hand(dsn: str, tell: Tell) -> None:
    """Notify what was notified."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN asked")
        tell()
        while True:
            for asked in connection.notifies(stop_after=1):
                payload = asked.payload
            connection.execute(NOTIFY, ["answered", payload])


def answer_by_async_hand(dsn: str, tell: Tell) -> None:
    """Do the same on asyncio."""

    async def answer() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute("LISTEN asked")
            tell()
            while True:
                async for asked in connection.notifies(stop_after=1):
                    payload = asked.payload
                await connection.execute(NOTIFY, ["answered", payload])

    asyncio.run(answer())


def answer_by_nats(url: str, tell: Tell) -> None:
    """Respond as the manual of nats-py shows."""

    async def respond(message: Any) -> None:
        await message.respond(message.data)

    async def answer() -> None:
        client = await nats.connect(url)
        await client.subscribe("asked", cb=respond)
        await client.flush()
        tell()
        await asyncio.Event().wait()

    asyncio.run(answer())


def run_answerer(answer: Callable[[str, Tell], None], address: str, pipe: Connection) -> None:
    """Be such a process."""
    answer(address, lambda: pipe.send(None))


@contextmanager
def answering(answer: Callable[[str, Tell], None], address: str) -> Iterator[None]:
    """Run a process that answers; it is ready when this is entered."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_answerer, args=(answer, address, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield
    finally:
        process.terminate()
        process.join()
        ours.close()


# Those that ask


def node_asker(dsn: str, stack: ExitStack) -> Ask:
    """Give Node.call."""
    node = stack.enter_context(Node(ASKER, dsn))
    return lambda body: node.call(ANSWERER, body)


def hand_asker(dsn: str, stack: ExitStack) -> Ask:
    """Notify one, and wait for the other's notification."""
    connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
    connection.execute("LISTEN answered")

    def ask(body: str) -> object:
        connection.execute(NOTIFY, ["asked", body])
        return [answer.payload for answer in connection.notifies(stop_after=1)]

    return ask


async def async_node_asker(dsn: str, stack: AsyncExitStack) -> AsyncAsk:
    """Give AsyncNode.call."""
    node = await stack.enter_async_context(AsyncNode(ASKER, dsn))
    return lambda body: node.call(ANSWERER, body)


async def async_hand_asker(dsn: str, stack: AsyncExitStack) -> AsyncAsk:
    """Do as hand_asker, on asyncio."""
    opened = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    connection = await stack.enter_async_context(opened)
    await connection.execute("LISTEN answered")

    async def ask(body: str) -> object:
        await connection.execute(NOTIFY, ["asked", body])
        return [answer.payload async for answer in connection.notifies(stop_after=1)]

    return ask


async def nats_asker(url: str, stack: AsyncExitStack) -> AsyncAsk:
    """Give the request of nats-py."""
    client = await nats.connect(url)
    stack.push_async_callback(client.close)
    return lambda body: client.request("asked", body.encode(), timeout=5)
