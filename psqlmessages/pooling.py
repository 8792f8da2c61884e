"""Pooling: whether something stands between a client and its backend. Needs no Django."""

from __future__ import annotations

from enum import Enum
from typing import Any

import psycopg

from psqlmessages.client.connections import AnswerTimeout, Connection
from psqlmessages.client.options import conninfo

_ROUNDS = 3
_ANSWER_SECONDS = 10.0


class Pooling(Enum):
    """What was found."""

    NONE = "none"
    SESSION = "session"
    TRANSACTION = "transaction"


def probe(dsn: str) -> Pooling:
    """Find out with two connections; a server that refuses them raises psycopg.Error.

    Two clients that see the same backend, or one that sees two, share them by transaction. A pooler
    that gives each client its own is known by a process id at log-in that is not the backend's.
    """
    with connect(dsn) as one:
        own = _backend(one)
        is_pooled = one.info.backend_pid != own
        try:
            with connect(dsn) as other:
                is_shared = any(_is_shared(one, other, own) for _ in range(_ROUNDS))
        except AnswerTimeout:
            # It waits for a backend of its own, which a pool by transaction would have given it.
            return Pooling.SESSION
    if is_shared:
        return Pooling.TRANSACTION
    return Pooling.SESSION if is_pooled else Pooling.NONE


def connect(dsn: str) -> Connection:
    """Connect so that it works through a pooler of any kind."""
    connection = Connection.connect(
        conninfo(dsn, "doctor"), autocommit=True, prepare_threshold=None
    )
    connection.answer_seconds = _ANSWER_SECONDS
    return connection


def _is_shared(one: Connection, other: Connection, own: int) -> bool:
    """Have the other hold a backend, and see whether it was ours."""
    with other.transaction():
        return _backend(other) == own or _backend(one) != own


def _backend(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return int(row[0])
