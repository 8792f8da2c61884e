"""The receiver of the benchmark of sends: a process of its own, one way to receive at a time.

A way connects when it is asked for and disconnects after it, so that no other listener is woken.
It tells when it listens, and when it has all.
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
FETCH = "SELECT body FROM kept_by_hand WHERE id = %s"
PATIENCE = timedelta(seconds=60)
Tell = Callable[[], None]


class Addresses(NamedTuple):
    """Where the servers are; port 0 where there is none."""

    dsn: str
    redis: int
    nats: int


def count(addresses: Addresses, messages: int, tell: Tell) -> None:
    """Count notifications, of our topic and of the bare channel alike, on a node's connection."""
    with Node(RECEIVER, addresses.dsn) as node:
        node.topic_listen(TOPIC)
        connection, inlet = node._link.connection, node._link.inlet
        if connection is None or inlet is None:
            raise RuntimeError("the receiver lost its connection")
        connection.execute(f"LISTEN {CHANNEL}")
        for _ in node.messages(timeout=timedelta(0)):
            pass
        tell()
        while messages > 0:
            if not is_readable(connection.fileno(), PATIENCE.total_seconds()):
                raise TimeoutError(f"{messages} notifications are missing")
            inlet.read()
            # Events of other nodes are none of them.
            messages -= sum(not payload.startswith(EVENT) for _, payload in inlet.take())
        tell()


def take_by_node(addresses: Addresses, messages: int, tell: Tell) -> None:
    """Receive whole messages as a Node."""
    with Node(RECEIVER, addresses.dsn) as node:
        node.topic_listen(TOPIC)
        for _ in node.messages(timeout=timedelta(0)):
            pass
        tell()
        sent = (message for message in node.messages(PATIENCE) if message.type == "Topic")
        _expect(messages, (message.body for message in sent))
        tell()


def take_by_hand(addresses: Addresses, messages: int, tell: Tell) -> None:
    """Receive the payloads of bare notifications by psycopg."""
    with psycopg.connect(addresses.dsn, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        tell()
        _expect(messages, (notify.payload for notify in connection.notifies()))
        tell()


def fetch_by_hand(addresses: Addresses, messages: int, tell: Tell) -> None:
    """Receive keys, and fetch the body of each by a prepared SELECT on the same connection."""
    with psycopg.connect(addresses.dsn, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        tell()
        left = messages
        while left:
            for key in [notify.payload for notify in connection.notifies(stop_after=1)]:
                connection.execute(FETCH, (int(key),), prepare=True).fetchone()
                left -= 1
        tell()


def take_from_redis(addresses: Addresses, messages: int, tell: Tell) -> None:
    """Subscribe by redis-py."""
    import redis

    with redis.Redis(port=addresses.redis) as client, client.pubsub() as subscription:
        subscription.subscribe(CHANNEL)
        subscription.get_message(timeout=PATIENCE.total_seconds())
        tell()
        came = (item["data"] for item in subscription.listen() if item["type"] == "message")
        _expect(messages, came)
        tell()


def take_from_nats(addresses: Addresses, messages: int, tell: Tell) -> None:
    """Subscribe by nats-py."""
    asyncio.run(_take_from_nats(addresses, messages, tell))


async def _take_from_nats(addresses: Addresses, messages: int, tell: Tell) -> None:
    import nats

    client = await nats.connect(f"nats://127.0.0.1:{addresses.nats}")
    subscription = await client.subscribe(CHANNEL, pending_msgs_limit=0, pending_bytes_limit=0)
    await client.flush()
    tell()
    came: AsyncIterator[Any] = subscription.messages
    async for _ in came:
        messages -= 1
        if not messages:
            break
    tell()
    await client.close()


WAYS: dict[str, Callable[[Addresses, int, Tell], None]] = {
    way.__name__: way
    for way in (count, take_by_node, take_by_hand, fetch_by_hand, take_from_redis, take_from_nats)
}


def _expect(messages: int, came: Iterator[Any]) -> None:
    got = sum(1 for _ in islice(came, messages))
    if got < messages:
        raise TimeoutError(f"only {got} of {messages} messages came")


class Receiver:
    """The process, as its starter sees it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def expect(self, way: str, messages: int) -> None:
        """Have it connect one way; return when it waits for so many messages."""
        self._pipe.send((way, messages))
        self._hear()

    def done_at(self) -> float:
        """Wait until all have come; tell when the last one did, by the machine's one clock."""
        return self._hear()

    def _hear(self) -> float:
        if not self._pipe.poll(2 * PATIENCE.total_seconds()):
            raise TimeoutError("the receiver says nothing")
        return float(self._pipe.recv())


def _serve(pipe: Pipe, addresses: Addresses) -> None:
    def tell() -> None:
        pipe.send(monotonic())

    while True:
        try:
            way, messages = pipe.recv()
        except EOFError:
            return
        WAYS[way](addresses, messages, tell)


@contextmanager
def receiver(addresses: Addresses) -> Iterator[Receiver]:
    """Run one, until the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, addresses), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Receiver(ours)
    finally:
        ours.close()
        process.join(PATIENCE.total_seconds())
