"""Command bench: the built-in benchmark, compared with bare pg_notify."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import Connection as Pipe
from statistics import median
from time import monotonic
from typing import Any, Final, NamedTuple

import psycopg

from psqlmessages.cli.direct_calls import Connection, connect_as
from psqlmessages.cli.output import CliCommand, add_json, format_table, positive
from psqlmessages.client.connection import is_readable
from psqlmessages.client.messages import TOPIC as TOPIC_TYPE
from psqlmessages.client.node import Node
from psqlmessages.exceptions import ConnectionLost, MessagesError
from psqlmessages.shutdown import signal_handler

# Receiver of the benchmark: a separate process with one connection, for our messages and for bare
# notifications. Each round has a kind:
#   node     messages of the topic with their bodies, from a Node
#   counted  notifications of the topic, without parsing
#   bare     notifications of pg_notify
#   stored   notifications of pg_notify with keys; each body is fetched from a table

IDENT: Final = "BENCH.RECEIVER"
TOPIC: Final = "BENCH"
CHANNEL: Final = "psqlmessages_bench"
BODY_TABLE: Final = "psqlmessages_bench_body"

_RECEIVE_TIMEOUT: Final = timedelta(seconds=20)


def receive_rounds(pipe: Pipe, dsn: str) -> None:
    """Receive the rounds that the sender announces, until the sender closes the pipe."""
    try:
        with Node(IDENT, dsn) as node:
            node.topic_listen(TOPIC)
            connection_of(node).execute(f"LISTEN {CHANNEL}")
            pipe.send(("listening", monotonic()))
            while True:
                kind, messages = pipe.recv()
                for _ in node.messages(timeout=timedelta(0)):
                    pass
                pipe.send(("ready", monotonic()))
                _receive(node, kind, messages)
                pipe.send(("done", monotonic()))
    except (EOFError, BrokenPipeError):
        return
    except (MessagesError, psycopg.Error) as error:
        pipe.send((str(error), monotonic()))


def _receive(node: Node, kind: str, messages: int) -> None:
    if kind == "node":
        received = 0
        for message in node.messages(timeout=_RECEIVE_TIMEOUT):
            if message.type == TOPIC_TYPE and message.body is not None:
                received += 1
            if received == messages:
                return
        raise MessagesError(f"only {received} of {messages} messages arrived")
    fetch = f"SELECT body FROM {BODY_TABLE} WHERE id = %s"  # noqa: S608 - a constant
    channel = node.channel if kind == "counted" else CHANNEL
    for key in islice(_payloads(node, channel), messages):
        if kind == "stored":
            connection_of(node).execute(fetch, (int(key),)).fetchone()


def _payloads(node: Node, wanted_channel: str) -> Iterator[str]:
    """Yield the payloads of a channel, with as little overhead as psycopg allows."""
    buffer, descriptor = node._session._buffer, connection_of(node).fileno()
    while buffer is not None:
        yield from (payload for channel, payload in buffer.take() if channel == wanted_channel)
        if not buffer:
            if not is_readable(descriptor, _RECEIVE_TIMEOUT.total_seconds()):
                raise MessagesError("notifications were lost")
            buffer.read()


def connection_of(node: Node) -> Connection:
    """Return the connection of a node, which bare notifications use too."""
    connection = node._session._connection
    if connection is None:
        raise ConnectionLost(f"node {node.ident} lost its connection: run the benchmark again")
    return connection


# Rounds of the benchmark: this process sends, the receiver process receives. Both are timed.

_SENDER: Final = "BENCH.SENDER"
# Bodies up to this size fit into a notification, even with our header.
_MAX_PAYLOAD_BYTES: Final = 7_000
_BATCH: Final = 500
_BATCH_BYTES: Final = 2_000_000
_WARM_UP_MESSAGES: Final = 50
_REPLY_TIMEOUT_SECONDS: Final = 30.0


class Rates(NamedTuple):
    """Messages per second of the sender and of the receiver."""

    sent: float
    received: float


Send = Callable[[list[str]], object]


class Bench:
    """A sender in this process and a receiver in another process, each with one connection."""

    def __init__(self, node: Node, pipe: Pipe) -> None:
        self._node = node
        self._pipe = pipe
        self._connection = connection_of(node)

    def measure(
        self, size: int, batch: int, rounds: int, seconds: float, *, is_counted: bool
    ) -> list[tuple[Rates, Rates]]:
        """Measure our functions and bare pg_notify in turns, each for about ``seconds``.

        Return a pair for each round: our rates, and the rates of pg_notify. With ``is_counted``,
        the receiver counts small messages without parsing them, to use little CPU time.
        """
        body = base64.b64encode(os.urandom(size))[:size].decode()
        bodies = [body] * batch
        is_single, is_small = batch == 1, size <= _MAX_PAYLOAD_BYTES
        senders: dict[str, Send] = {
            "counted" if is_counted and is_small else "node": self._send_by_node(is_single),
            "bare" if is_small else "stored": self._send_by_notify(is_single, is_small),
        }
        calls = {
            kind: self._count_calls(kind, send, bodies, seconds) for kind, send in senders.items()
        }
        measured = [
            [self._run_round(kind, send, bodies, calls[kind]) for kind, send in senders.items()]
            for _ in range(rounds)
        ]
        return [(ours, bare) for ours, bare in measured]

    def _count_calls(self, kind: str, send: Send, bodies: list[str], seconds: float) -> int:
        """Return how many calls take about ``seconds``, measured after a warm-up."""
        warm_up_calls = max(1, _WARM_UP_MESSAGES // len(bodies))
        self._run_round(kind, send, bodies, warm_up_calls)
        rate = self._run_round(kind, send, bodies, warm_up_calls).received
        return max(1, int(rate * seconds / len(bodies)))

    def _run_round(self, kind: str, send: Send, bodies: list[str], calls: int) -> Rates:
        messages = calls * len(bodies)
        self._pipe.send((kind, messages))
        self.expect("ready")
        started_at = monotonic()
        for _ in range(calls):
            send(bodies)
        send_seconds = monotonic() - started_at
        # Both processes read the same clock.
        receive_seconds = self.expect("done") - started_at
        return Rates(messages / send_seconds, messages / receive_seconds)

    def expect(self, state: str) -> float:
        """Wait until the receiver process reports ``state``; return the time of the report."""
        if not self._pipe.poll(_REPLY_TIMEOUT_SECONDS):
            raise MessagesError(f"the receiver is not {state}: it crashed, or messages were lost")
        text, sent_at = self._pipe.recv()
        if text != state:
            raise MessagesError(f"the receiver failed: {text}")
        return float(sent_at)

    def _send_by_node(self, is_single: bool) -> Send:
        if is_single:
            return lambda bodies: self._node.topic_send(TOPIC, bodies[0])
        return lambda bodies: self._node.topic_send_many(TOPIC, bodies)

    def _send_by_notify(self, is_single: bool, is_small: bool) -> Send:
        if is_small and is_single:
            return lambda bodies: self._run("SELECT pg_notify(%s, %s)", (CHANNEL, bodies[0]))
        if is_small:
            # PostgreSQL merges equal payloads of a transaction, so each gets a number.
            return lambda bodies: self._run(
                "SELECT count(*) FROM (SELECT pg_notify(%s, b.n || ' ' || b.body)"
                " FROM unnest(%b::text[]) WITH ORDINALITY AS b (body, n) OFFSET 0) AS notified",
                (CHANNEL, bodies),
            )
        insert = (
            f"INSERT INTO {BODY_TABLE} (body)"
            f" {'VALUES (%s)' if is_single else 'SELECT unnest(%b::text[])'} RETURNING id"
        )
        statement = (
            f"WITH stored AS ({insert})"  # noqa: S608 - constants
            " SELECT count(*) FROM (SELECT pg_notify(%s, id::text) FROM stored OFFSET 0) AS n"
        )
        return lambda bodies: self._run(statement, (bodies[0] if is_single else bodies, CHANNEL))

    def _run(self, statement: str, parameters: tuple[Any, ...]) -> None:
        self._connection.execute(statement, parameters).fetchone()


@contextmanager
def prepare_bench(dsn: str) -> Iterator[Bench]:
    """Create the rules, the table and the receiver process; remove them afterwards."""
    with connect_as(dsn, "bench", owner_task="prepare the benchmark") as admin:
        _create_objects(admin)
        try:
            with _run_receiver(dsn) as pipe, Node(_SENDER, dsn) as node:
                node.topic_notify(TOPIC)
                bench = Bench(node, pipe)
                bench.expect("listening")
                yield bench
        finally:
            _remove_objects(admin)


@contextmanager
def _run_receiver(dsn: str) -> Iterator[Pipe]:
    """Start the receiver process, yield the sender's end of the pipe, and stop the process."""
    context = multiprocessing.get_context("spawn")
    sender_end, receiver_end = context.Pipe()
    process = context.Process(target=receive_rounds, args=(receiver_end, dsn), daemon=True)
    # Ctrl-C reaches both processes. The receiver ignores SIGINT, because this process stops it.
    with signal_handler(signal.SIG_IGN, signal.SIGINT):
        process.start()
    receiver_end.close()
    try:
        yield sender_end
    finally:
        sender_end.close()
        process.terminate()
        process.join()


