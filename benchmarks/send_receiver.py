"""The receiver of the benchmark of sends: a process that receives in one of several ways.

Each way connects only while it is measured, so that notifications wake no other listener. A way
reports when it listens, and when it has received all messages.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import Connection as Pipe
from time import monotonic
from typing import Any, NamedTuple

import psycopg

from psqlmessages import Node
from psqlmessages.client.connection import is_readable

RECEIVER, TOPIC, CHANNEL = "RECEIVER", "SENDS", "sends_by_hand"
EVENT = '{"Type":"Sys"'
FETCH = "SELECT body FROM plain_bodies WHERE id = %s"
TIMEOUT = timedelta(seconds=60)
Report = Callable[[], None]


class Addresses(NamedTuple):
    """The address of PostgreSQL, and the ports of brokers; 0 if a broker does not run."""

    dsn: str
    redis: int
    nats: int


def count(addresses: Addresses, messages: int, report: Report) -> None:
    """Count notifications of the topic and of the plain channel on a node's connection."""
    with Node(RECEIVER, addresses.dsn) as node:
        node.topic_listen(TOPIC)
        connection, buffer = node._session._connection, node._session._buffer
        if connection is None or buffer is None:
            raise RuntimeError("the receiver lost its connection")
        connection.execute(f"LISTEN {CHANNEL}")
        for _ in node.messages(timeout=timedelta(0)):
            pass
        report()
        while messages > 0:
            if not is_readable(connection.fileno(), TIMEOUT.total_seconds()):
                raise TimeoutError(f"{messages} notifications are missing")
            buffer.read()
            # System events are not counted.
            messages -= sum(not payload.startswith(EVENT) for _, payload in buffer.take())
        report()


def receive_with_node(addresses: Addresses, messages: int, report: Report) -> None:
    """Receive whole messages with a Node."""
    with Node(RECEIVER, addresses.dsn) as node:
        node.topic_listen(TOPIC)
        for _ in node.messages(timeout=timedelta(0)):
            pass
        report()
        received = (message for message in node.messages(TIMEOUT) if message.type == "Topic")
        _expect(messages, (message.body for message in received))
        report()


def receive_with_psycopg(addresses: Addresses, messages: int, report: Report) -> None:
    """Receive the payloads of plain notifications with psycopg."""
    with psycopg.connect(addresses.dsn, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        report()
        _expect(messages, (notify.payload for notify in connection.notifies()))
        report()


def fetch_with_psycopg(addresses: Addresses, messages: int, report: Report) -> None:
    """Receive keys, and fetch the body of each by a prepared SELECT on the same connection."""
    with psycopg.connect(addresses.dsn, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        report()
        left = messages
        while left:
            for key in [notify.payload for notify in connection.notifies(stop_after=1)]:
                connection.execute(FETCH, (int(key),), prepare=True).fetchone()
                left -= 1
        report()


def receive_from_redis(addresses: Addresses, messages: int, report: Report) -> None:
    """Subscribe with redis-py."""
    import redis

    with redis.Redis(port=addresses.redis) as client, client.pubsub() as subscription:
        subscription.subscribe(CHANNEL)
        subscription.get_message(timeout=TIMEOUT.total_seconds())
        report()
        received = (item["data"] for item in subscription.listen() if item["type"] == "message")
        _expect(messages, received)
        report()


def receive_from_nats(addresses: Addresses, messages: int, report: Report) -> None:
    """Subscribe with nats-py."""
    asyncio.run(_receive_from_nats(addresses, messages, report))


async def _receive_from_nats(addresses: Addresses, messages: int, report: Report) -> None:
    import nats

    client = await nats.connect(f"nats://127.0.0.1:{addresses.nats}")
    subscription = await client.subscribe(CHANNEL, pending_msgs_limit=0, pending_bytes_limit=0)
    await client.flush()
    report()
    received: AsyncIterator[Any] = subscription.messages
    async for _ in received:
        messages -= 1
        if not messages:
            break
    report()
    await client.close()


WAYS: dict[str, Callable[[Addresses, int, Report], None]] = {
    way.__name__: way
    for way in (
        count, receive_with_node, receive_with_psycopg, fetch_with_psycopg, receive_from_redis,
        receive_from_nats,
    )
}  # fmt: skip


def _expect(messages: int, received: Iterator[Any]) -> None:
    number = sum(1 for _ in islice(received, messages))
    if number < messages:
        raise TimeoutError(f"only {number} of {messages} messages were received")


class Receiver:
    """Controls the receiving process."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def expect(self, way: str, messages: int) -> None:
        """Let the process receive in one way; return when the process listens."""
        self._pipe.send((way, messages))
        self._read_time()

    def done_at(self) -> float:
        """Wait until all messages were received; return the monotonic time of the last one."""
        return self._read_time()

    def _read_time(self) -> float:
        if not self._pipe.poll(2 * TIMEOUT.total_seconds()):
            raise TimeoutError("the receiver does not answer")
        return float(self._pipe.recv())


def _serve(pipe: Pipe, addresses: Addresses) -> None:
    def report() -> None:
        pipe.send(monotonic())

    while True:
        try:
            way, messages = pipe.recv()
        except EOFError:
            return
        WAYS[way](addresses, messages, report)


@contextmanager
def run_receiver(addresses: Addresses) -> Iterator[Receiver]:
    """Run a receiving process during the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, addresses), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Receiver(ours)
    finally:
        ours.close()
        process.join(TIMEOUT.total_seconds())
