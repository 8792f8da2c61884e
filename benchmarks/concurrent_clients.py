"""Clients of benchmarks.concurrency: for each system, the call that the tasks of a process make."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from benchmarks.call_sides import ANSWERER, CALLER
from benchmarks.send_receiver import CHANNEL, RECEIVER, TOPIC
from psqlmessages import AsyncNode

BODY = "x" * 1000
SENDER, STREAM, QUEUE = "SENDER", "STORED", "QUEUE"
# Equal to the number of tasks.
BATCH = 100
SETUP = f"""
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        (current_user, '{SENDER}.*', 'Topic', '{TOPIC}', 'W', 60),
        (current_user, '{RECEIVER}', 'Topic', '{TOPIC}', 'R', 60),
        (current_user, '{SENDER}.*', 'Topic', '{STREAM}', 'W', 60),
        (current_user, '{RECEIVER}', 'Topic', '{STREAM}', 'R', 60),
        (current_user, '{SENDER}.*', 'Queue', '{QUEUE}', 'RW', 60),
        (current_user, '{CALLER}.*', 'Rpc', '{ANSWERER}.*', 'W', 60),
        (current_user, '{ANSWERER}.*', 'Rpc', '{CALLER}.*', 'W', 60)
"""  # noqa: S608 - constants
SUBSCRIBE = f"SELECT count(*) FROM messages.subscribe('{RECEIVER}', '{STREAM}', 600, 1)"  # noqa: S608


class Finished(NamedTuple):
    """The elements that a client has taken from its queue, and when the last one was done."""

    elements: int
    at: float


@dataclass(frozen=True)
class Client:
    """All tasks call ``call``. If they push to a queue, ``finish`` then takes all its elements."""

    call: Callable[[], Awaitable[object]]
    finish: Callable[[], Awaitable[Finished]] | None = None


# Takes an address and the number of the process.
OpenClient = Callable[[str, int], AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def topic_send(dsn: str, number: int) -> AsyncIterator[Client]:
    """Send with an AsyncNode."""
    async with AsyncNode(f"{SENDER}.{number}", dsn) as node:
        await node.topic_notify(TOPIC)
        yield Client(lambda: node.topic_send(TOPIC, BODY))


@asynccontextmanager
async def publish(dsn: str, number: int) -> AsyncIterator[Client]:
    """Publish with an AsyncNode; each call waits for the disk."""
    async with AsyncNode(f"{SENDER}.{number}", dsn) as node:
        yield Client(lambda: node.publish(STREAM, BODY))


@asynccontextmanager
async def push_and_consume(dsn: str, number: int) -> AsyncIterator[Client]:
    """Push with an AsyncNode, then consume until the queue is empty."""
    async with AsyncNode(f"{SENDER}.{number}", dsn) as node:

        async def consume() -> Finished:
            elements = 0
            async for _ in node.consume(QUEUE, batch=BATCH, idle=timedelta(0)):
                elements += 1
            return Finished(elements, monotonic())

        yield Client(lambda: node.push(QUEUE, BODY), consume)


@asynccontextmanager
async def call(dsn: str, number: int) -> AsyncIterator[Client]:
    """Call the answering node with the same number, with an AsyncNode."""
    async with AsyncNode(f"{CALLER}.{number}", dsn) as node:
        yield Client(lambda: node.call(f"{ANSWERER}.{number}", BODY))


@asynccontextmanager
async def redis_publish(port: str, number: int) -> AsyncIterator[Client]:
    """Publish with redis.asyncio, whose pool gives each task a connection."""
    import redis.asyncio

    async with redis.asyncio.Redis(port=int(port)) as client:
        yield Client(lambda: client.publish(CHANNEL, BODY))


@asynccontextmanager
async def _connect_nats(port: str) -> AsyncIterator[Any]:
    import nats

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def nats_publish(port: str, number: int) -> AsyncIterator[Client]:
    """Publish and flush with nats-py."""
    content = BODY.encode()
    async with _connect_nats(port) as client:

        async def send() -> None:
            await client.publish(CHANNEL, content)
            await client.flush()

        yield Client(send)


@asynccontextmanager
async def jetstream_publish(port: str, number: int) -> AsyncIterator[Client]:
    """Publish to a stream with nats-py, and wait for the answer."""
    content = BODY.encode()
    async with _connect_nats(port) as client:
        stream = client.jetstream()
        await stream.add_stream(name=STREAM, subjects=[STREAM], storage="file")
        yield Client(lambda: stream.publish(STREAM, content))


@asynccontextmanager
async def nats_request(port: str, number: int) -> AsyncIterator[Client]:
    """Call with nats-py."""
    content = BODY.encode()
    async with _connect_nats(port) as client:
        yield Client(lambda: client.request("request", content, timeout=60))


@asynccontextmanager
async def pgqueuer(dsn: str, number: int) -> AsyncIterator[Client]:
    """Enqueue with PgQueuer on asyncpg's pool, then run its manager until no job is left."""
    import asyncpg
    from pgqueuer.qm import QueueManager
    from pgqueuer.queries import Queries
    from pgqueuer.types import QueueExecutionMode

    logging.getLogger("pgqueuer").setLevel(logging.WARNING)
    async with asyncpg.create_pool(dsn) as pool:
        queries = Queries.from_asyncpg_pool(pool)
        content = BODY.encode()

        async def drain() -> Finished:
            finished = Finished(0, monotonic())
            manager = QueueManager(queries)

            @manager.entrypoint("work")
            async def work(job: Any) -> None:
                nonlocal finished
                finished = Finished(finished.elements + 1, monotonic())

            await manager.run(batch_size=BATCH, mode=QueueExecutionMode.drain)
            return finished

        yield Client(lambda: queries.enqueue("work", content), drain)


async def install_pgqueuer(dsn: str) -> None:
    """Create the tables of PgQueuer."""
    import asyncpg
    from pgqueuer.queries import Queries

    connection = await asyncpg.connect(dsn)
    try:
        await Queries.from_asyncpg_connection(connection).install()
    finally:
        await connection.close()
