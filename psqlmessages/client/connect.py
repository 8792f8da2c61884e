"""Connecting: keepalives and timeouts, and the probe for poolers."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import timedelta
from enum import Enum
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from psqlmessages.client.connection import AnswerTimeout, AsyncConnection, Connection
from psqlmessages.client.options import conninfo
from psqlmessages.exceptions import ConnectionShared, ServerUnreachable

# Pooling: whether something stands between a client and its backend, and shares backends.

# In a busy pool of two each round shows it by chance only.
_ROUNDS = 12
_ANSWER_TIMEOUT = timedelta(seconds=10)
_STARTING_TIMEOUT = timedelta(seconds=3)


class PoolerKind(Enum):
    """What was found."""

    NONE = "none"
    SESSION = "session"
    TRANSACTION = "transaction"
    STATEMENT = "statement"

    @property
    def shares(self) -> bool:
        """Whether a backend serves several clients, so that no node can live on it."""
        return self in (PoolerKind.TRANSACTION, PoolerKind.STATEMENT)


def probe(dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT) -> PoolerKind:
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
            return PoolerKind.SESSION
        except _TransactionRefused:
            return PoolerKind.STATEMENT
        if is_shared:
            return PoolerKind.TRANSACTION
        return PoolerKind.SESSION if one.info.backend_pid != own else PoolerKind.NONE


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


# A host that vanishes says no good-bye, and Linux asks after two hours: so long its nodes would
# seem to live. Nothing is set on a pooler's connection, and on a Unix socket there is nothing.
_GREETING: Final = """
    SELECT CASE WHEN pg_backend_pid() = %(pid)s THEN concat(
        set_config('tcp_keepalives_idle',
            least(current_setting('tcp_keepalives_idle')::int, %(keepalives_idle)s)::text, false),
        set_config('tcp_keepalives_interval',
            least(current_setting('tcp_keepalives_interval')::int, %(keepalives_interval)s)::text,
            false),
        set_config('tcp_keepalives_count',
            least(current_setting('tcp_keepalives_count')::int, %(keepalives_count)s)::text, false)
    ) END
"""
_BOUND: Final = """
    SELECT CASE WHEN pg_backend_pid() = %s
        THEN set_config('statement_timeout', %s::text, false) END
"""
_KEEPALIVES: Final = ("keepalives_idle", "keepalives_interval", "keepalives_count")


async def bound(connection: AsyncConnection, seconds: float) -> bool:
    """Limit how long statements may take; False where a pooler lends the backend: nothing is set.

    Then nothing is prepared on it either: who is lent it next would meet it, and we another one.
    """
    cursor = await connection.execute(_BOUND, (connection.info.backend_pid, int(seconds * 1000)))
    row = await cursor.fetchone()
    is_own = row is not None and row[0] is not None
    if not is_own:
        connection.prepare_threshold = None
    return is_own


async def require_own(connection: AsyncConnection, dsn: str) -> None:
    """Raise ConnectionShared where nothing would be heard, as a pooler shares the connection."""
    cursor = await connection.execute("SELECT pg_backend_pid()")
    if await cursor.fetchone() != (connection.info.backend_pid,):
        await asyncio.to_thread(refuse_shared, dsn, address_of(connection))


class Connector:
    """Makes the connections of one node, and refuses what a pooler shares with others.

    Who listens there is told at the start: all seems to work as long as nobody else is served.
    """

    def __init__(self, conninfo: str, answer_timeout: timedelta) -> None:
        self._conninfo = conninfo
        self._answer_seconds = answer_timeout.total_seconds()
        given = conninfo_to_dict(conninfo)
        self._values = {name: int(str(given[name])) for name in _KEEPALIVES}
        # Whether a pooler was found to give each client a backend of its own.
        self._is_trusted = False

    def connect(self) -> Connection:
        """Connect; raises ServerUnreachable, and ConnectionShared behind a pooler of that kind."""
        try:
            connection = Connection.connect(self._conninfo, autocommit=True)
            connection.answer_seconds = self._answer_seconds
            try:
                row = connection.execute(_GREETING, self._parameters(connection)).fetchone()
            except BaseException:
                connection.close()
                raise
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        if self._is_good(row):
            return connection
        # The probe needs room in the pool.
        address = address_of(connection)
        connection.close()
        refuse_shared(self._conninfo, address)
        self._is_trusted = True
        return self.connect()

    async def connect_async(self) -> AsyncConnection:
        """See :meth:`connect`."""
        try:
            connection = await AsyncConnection.connect(self._conninfo, autocommit=True)
            connection.answer_seconds = self._answer_seconds
            try:
                cursor = await connection.execute(_GREETING, self._parameters(connection))
                row = await cursor.fetchone()
            except BaseException:
                await connection.close()
                raise
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        if self._is_good(row):
            return connection
        address = address_of(connection)
        await connection.close()
        await asyncio.to_thread(refuse_shared, self._conninfo, address)
        self._is_trusted = True
        return await self.connect_async()

    def _parameters(self, connection: Connection | AsyncConnection) -> dict[str, int]:
        return {"pid": connection.info.backend_pid, **self._values}

    def _is_good(self, row: tuple[Any, ...] | None) -> bool:
        return self._is_trusted or (row is not None and row[0] is not None)
