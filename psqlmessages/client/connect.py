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

# Detection of poolers that share backends between clients.

# With a busy pool of two backends, one round detects sharing only by chance.
_ROUNDS = 12
_ANSWER_TIMEOUT = timedelta(seconds=10)
_STARTING_TIMEOUT = timedelta(seconds=3)


class PoolerKind(Enum):
    """The kind of pooler that was found."""

    NONE = "none"
    SESSION = "session"
    TRANSACTION = "transaction"
    STATEMENT = "statement"

    @property
    def shares(self) -> bool:
        """Whether a backend serves several clients; no node can live on such a backend."""
        return self in (PoolerKind.TRANSACTION, PoolerKind.STATEMENT)


def probe(dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT) -> PoolerKind:
    """Detect a pooler with two connections; raise psycopg.Error if the server refuses them.

    If two clients see the same backend, or one client sees two, the pooler shares backends per
    transaction. A pooler that gives each client its own backend is recognized by the process id
    at log-in, which is not the backend's.
    """
    # psycopg's context managers would send to a connection that may still wait for an answer.
    with closing(connect(dsn, answer_timeout)) as one:
        try:
            own = _backend(one)
            with closing(connect(dsn, answer_timeout)) as other:
                held: set[int] = set()
                is_shared = any(_is_shared(one, other, own, held) for _ in range(_ROUNDS))
        except AnswerTimeout:
            # It waits for a backend of its own; a transaction pooler would have given it one.
            return PoolerKind.SESSION
        except _TransactionRefused:
            return PoolerKind.STATEMENT
        if is_shared:
            return PoolerKind.TRANSACTION
        return PoolerKind.SESSION if one.info.backend_pid != own else PoolerKind.NONE


def address_of(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None) -> str:
    """Return the host and port of a connection, for messages; the connection may be lost."""
    if connection is None or connection.closed:
        return "an address no longer known"
    return f"{connection.info.host}:{connection.info.port}"


def refuse_shared(dsn: str, address: str) -> None:
    """Raise ConnectionShared if the pooler at this address shares connections.

    This takes two connections: a single client cannot notice it.
    """
    try:
        found = probe(dsn, _STARTING_TIMEOUT)
    except psycopg.Error as error:
        raise ServerUnreachable(
            f"cannot detect the kind of the pooler at {address}: {str(error).strip()}"
        ) from error
    if found.shares:
        raise ConnectionShared(f"the pooler at {address} shares connections by {found.value}")


def connect(
    dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT, ident: str = "doctor"
) -> Connection:
    """Connect in a way that works through any kind of pooler."""
    connection = Connection.connect(conninfo(dsn, ident), autocommit=True, prepare_threshold=None)
    connection.answer_seconds = answer_timeout.total_seconds()
    return connection


class _TransactionRefused(psycopg.OperationalError):
    """The server answers statements, but begins no transaction."""


def _is_shared(one: Connection, other: Connection, own: int, held: set[int]) -> bool:
    """Occupy a backend with ``other``; return whether it was ours or either backend changed."""
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


# If a host vanishes without closing its connections, Linux checks them only after two hours. Until
# then its nodes would seem alive. Nothing is set behind a pooler; Unix sockets have no keepalives.
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
# At a stricter isolation level, concurrent calls cause serialization errors for each other.
_BOUND: Final = """
    SELECT CASE WHEN pg_backend_pid() = %s THEN concat(
        set_config('statement_timeout', %s::text, false),
        set_config('default_transaction_isolation', 'read committed', false)
    ) END
"""
_KEEPALIVES: Final = ("keepalives_idle", "keepalives_interval", "keepalives_count")


async def bound(connection: AsyncConnection, seconds: float) -> bool:
    """Limit statements, and use read committed; return False if a pooler lends the backend.

    In that case nothing is set, and nothing is prepared: the next client of the backend would find
    the statements, and we would get a backend without them.
    """
    cursor = await connection.execute(_BOUND, (connection.info.backend_pid, int(seconds * 1000)))
    row = await cursor.fetchone()
    is_own = row is not None and row[0] is not None
    if not is_own:
        connection.prepare_threshold = None
    return is_own


class Connector:
    """Creates the connections of one node, and refuses poolers that share them.

    It checks when connecting, because sharing goes unnoticed until the pooler serves another
    client.
    """

    def __init__(self, conninfo: str, answer_timeout: timedelta) -> None:
        self._conninfo = conninfo
        self._answer_seconds = answer_timeout.total_seconds()
        given = conninfo_to_dict(conninfo)
        self._values = {name: int(str(given[name])) for name in _KEEPALIVES}
        # Whether the probe has shown that the pooler gives each client its own backend.
        self._is_trusted = False

    def connect(self) -> Connection:
        """Connect; raise ServerUnreachable, or ConnectionShared if a pooler shares connections."""
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
        # Close the connection first: the probe needs room in the pool.
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
