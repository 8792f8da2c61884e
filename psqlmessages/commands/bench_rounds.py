"""The rounds of the benchmark: one side sends, the other process receives, both are timed."""

from __future__ import annotations

import base64
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from time import monotonic
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import errors

from psqlmessages.client.calls import error_of
from psqlmessages.client.node import Node
from psqlmessages.client.options import conninfo
from psqlmessages.commands import bench_receiver
from psqlmessages.commands.bench_receiver import (
    CHANNEL,
    IDENT,
    KEPT_TABLE,
    TOPIC,
    connection_of,
)
from psqlmessages.exceptions import MessagesError

_SENDER: Final = "BENCH.SENDER"
# What fits into a notification by hand as well as with our header.
_SMALL: Final = 7_000
_BATCH: Final = 500
_BATCH_BYTES: Final = 2_000_000
_TRIAL: Final = 50
_READY_SECONDS: Final = 30.0


class Measured(NamedTuple):
    """Messages a second: handed over by the sender, and arrived at the receiver."""

    sent: float
    received: float


class BenchRefused(MessagesError):
    """The role of the connection may not prepare the benchmark."""


Send = Callable[[list[str]], object]


class Bench:
    """A sender here and a receiver in another process, each with one connection for both sides."""

    def __init__(self, node: Node, pipe: Pipe) -> None:
        self._node = node
        self._pipe = pipe
        self._connection = connection_of(node)

    @staticmethod
    def batch_for(size: int) -> int:
        """Tell how many bodies travel in one call."""
        return max(1, min(_BATCH, _BATCH_BYTES // size))

    def measure(
        self, size: int, batch: int, rounds: int, seconds: float, *, is_counted: bool
    ) -> list[tuple[Measured, Measured]]:
        """Measure ours and the bare way in turns; each round takes about so many seconds.

        ``is_counted``: what fits into a notification is only counted by the receiver, on both
        sides alike, so that a busy receiver does not take the processor from the sender.
        """
        body = base64.b64encode(os.urandom(size))[:size].decode()
        bodies = [body] * batch
        is_small = size <= _SMALL
        sides: dict[str, Send] = {
            "counted" if is_counted and is_small else "node": (
                self._send_one if batch == 1 else self._send_many
            ),
            "bare" if is_small else "kept": self._bare(is_small=is_small, is_one=batch == 1),
        }
        counts = {
            side: self._calls_for(side, send, bodies, seconds) for side, send in sides.items()
        }
        measured = [
            [self._round(side, send, bodies, counts[side]) for side, send in sides.items()]
            for _ in range(rounds)
        ]
        return [(ours, bare) for ours, bare in measured]

    def _calls_for(self, side: str, send: Send, bodies: list[str], seconds: float) -> int:
        trial = max(1, _TRIAL // len(bodies))
        self._round(side, send, bodies, trial)
        rate = self._round(side, send, bodies, trial).received
        return max(1, int(rate * seconds / len(bodies)))

    def _round(self, side: str, send: Send, bodies: list[str], calls: int) -> Measured:
        messages = calls * len(bodies)
        self._pipe.send((side, messages))
        self.hear("ready")
        started = monotonic()
        for _ in range(calls):
            send(bodies)
        sent = monotonic() - started
        # The clock of both processes is the machine's.
        received = self.hear("done") - started
        return Measured(messages / sent, messages / received)

    def hear(self, wanted: str) -> float:
        """Wait until the receiver says something; return when it did."""
        if not self._pipe.poll(_READY_SECONDS):
            raise MessagesError(f"the receiver is not {wanted}: messages were lost, or it died")
        said, at = self._pipe.recv()
        if said != wanted:
            raise MessagesError(f"the receiver failed: {said}")
        return float(at)

    # Ours

    def _send_one(self, bodies: list[str]) -> None:
        self._node.topic_send(TOPIC, bodies[0])

    def _send_many(self, bodies: list[str]) -> None:
        self._node.topic_send_many(TOPIC, bodies)

    # By hand

    def _bare(self, *, is_small: bool, is_one: bool) -> Send:
        if is_small and is_one:
            return lambda bodies: self._run("SELECT pg_notify(%s, %s)", (CHANNEL, bodies[0]))
        if is_small:
            # Equal payloads of one transaction would arrive as one, so each gets its number.
            return lambda bodies: self._run(
                "SELECT count(*) FROM (SELECT pg_notify(%s, b.n || ' ' || b.body)"
                " FROM unnest(%b::text[]) WITH ORDINALITY AS b (body, n) OFFSET 0) AS notified",
                (CHANNEL, bodies),
            )
        keep = (
            f"INSERT INTO {KEPT_TABLE} (body)"
            f" {'VALUES (%s)' if is_one else 'SELECT unnest(%b::text[])'} RETURNING id"
        )
        statement = (
            f"WITH kept AS ({keep})"  # noqa: S608 - constants
            " SELECT count(*) FROM (SELECT pg_notify(%s, id::text) FROM kept OFFSET 0) AS notified"
        )
        return lambda bodies: self._run(statement, (bodies[0] if is_one else bodies, CHANNEL))

    def _run(self, statement: str, parameters: tuple[Any, ...]) -> None:
        self._connection.execute(statement, parameters).fetchone()


@contextmanager
def prepared(dsn: str) -> Iterator[Bench]:
    """Make rules, a table and the receiver's process; all are gone afterwards."""
    with psycopg.connect(conninfo(dsn, "bench"), autocommit=True) as admin:
        _make(admin)
        try:
            with _receiver(dsn) as pipe, Node(_SENDER, dsn) as node:
                node.topic_notify(TOPIC)
                bench = Bench(node, pipe)
                bench.hear("listening")
                yield bench
        finally:
            _remove(admin)


@contextmanager
def _receiver(dsn: str) -> Iterator[Pipe]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=bench_receiver.serve, args=(theirs, dsn), daemon=True)
    # Ctrl-C reaches the whole group of processes; this one ends the other.
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


def _make(admin: psycopg.Connection[tuple[Any, ...]]) -> None:
    try:
        with admin.transaction():
            _remove(admin)
            for ident, mode in ((_SENDER, "W"), (IDENT, "R")):
                admin.execute(
                    "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
                    " VALUES (session_user, %s, 'Topic', %s, %s, 60)",
                    (ident, TOPIC, mode),
                )
            admin.execute(
                f"CREATE UNLOGGED TABLE {KEPT_TABLE}"
                " (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text)"
            )
            # As our own bodies are stored: compressing them would cost more than it saves.
            admin.execute(f"ALTER TABLE {KEPT_TABLE} ALTER body SET STORAGE EXTERNAL")
    except errors.InsufficientPrivilege as error:
        raise BenchRefused(
            f"role {admin.info.user} cannot prepare the benchmark"
            f" ({error.diag.message_primary}); connect as the owner of the tables"
        ) from error
    except psycopg.Error as error:
        raise error_of(error, is_broken=admin.closed) from error


def _remove(admin: psycopg.Connection[tuple[Any, ...]]) -> None:
    admin.execute("DELETE FROM messages.auth WHERE ident IN (%s, %s)", (_SENDER, IDENT))
    admin.execute(f"DROP TABLE IF EXISTS {KEPT_TABLE}")
