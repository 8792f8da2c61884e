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
from psycopg import errors

from psqlmessages.cli.direct_calls import Connection, connect_as
from psqlmessages.cli.output import CliCommand, add_json, format_table, positive
from psqlmessages.client.connection import is_readable
from psqlmessages.client.messages import TOPIC as TOPIC_TYPE
from psqlmessages.client.node import Node
from psqlmessages.exceptions import ConnectionLost, MessagesError

# Receiver of the benchmark: a separate process with one connection for both sides.

IDENT: Final = "BENCH.RECEIVER"
TOPIC: Final = "BENCH"
CHANNEL: Final = "psqlmessages_bench"
BODY_TABLE: Final = "psqlmessages_bench_body"

_RECEIVE_TIMEOUT: Final = timedelta(seconds=20)


def receive_rounds(pipe: Pipe, dsn: str) -> None:
    """Receive the rounds that the pipe announces, until its other end is closed."""
    try:
        with Node(IDENT, dsn) as node:
            node.topic_listen(TOPIC)
            connection_of(node).execute(f"LISTEN {CHANNEL}")
            pipe.send(("listening", monotonic()))
            while True:
                side, messages = pipe.recv()
                for _ in node.messages(timeout=timedelta(0)):
                    pass
                pipe.send(("ready", monotonic()))
                _receive(node, side, messages)
                pipe.send(("done", monotonic()))
    except (EOFError, BrokenPipeError):
        return
    except (MessagesError, psycopg.Error) as error:
        pipe.send((str(error), monotonic()))


def _receive(node: Node, side: str, messages: int) -> None:
    if side == "node":
        received = 0
        for message in node.messages(timeout=_RECEIVE_TIMEOUT):
            received += message.type == TOPIC_TYPE and message.body is not None
            if received == messages:
                return
        raise MessagesError(f"only {received} of {messages} messages arrived")
    fetch = f"SELECT body FROM {BODY_TABLE} WHERE id = %s"  # noqa: S608 - a constant
    channel = node.channel if side == "counted" else CHANNEL
    for key in islice(_notifications(node, channel), messages):
        if side == "stored":
            connection_of(node).execute(fetch, (int(key),)).fetchone()


def _notifications(node: Node, wanted: str) -> Iterator[str]:
    """Yield the payloads of a channel, with as little overhead as psycopg allows."""
    buffer, descriptor = node._session.buffer, connection_of(node).fileno()
    while buffer is not None:
        yield from (payload for channel, payload in buffer.take() if channel == wanted)
        if not buffer:
            if not is_readable(descriptor, _RECEIVE_TIMEOUT.total_seconds()):
                raise MessagesError("notifications were lost")
            buffer.read()


def connection_of(node: Node) -> Connection:
    """Return the connection of a node, so that both sides are measured on the same one."""
    connection = node._session.connection
    if connection is None:
        raise ConnectionLost(f"node {node.ident} lost its connection: run the benchmark again")
    return connection


# Rounds of the benchmark: one process sends, the other receives, both are timed.

_SENDER: Final = "BENCH.SENDER"
# Fits into a notification, with or without our header.
_SMALL: Final = 7_000
_BATCH: Final = 500
_BATCH_BYTES: Final = 2_000_000
_TRIAL_MESSAGES: Final = 50
_READY_SECONDS: Final = 30.0


class Rates(NamedTuple):
    """Messages per second that the sender has sent, and that the receiver has received."""

    sent: float
    received: float


class BenchRefused(MessagesError):
    """The role of the connection lacks privileges to prepare the benchmark."""


Send = Callable[[list[str]], object]


