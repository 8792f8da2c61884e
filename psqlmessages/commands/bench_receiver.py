"""The receiver of the benchmark: a process of its own, one connection for both sides."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import Connection as Pipe
from time import monotonic
from typing import Any, Final

import psycopg

from psqlmessages.client.connections import is_readable
from psqlmessages.client.messages import TOPIC as TOPIC_TYPE
from psqlmessages.client.node import Node
from psqlmessages.exceptions import ConnectionLost, MessagesError

IDENT: Final = "BENCH.RECEIVER"
TOPIC: Final = "BENCH"
CHANNEL: Final = "psqlmessages_bench"
KEPT_TABLE: Final = "psqlmessages_bench_kept"

_PATIENCE: Final = timedelta(seconds=20)


def serve(pipe: Pipe, dsn: str) -> None:
    """Receive what is told, until the other end of the pipe is closed."""
    try:
        with Node(IDENT, dsn) as node:
            node.topic_listen(TOPIC)
            connection_of(node).execute(f"LISTEN {CHANNEL}")
            pipe.send(("listening", monotonic()))
            while True:
                side, messages = pipe.recv()
                _forget(node)
                pipe.send(("ready", monotonic()))
                _receive(node, side, messages)
                pipe.send(("done", monotonic()))
    except (EOFError, BrokenPipeError):
        return
    except (MessagesError, psycopg.Error) as error:
        pipe.send((str(error), monotonic()))


def _forget(node: Node) -> None:
    for _ in node.messages(timeout=timedelta(0)):
        pass


def _receive(node: Node, side: str, messages: int) -> None:
    if side == "node":
        received = 0
        for message in node.messages(timeout=_PATIENCE):
            received += message.type == TOPIC_TYPE and message.body is not None
            if received == messages:
                return
        raise MessagesError(f"only {received} of {messages} messages came")
    fetch = f"SELECT body FROM {KEPT_TABLE} WHERE id = %s"  # noqa: S608 - a constant
    channel = node.channel if side == "counted" else CHANNEL
    for key in islice(_notifications(node, channel), messages):
        if side == "kept":
            connection_of(node).execute(fetch, (int(key),)).fetchone()


def _notifications(node: Node, wanted: str) -> Iterator[str]:
    """Yield the payloads that came on a channel, as lean as psycopg allows."""
    inlet, descriptor = node._link.inlet, connection_of(node).fileno()
    while inlet is not None:
        yield from (payload for channel, payload in inlet.take() if channel == wanted)
        if not inlet:
            if not is_readable(descriptor, _PATIENCE.total_seconds()):
                raise MessagesError("notifications were lost")
            inlet.read()


def connection_of(node: Node) -> psycopg.Connection[tuple[Any, ...]]:
    """Give the connection of a node, so that both sides are measured on the same one."""
    connection = node._link.connection
    if connection is None:
        raise ConnectionLost(f"node {node.ident} lost its connection: measure again")
    return connection