def _create_objects(admin: Connection) -> None:
    with admin.transaction():
        _remove_objects(admin)
        for ident, mode in ((_SENDER, "W"), (IDENT, "R")):
            admin.execute(
                "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
                " VALUES (session_user, %s, 'Topic', %s, %s, 60)",
                (ident, TOPIC, mode),
            )
        admin.execute(
            f"CREATE UNLOGGED TABLE {BODY_TABLE}"
            " (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text)"
        )
        # Without compression, like our tables of large bodies.
        admin.execute(f"ALTER TABLE {BODY_TABLE} ALTER body SET STORAGE EXTERNAL")


def _remove_objects(admin: Connection) -> None:
    admin.execute("DELETE FROM messages.auth WHERE ident IN (%s, %s)", (_SENDER, IDENT))
    admin.execute(f"DROP TABLE IF EXISTS {BODY_TABLE}")


_KB: Final = 1000
_SIZES: Final = (1, 10, _KB, 10 * _KB, 50 * _KB, 100 * _KB)
_QUICK_SIZES: Final = (10, _KB, 10 * _KB)
_ROUNDS: Final = 5
_SECONDS: Final = 0.4
_QUICK_SECONDS: Final = 0.15


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="three sizes and short rounds")
    parser.add_argument(
        "--rounds", type=positive, default=_ROUNDS, help="rounds of each measurement (default: 5)"
    )
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Measure and print a table. Rounds of our functions and of pg_notify alternate."""
    seconds = _QUICK_SECONDS if arguments.quick else _SECONDS
    results = []
    with prepare_bench(arguments.dsn) as bench:
        for size in _QUICK_SIZES if arguments.quick else _SIZES:
            print(f"measuring {_format_size(size)} …", file=sys.stderr, flush=True)
            results.append(_measure(bench, size, arguments.rounds, seconds))
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "results": results}))
    else:
        print(_report(results, arguments.rounds))
    return 0


def _measure(bench: Bench, size: int, rounds: int, seconds: float) -> dict[str, float]:
    single = bench.measure(size, 1, rounds, seconds, is_counted=True)
    batch = max(1, min(_BATCH, _BATCH_BYTES // size))
    many = bench.measure(size, batch, rounds, seconds, is_counted=True)
    received = bench.measure(size, batch, rounds, seconds, is_counted=False)
    return {
        "size": size,
        "batch": batch,
        **_summarize("send", [(ours.sent, bare.sent) for ours, bare in single]),
        **_summarize("send_many", [(ours.sent, bare.sent) for ours, bare in many]),
        **_summarize("received", [(ours.received, bare.received) for ours, bare in received]),
    }


def _summarize(name: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    return {
        name: median(ours for ours, _ in pairs),
        f"{name}_pg_notify": median(bare for _, bare in pairs),
        # The median of the ratios, because a slow moment affects both numbers of a pair.
        f"{name}_ratio": median(ours / bare for ours, bare in pairs),
    }


def _report(results: list[dict[str, float]], rounds: int) -> str:
    head = ["size", "topic_send/s", "ratio", "topic_send_many/s", "ratio", "received/s", "ratio"]
    rows = []
    for result in results:
        row = [_format_size(int(result["size"]))]
        for name in ("send", "send_many", "received"):
            row += [f"{result[name]:,.0f}", f"{result[f'{name}_ratio']:.2f}"]
        rows.append(row)
    batches = ", ".join(f"{_format_size(int(r['size']))}: {int(r['batch'])}" for r in results)
    return f"""{format_table(head, rows, right=range(1, len(head)))}

ratio: our rate, divided by the rate of bare pg_notify on the same connections. For bodies
over 7 KB, this is an INSERT into an unlogged table, pg_notify of the key, and a SELECT.
topic_send, topic_send_many: up to 7 KB, the receiver only counts notifications.
received: from the first topic_send_many until a Node has yielded the last body. With bare
pg_notify, the receiver counts notifications; over 7 KB, it also fetches each body.
Medians of {rounds} alternating rounds. Bodies in one call: {batches}."""


def _format_size(size: int) -> str:
    return f"{size} B" if size < _KB else f"{size // _KB} KB"


COMMAND = CliCommand(
    "bench",
    "measure sending and receiving, compared with bare pg_notify on the same connections",
    _configure,
    run,
)