class Bench:
    """A sender in this process and a receiver in another, each with one connection."""

    def __init__(self, node: Node, pipe: Pipe) -> None:
        self._node = node
        self._pipe = pipe
        self._connection = connection_of(node)

    def measure(
        self, size: int, batch: int, rounds: int, seconds: float, *, is_counted: bool
    ) -> list[tuple[Rates, Rates]]:
        """Measure our functions and bare pg_notify in turns, each round for about ``seconds``.

        With ``is_counted`` the receiver only counts small messages, on both sides, so that a busy
        receiver does not take CPU time from the sender.
        """
        body = base64.b64encode(os.urandom(size))[:size].decode()
        bodies = [body] * batch
        is_one, is_small = batch == 1, size <= _SMALL
        sides: dict[str, Send] = {
            "counted" if is_counted and is_small else "node": self._send_by_node(is_one),
            "bare" if is_small else "stored": self._send_by_notify(is_one, is_small),
        }
        counts = {
            side: self._choose_calls(side, send, bodies, seconds) for side, send in sides.items()
        }
        measured = [
            [self._round(side, send, bodies, counts[side]) for side, send in sides.items()]
            for _ in range(rounds)
        ]
        return [(ours, bare) for ours, bare in measured]

    def _choose_calls(self, side: str, send: Send, bodies: list[str], seconds: float) -> int:
        trial = max(1, _TRIAL_MESSAGES // len(bodies))
        self._round(side, send, bodies, trial)
        rate = self._round(side, send, bodies, trial).received
        return max(1, int(rate * seconds / len(bodies)))

    def _round(self, side: str, send: Send, bodies: list[str], calls: int) -> Rates:
        messages = calls * len(bodies)
        self._pipe.send((side, messages))
        self.expect("ready")
        started = monotonic()
        for _ in range(calls):
            send(bodies)
        sent = monotonic() - started
        # Both processes read the same clock.
        received = self.expect("done") - started
        return Rates(messages / sent, messages / received)

    def expect(self, wanted: str) -> float:
        """Wait for a message of the receiver process; return its time."""
        if not self._pipe.poll(_READY_SECONDS):
            raise MessagesError(f"the receiver is not {wanted}: it has died, or messages were lost")
        text, sent_at = self._pipe.recv()
        if text != wanted:
            raise MessagesError(f"the receiver failed: {text}")
        return float(sent_at)

    def _send_by_node(self, is_one: bool) -> Send:
        if is_one:
            return lambda bodies: self._node.topic_send(TOPIC, bodies[0])
        return lambda bodies: self._node.topic_send_many(TOPIC, bodies)

    def _send_by_notify(self, is_one: bool, is_small: bool) -> Send:
        if is_small and is_one:
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
            f" {'VALUES (%s)' if is_one else 'SELECT unnest(%b::text[])'} RETURNING id"
        )
        statement = (
            f"WITH stored AS ({insert})"  # noqa: S608 - constants
            " SELECT count(*) FROM (SELECT pg_notify(%s, id::text) FROM stored OFFSET 0) AS n"
        )
        return lambda bodies: self._run(statement, (bodies[0] if is_one else bodies, CHANNEL))

    def _run(self, statement: str, parameters: tuple[Any, ...]) -> None:
        self._connection.execute(statement, parameters).fetchone()


@contextmanager
def prepare_bench(dsn: str) -> Iterator[Bench]:
    """Create the rules, the table and the receiver process; remove them afterwards."""
    with connect_as(dsn, "bench") as admin:
        _create_objects(admin)
        try:
            with _receiver(dsn) as pipe, Node(_SENDER, dsn) as node:
                node.topic_notify(TOPIC)
                bench = Bench(node, pipe)
                bench.expect("listening")
                yield bench
        finally:
            _remove_objects(admin)


@contextmanager
def _receiver(dsn: str) -> Iterator[Pipe]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_rounds, args=(theirs, dsn), daemon=True)
    # Ctrl-C reaches all processes of the group. The receiver ignores it: this process stops it.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, previous)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


def _create_objects(admin: Connection) -> None:
    try:
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
            # Like our own bodies: compression would cost more than it saves.
            admin.execute(f"ALTER TABLE {BODY_TABLE} ALTER body SET STORAGE EXTERNAL")
    except errors.InsufficientPrivilege as error:
        raise BenchRefused(
            f"role {admin.info.user} cannot prepare the benchmark"
            f" ({error.diag.message_primary}); connect as the owner of the tables"
        ) from error


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
    """Measure and print a table; the two sides alternate, so that both see the same load."""
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
        f"{name}_send_by_notify": median(bare for _, bare in pairs),
        # The median of the ratios of each pair: a slow moment affects both sides of a pair.
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

ratio: compared with bare pg_notify on the same connections; over 8 KB with an INSERT
into an unlogged table, pg_notify of its key and a SELECT. 1.00 means equal speed.
Sends up to 8 KB: the receiver only counts the notifications, on both sides.
received: from the first topic_send_many until a Node has yielded the last body;
in plain SQL the notifications are only counted.
Medians of {rounds} alternating rounds. Bodies in one call: {batches}."""


def _format_size(size: int) -> str:
    return f"{size} B" if size < _KB else f"{size // _KB} KB"


COMMAND = CliCommand(
    "bench",
    "measure sending and receiving, compared with bare pg_notify on the same connections",
    _configure,
    run,
)
