"""The senders of the benchmark of sends: ours, PostgreSQL by hand, Redis, NATS.

A way to send is a function that makes so many calls, and the receiver's way that fits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import psycopg

from benchmarks.send_receiver import CHANNEL, RECEIVER, TOPIC
from psqlmessages import AsyncNode, Node

SENDER, ASYNC_SENDER = "SENDER", "ASYNC_SENDER"
PREPARE = f"""
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES (session_user, '{SENDER}*', 'Topic', '{TOPIC}', 'W', 60),
           (session_user, '{ASYNC_SENDER}', 'Topic', '{TOPIC}', 'W', 60),
           (session_user, '{RECEIVER}', 'Topic', '{TOPIC}', 'R', 60);
    CREATE UNLOGGED TABLE kept_by_hand (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text NOT NULL
    );
    -- As our own bodies are stored.
    ALTER TABLE kept_by_hand ALTER body SET STORAGE EXTERNAL
"""  # noqa: S608 - constants
NOTIFY = "SELECT pg_notify(%s, %s)"
# Equal payloads of one transaction would arrive as one, so each gets its number.
NOTIFY_MANY = """
    SELECT count(pg_notify(%s, b.n || ' ' || b.body))
    FROM unnest(%b::text[]) WITH ORDINALITY AS b (body, n)
"""
KEEP = """
    WITH kept AS (INSERT INTO kept_by_hand (body) VALUES (%s) RETURNING id)
    SELECT pg_notify(%s, id::text) FROM kept
"""
SEND = "SELECT messages.topic_send(%s, %s)"


class Way(NamedTuple):
    """``act`` makes so many calls of ``batch`` messages each; ``receiving`` names the other end."""

    act: Callable[[int], object]
    receiving: str
    batch: int = 1


def repeated(call: Callable[[], object]) -> Callable[[int], None]:
    """Make a way's act of one call."""

    def act(calls: int) -> None:
        for _ in range(calls):
            call()

    return act


class Postgres:
    """A Node, and PostgreSQL by hand on the same connection."""

    def __init__(self, node: Node) -> None:
        connection = node._link.connection
        if connection is None:
            raise RuntimeError("the sender lost its connection")
        self._node, self._connection = node, connection

    def _by_hand(self, statement: str, *parameters: Any) -> Callable[[int], object]:
        connection = self._connection
        # As psycopg itself waits: a node's connection also bounds the time.
        plain = partial(psycopg.Connection.wait, connection)

        def act(calls: int) -> None:
            cursor = connection.cursor()
            connection.wait = plain  # type: ignore[method-assign]
            try:
                for _ in range(calls):
                    cursor.execute(statement, parameters, prepare=True).fetchone()
            finally:
                del connection.wait

        return act

    def node(self, body: str, receiving: str) -> Way:
        """Send one by one."""
        return Way(repeated(lambda: self._node.topic_send(TOPIC, body)), receiving)

    def node_many(self, bodies: list[str]) -> Way:
        """Send in batches."""
        send = repeated(lambda: self._node.topic_send_many(TOPIC, bodies))
        return Way(send, "take_by_node", len(bodies))

    def function(self, body: str) -> Way:
        """Call the SQL function without a Node's handling."""
        return Way(self._by_hand(SEND, TOPIC, body), "count")

    def bare(self, body: str) -> Way:
        """Notify by hand."""
        return Way(self._by_hand(NOTIFY, CHANNEL, body), "count")

    def bare_many(self, bodies: list[str]) -> Way:
        """Notify by hand in batches."""
        return Way(self._by_hand(NOTIFY_MANY, CHANNEL, bodies), "take_by_hand", len(bodies))

    def kept(self, body: str) -> Way:
        """Keep a large body by hand, and notify its key, in one statement."""
        return Way(self._by_hand(KEEP, body, CHANNEL), "fetch_by_hand")


@contextmanager
def postgres(dsn: str) -> Iterator[Postgres]:
    """Open a node that may send."""
    with Node(SENDER, dsn) as node:
        node.topic_notify(TOPIC)
        yield Postgres(node)


@contextmanager
def redis_ways(port: int) -> Iterator[Callable[[str, int], Way]]:
    """Connect by redis-py: a way of PUBLISH one by one, or of pipelines."""
    import redis

    with redis.Redis(port=port) as client:

        def way(body: str, batch: int) -> Way:
            def send_many() -> None:
                with client.pipeline(transaction=False) as pipeline:
                    for _ in range(batch):
                        pipeline.publish(CHANNEL, body)
                    pipeline.execute()

            one = repeated(lambda: client.publish(CHANNEL, body))
            return Way(one if batch == 1 else repeated(send_many), "take_from_redis", batch)

        yield way


def _awaited(
    loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[object]]
) -> Callable[[int], None]:
    async def repeat(calls: int) -> None:
        for _ in range(calls):
            await call()

    return lambda calls: loop.run_until_complete(repeat(calls))


@contextmanager
def async_node(dsn: str) -> Iterator[Callable[[str], Way]]:
    """Open an AsyncNode that may send."""
    node = AsyncNode(ASYNC_SENDER, dsn)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        runner.run(node.open())
        runner.run(node.topic_notify(TOPIC))
        try:
            yield lambda body: Way(
                _awaited(loop, lambda: node.topic_send(TOPIC, body)), "take_by_node"
            )
        finally:
            runner.run(node.close())


@contextmanager
def nats_ways(port: int) -> Iterator[Callable[[str], Way]]:
    """Connect by nats-py: a way of publish and flush."""
    import nats

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        client = runner.run(nats.connect(f"nats://127.0.0.1:{port}"))

        def way(body: str) -> Way:
            content = body.encode()

            async def send() -> None:
                await client.publish(CHANNEL, content)
                await client.flush()

            return Way(_awaited(loop, send), "take_from_nats")

        try:
            yield way
        finally:
            runner.run(client.close())
