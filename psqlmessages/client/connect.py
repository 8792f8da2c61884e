"""Connecting: keepalives, timeouts, and detection of poolers that share connections."""

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

# With a busy pool of two backends, one round detects sharing only by chance.
_DETECTION_ROUNDS = 12
_ANSWER_TIMEOUT = timedelta(seconds=10)
_DETECTION_TIMEOUT = timedelta(seconds=3)


class PoolerKind(Enum):
    """The kind of pooler that was found."""

    NONE = "none"
    SESSION = "session"
    TRANSACTION = "transaction"
    STATEMENT = "statement"

    @property
    def is_shared(self) -> bool:
        """Whether a backend serves several clients; a node cannot use such a backend."""
        return self in (PoolerKind.TRANSACTION, PoolerKind.STATEMENT)


def detect_pooler(dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT) -> PoolerKind:
    """Detect a pooler with two connections; raise psycopg.Error if the server refuses them.

    If two clients see the same backend, or one client sees two, the pooler shares backends. If a
    pooler gives each client its own backend, the process id at log-in is not the backend's.
    """
    # psycopg's context managers would send to a connection that may still wait for an answer.
    with closing(connect(dsn, answer_timeout)) as first:
        try:
            first_pid = _backend_pid(first)
            with closing(connect(dsn, answer_timeout)) as second:
                second_pids: set[int] = set()
                for _ in range(_DETECTION_ROUNDS):
                    second_pids.add(_occupy_backend(second))
                    is_shared = first_pid in second_pids or len(second_pids) > 1
                    # If ``second`` occupies the backend of ``first``, this call would wait for it.
                    is_shared = is_shared or _backend_pid(first) != first_pid
                    second.execute("ROLLBACK")
                    if is_shared:
                        return PoolerKind.TRANSACTION
        except AnswerTimeout:
            # It waits for a backend of its own; a transaction pooler would have given it one.
            return PoolerKind.SESSION
        except _TransactionRefused:
            return PoolerKind.STATEMENT
        is_pooled = first.info.backend_pid != first_pid
        return PoolerKind.SESSION if is_pooled else PoolerKind.NONE


def address_of(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None) -> str:
    """Return the host and port of a connection, for messages; the connection may be lost."""
    if connection is None or connection.closed:
        return "an address no longer known"
    return f"{connection.info.host}:{connection.info.port}"


def raise_if_shared(dsn: str, address: str) -> None:
    """Raise ConnectionShared if the pooler at this address shares connections."""
    try:
        kind = detect_pooler(dsn, _DETECTION_TIMEOUT)
    except psycopg.Error as error:
        raise ServerUnreachable(
            f"cannot detect the kind of the pooler at {address}: {str(error).strip()}"
        ) from error
    if kind.is_shared:
        raise ConnectionShared(f"the pooler at {address} shares connections by {kind.value}")


def connect(
    dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT, ident: str = "doctor"
) -> Connection:
    """Connect in a way that works through any kind of pooler."""
    connection = Connection.connect(conninfo(dsn, ident), autocommit=True, prepare_threshold=None)
    connection.answer_seconds = answer_timeout.total_seconds()
    return connection


class _TransactionRefused(psycopg.OperationalError):
    """The server answers statements, but begins no transaction."""


def _occupy_backend(connection: Connection) -> int:
    """Begin a transaction, and return the process id of its backend."""
    _backend_pid(connection)
    try:
        connection.execute("BEGIN")
    except AnswerTimeout:
        raise
    except psycopg.OperationalError as error:
        raise _TransactionRefused(str(error)) from error
    return _backend_pid(connection)


def _backend_pid(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return int(row[0])


# If a client's host vanishes, its nodes seem alive until the server's keepalives fail: by default
# after two hours. Nothing is set behind a pooler; Unix sockets have no keepalives.
_KEEPALIVES: Final = ("keepalives_idle", "keepalives_interval", "keepalives_count")
_SET_KEEPALIVES: Final = "SELECT CASE WHEN pg_backend_pid() = %(pid)s THEN concat({}) END".format(
    ", ".join(
        f"set_config('tcp_{name}',"
        f" least(current_setting('tcp_{name}')::int, %({name})s)::text, false)"
        for name in _KEEPALIVES
    )
)
# At a stricter isolation level, concurrent calls cause serialization errors for each other.
_LIMIT_STATEMENTS: Final = """
    SELECT CASE WHEN pg_backend_pid() = %s THEN concat(
        set_config('statement_timeout', %s::text, false),
        set_config('default_transaction_isolation', 'read committed', false)
    ) END
"""


async def limit_statements(connection: AsyncConnection, seconds: float) -> bool:
    """Set a statement timeout and read committed; return False if there is a pooler in between.

    Then nothing is set, and nothing will be prepared: the pooler may give the backend with these
    statements to another client, and give us one without them.
    """
    cursor = await connection.execute(
        _LIMIT_STATEMENTS, (connection.info.backend_pid, int(seconds * 1000))
    )
    row = await cursor.fetchone()
    is_own = row is not None and row[0] is not None
    if not is_own:
        connection.prepare_threshold = None
    return is_own


class Connector:
    """Creates the connections of one node, and refuses poolers that share them.

    It checks before the first call: with a single client, shared connections seem to work.
    """

    def __init__(self, conninfo: str, answer_timeout: timedelta) -> None:
        self._conninfo = conninfo
        self._answer_seconds = answer_timeout.total_seconds()
        settings = conninfo_to_dict(conninfo)
        self._keepalives = {name: int(str(settings[name])) for name in _KEEPALIVES}
        # Whether the pooler is known to give each client its own backend.
        self._is_trusted = False

    def connect(self) -> Connection:
        """Connect; raise ServerUnreachable, or ConnectionShared if a pooler shares connections."""
        try:
            connection = Connection.connect(self._conninfo, autocommit=True)
            connection.answer_seconds = self._answer_seconds
            try:
                row = connection.execute(_SET_KEEPALIVES, self._parameters(connection)).fetchone()
            except BaseException:
                connection.close()
                raise
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        if self._has_own_backend(row):
            return connection
        # Close the connection first: the detection needs room in the pool.
        address = address_of(connection)
        connection.close()
        raise_if_shared(self._conninfo, address)
        self._is_trusted = True
        return self.connect()

    async def connect_async(self) -> AsyncConnection:
        """See :meth:`connect`."""
        try:
            connection = await AsyncConnection.connect(self._conninfo, autocommit=True)
            connection.answer_seconds = self._answer_seconds
            try:
                cursor = await connection.execute(_SET_KEEPALIVES, self._parameters(connection))
                row = await cursor.fetchone()
            except BaseException:
                await connection.close()
                raise
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        if self._has_own_backend(row):
            return connection
        address = address_of(connection)
        await connection.close()
        await asyncio.to_thread(raise_if_shared, self._conninfo, address)
        self._is_trusted = True
        return await self.connect_async()

    def _parameters(self, connection: Connection | AsyncConnection) -> dict[str, int]:
        return {"pid": connection.info.backend_pid, **self._keepalives}

    def _has_own_backend(self, row: tuple[Any, ...] | None) -> bool:
        return self._is_trusted or (row is not None and row[0] is not None)
