"""Methods to send in the benchmark of sends: psqlmessages, plain PostgreSQL, Redis, NATS."""

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
    CREATE UNLOGGED TABLE plain_bodies (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text NOT NULL
    );
    -- psqlmessages stores large bodies in the same way.
    ALTER TABLE plain_bodies ALTER body SET STORAGE EXTERNAL
"""  # noqa: S608 - constants
NOTIFY = "SELECT pg_notify(%s, %s)"
# PostgreSQL merges equal payloads of a transaction, so each has a number.
NOTIFY_MANY = """
    SELECT count(pg_notify(%s, b.n || ' ' || b.body))
    FROM unnest(%b::text[]) WITH ORDINALITY AS b (body, n)
"""
STORE_AND_NOTIFY = """
    WITH stored AS (INSERT INTO plain_bodies (body) VALUES (%s) RETURNING id)
    SELECT pg_notify(%s, id::text) FROM stored
"""
SEND = "SELECT messages.topic_send(%s, %s)"


class SendMethod(NamedTuple):
    """``send`` makes a number of calls with ``batch`` messages each. ``receive``: a key of WAYS."""

    send: Callable[[int], object]
    receive: str
    batch: int = 1


def repeat(call: Callable[[], object]) -> Callable[[int], None]:
    """Return a function that makes a call a number of times."""

    def send(calls: int) -> None:
        for _ in range(calls):
            call()

    return send


class Postgres:
    """The methods of a Node, and plain PostgreSQL on the same connection."""

    def __init__(self, node: Node) -> None:
        connection = node._session._connection
        if connection is None:
            raise RuntimeError("the sender lost its connection")
        self._node, self._connection = node, connection

    def _execute(self, statement: str, *parameters: Any) -> Callable[[int], object]:
        connection = self._connection
        # Wait as psycopg does, because `wait` of a node's connection also limits the time.
        plain = partial(psycopg.Connection.wait, connection)

        def send(calls: int) -> None:
            cursor = connection.cursor()
            connection.wait = plain  # type: ignore[method-assign]
            try:
                for _ in range(calls):
                    cursor.execute(statement, parameters, prepare=True).fetchone()
            finally:
                del connection.wait

        return send

    def node(self, body: str, receive: str) -> SendMethod:
        """Send one by one with the Node."""
        return SendMethod(repeat(lambda: self._node.topic_send(TOPIC, body)), receive)

    def node_many(self, bodies: list[str]) -> SendMethod:
        """Send batches with the Node."""
        send = repeat(lambda: self._node.topic_send_many(TOPIC, bodies))
        return SendMethod(send, "receive_with_node", len(bodies))

    def function(self, body: str) -> SendMethod:
        """Call the SQL function without the Node."""
        return SendMethod(self._execute(SEND, TOPIC, body), "count")

    def notify(self, body: str) -> SendMethod:
        """Call pg_notify."""
        return SendMethod(self._execute(NOTIFY, CHANNEL, body), "count")

    def notify_many(self, bodies: list[str]) -> SendMethod:
        """Call pg_notify for a batch in one statement."""
        send = self._execute(NOTIFY_MANY, CHANNEL, bodies)
        return SendMethod(send, "receive_with_psycopg", len(bodies))

    def store_and_notify(self, body: str) -> SendMethod:
        """Store a large body, and notify its key, in one statement."""
        return SendMethod(self._execute(STORE_AND_NOTIFY, body, CHANNEL), "fetch_with_psycopg")


@contextmanager
def open_postgres(dsn: str) -> Iterator[Postgres]:
    """Open a node that may send."""
    with Node(SENDER, dsn) as node:
        node.topic_notify(TOPIC)
        yield Postgres(node)


@contextmanager
def open_redis(port: int) -> Iterator[Callable[[str, int], SendMethod]]:
    """Connect with redis-py; yield a function that returns the method for a body and a batch."""
    import redis

    with redis.Redis(port=port) as client:

        def method(body: str, batch: int) -> SendMethod:
            def send_many() -> None:
                with client.pipeline(transaction=False) as pipeline:
                    for _ in range(batch):
                        pipeline.publish(CHANNEL, body)
                    pipeline.execute()

            send_one = repeat(lambda: client.publish(CHANNEL, body))
            send = send_one if batch == 1 else repeat(send_many)
            return SendMethod(send, "receive_from_redis", batch)

        yield method


def _repeat_async(
    loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[object]]
) -> Callable[[int], None]:
    async def send(calls: int) -> None:
        for _ in range(calls):
            await call()

    return lambda calls: loop.run_until_complete(send(calls))


@contextmanager
def open_async_node(dsn: str) -> Iterator[Callable[[str], SendMethod]]:
    """Open an AsyncNode; yield a function that returns the method for a body."""
    node = AsyncNode(ASYNC_SENDER, dsn)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        runner.run(node.open())
        runner.run(node.topic_notify(TOPIC))
        try:
            yield lambda body: SendMethod(
                _repeat_async(loop, lambda: node.topic_send(TOPIC, body)), "receive_with_node"
            )
        finally:
            runner.run(node.close())


@contextmanager
def open_nats(port: int) -> Iterator[Callable[[str], SendMethod]]:
    """Connect with nats-py; yield a function that returns the method for a body."""
    import nats

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        client = runner.run(nats.connect(f"nats://127.0.0.1:{port}"))

        def method(body: str) -> SendMethod:
            content = body.encode()

            async def send() -> None:
                await client.publish(CHANNEL, content)
                await client.flush()

            return SendMethod(_repeat_async(loop, send), "receive_from_nats")

        try:
            yield method
        finally:
            runner.run(client.close())
