"""Sides of the benchmark of calls: processes that answer with the request's body, and callers.

Each pair on PostgreSQL has its own database, because a notification wakes all listeners of its
database.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psycopg

from psqlmessages import AsyncNode, Node
from psqlmessages.client.messages import Message

CALLER, ANSWERER = "CALLER", "ANSWERER"
NOTIFY = "SELECT pg_notify(%s, %s)"
OnReady = Callable[[], None]
Call = Callable[[str], object]
AsyncCall = Callable[[str], Awaitable[object]]


# Answering processes


def answer_with_node(dsn: str, on_ready: OnReady) -> None:
    """Handle calls as the documentation shows."""
    with Node(ANSWERER, dsn) as node:
        node.on_rpc(_body)
        on_ready()
        node.run()


def answer_with_async_node(dsn: str, on_ready: OnReady, ident: str = ANSWERER) -> None:
    """Do the same as `answer_with_node`, with asyncio."""

    async def body(message: Message) -> Any:
        return message.body

    async def answer() -> None:
        async with AsyncNode(ident, dsn) as node:
            node.on_rpc(body)
            on_ready()
            await node.run()

    asyncio.run(answer())


def _body(message: Message) -> Any:
    return message.body


def answer_with_psycopg(dsn: str, on_ready: OnReady) -> None:
    """Send each notified payload back by pg_notify."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN request")
        on_ready()
        while True:
            for request in connection.notifies(stop_after=1):
                payload = request.payload
            connection.execute(NOTIFY, ["answer", payload])


def answer_with_async_psycopg(dsn: str, on_ready: OnReady) -> None:
    """Do the same as `answer_with_psycopg`, with asyncio."""

    async def answer() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute("LISTEN request")
            on_ready()
            while True:
                async for request in connection.notifies(stop_after=1):
                    payload = request.payload
                await connection.execute(NOTIFY, ["answer", payload])

    asyncio.run(answer())


def answer_with_nats(url: str, on_ready: OnReady) -> None:
    """Respond as the manual of nats-py shows."""
    import nats

    async def respond(message: Any) -> None:
        await message.respond(message.data)

    async def answer() -> None:
        client = await nats.connect(url)
        await client.subscribe("request", cb=respond)
        await client.flush()
        on_ready()
        await asyncio.Event().wait()

    asyncio.run(answer())


Answerer = Callable[[str, OnReady], None]


def run_answerer(answer: Answerer, address: str, pipe: Connection) -> None:
    """Answer calls; this runs in the answering process."""
    answer(address, lambda: pipe.send(None))


@contextmanager
def answering(answer: Answerer, address: str) -> Iterator[None]:
    """Run an answering process during the block, and wait until it is ready."""
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


# Callers


def node_call(dsn: str, stack: ExitStack) -> Call:
    """Return a function that calls with a Node."""
    node = stack.enter_context(Node(CALLER, dsn))
    return lambda body: node.call(ANSWERER, body)


def psycopg_call(dsn: str, stack: ExitStack) -> Call:
    """Return a function that sends a notification and waits for the notification that answers."""
    connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
    connection.execute("LISTEN answer")

    def call(body: str) -> object:
        connection.execute(NOTIFY, ["request", body])
        return [answer.payload for answer in connection.notifies(stop_after=1)]

    return call


async def async_node_call(dsn: str, stack: AsyncExitStack) -> AsyncCall:
    """Return a function that calls with an AsyncNode."""
    node = await stack.enter_async_context(AsyncNode(CALLER, dsn))
    return lambda body: node.call(ANSWERER, body)


async def async_psycopg_call(dsn: str, stack: AsyncExitStack) -> AsyncCall:
    """Do the same as `psycopg_call` with asyncio."""
    opened = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    connection = await stack.enter_async_context(opened)
    await connection.execute("LISTEN answer")

    async def call(body: str) -> object:
        await connection.execute(NOTIFY, ["request", body])
        return [answer.payload async for answer in connection.notifies(stop_after=1)]

    return call


async def nats_call(url: str, stack: AsyncExitStack) -> AsyncCall:
    """Return a function that calls request of nats-py."""
    import nats

    client = await nats.connect(url)
    stack.push_async_callback(client.close)
    return lambda body: client.request("request", body.encode(), timeout=5)
