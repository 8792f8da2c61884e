"""Pooling: whether something stands between a client and its backend, and shares backends."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from enum import Enum
from typing import Any

import psycopg

from psqlmessages.client.connections import AnswerTimeout, Connection
from psqlmessages.client.options import conninfo
from psqlmessages.exceptions import ConnectionShared, ServerUnreachable

# In a busy pool of two each round shows it by chance only.
_ROUNDS = 12
_ANSWER_TIMEOUT = timedelta(seconds=10)
_STARTING_TIMEOUT = timedelta(seconds=3)


class Pooling(Enum):
    """What was found."""

    NONE = "none"
    SESSION = "session"
    TRANSACTION = "transaction"
    STATEMENT = "statement"

    @property
    def shares(self) -> bool:
        """Whether a backend serves several clients, so that no node can live on it."""
        return self in (Pooling.TRANSACTION, Pooling.STATEMENT)


def probe(dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT) -> Pooling:
    """Find out with two connections; a server that refuses them raises psycopg.Error.

    Two clients that see the same backend, or one that sees two, share them by transaction. A pooler
    that gives each client its own is known by a process id at log-in that is not the backend's.
    """
    # Not as psycopg's contexts, which speak to a connection that may be waiting for an answer.
    with closing(connect(dsn, answer_timeout)) as one:
        try:
            own = _backend(one)
            with closing(connect(dsn, answer_timeout)) as other:
                held: set[int] = set()
                is_shared = any(_is_shared(one, other, own, held) for _ in range(_ROUNDS))
        except AnswerTimeout:
            # It waits for a backend of its own, which a pool by transaction would have given it.
            return Pooling.SESSION
        except _TransactionRefused:
            return Pooling.STATEMENT
        if is_shared:
            return Pooling.TRANSACTION
        return Pooling.SESSION if one.info.backend_pid != own else Pooling.NONE


def address_of(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None) -> str:
    """Where a connection leads to, to be read; it may be lost meanwhile."""
    if connection is None or connection.closed:
        return "an address no longer known"
    return f"{connection.info.host}:{connection.info.port}"


def refuse_shared(dsn: str, address: str) -> None:
    """Raise ConnectionShared where the pooler seen there shares connections.

    It takes two connections: a single client sees nothing of it.
    """
    try:
        found = probe(dsn, _STARTING_TIMEOUT)
    except psycopg.Error as error:
        raise ServerUnreachable(
            f"the pooler at {address} did not show of what kind it is: {str(error).strip()}"
        ) from error
    if found.shares:
        raise ConnectionShared(f"the pooler at {address} shares connections by {found.value}")


def connect(
    dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT, ident: str = "doctor"
) -> Connection:
    """Connect so that it works through a pooler of any kind."""
    connection = Connection.connect(conninfo(dsn, ident), autocommit=True, prepare_threshold=None)
    connection.answer_seconds = answer_timeout.total_seconds()
    return connection


class _TransactionRefused(psycopg.OperationalError):
    """No transaction can be begun, though statements are answered."""


def _is_shared(one: Connection, other: Connection, own: int, held: set[int]) -> bool:
    """Have the other hold a backend, and see whether it was ours, or is not the one it had."""
    _backend(other)
    try:
        other.execute("BEGIN")
    except AnswerTimeout:
        raise
    except psycopg.OperationalError as error:
        raise _TransactionRefused(str(error)) from error
    held.add(_backend(other))
    is_shared = own in held or len(held) > 1 or _backend(one) != own
    other.execute("ROLLBACK")
    return is_shared


def _backend(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return int(row[0])
