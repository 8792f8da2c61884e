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
from psqlmessages.client.options import complete_conninfo
from psqlmessages.exceptions import ConnectionShared, ServerUnreachable

# One round detects sharing only by chance: a busy pooler may give each client the same backend
# several times in a row.
_DETECTION_ROUNDS = 12
_ANSWER_TIMEOUT = timedelta(seconds=10)
_DETECTION_TIMEOUT = timedelta(seconds=3)


class PoolerKind(Enum):
    """Kind of pooler between a client and PostgreSQL: for how long a client keeps a backend."""

    NONE = "none"
    SESSION = "session"
    TRANSACTION = "transaction"
    STATEMENT = "statement"

    @property
    def shares_connections(self) -> bool:
        """Whether several clients share a backend; a node needs its own backend."""
        return self in (PoolerKind.TRANSACTION, PoolerKind.STATEMENT)


def detect_pooler(dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT) -> PoolerKind:
    """Detect the kind of pooler with two connections; raise psycopg.Error if one of them fails.

    If both see the same backend, or one of them sees two backends, the pooler shares backends. A
    pooler that does not share them sends a process id at log-in that is not the backend's.
    """
    # Not psycopg's context managers: they commit, although a statement may still be running.
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
            # ``second`` waits for a free backend. A transaction pooler would have lent it the
            # backend of ``first``, which is in no transaction.
            return PoolerKind.SESSION
        except _TransactionRefused:
            return PoolerKind.STATEMENT
        is_pooled = first.info.backend_pid != first_pid
        return PoolerKind.SESSION if is_pooled else PoolerKind.NONE


def host_and_port(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None) -> str:
    """Return the address of a connection, for error texts."""
    if connection is None or connection.closed:
        return "an unknown address"
    return f"{connection.info.host}:{connection.info.port}"


def refuse_shared_connections(dsn: str, address: str) -> None:
    """Raise ConnectionShared if the pooler shares connections, ServerUnreachable if unknown."""
    try:
        kind = detect_pooler(dsn, _DETECTION_TIMEOUT)
    except psycopg.Error as error:
        raise ServerUnreachable(
            f"cannot detect the kind of the pooler at {address}: {str(error).strip()}"
        ) from error
    if kind.shares_connections:
        raise ConnectionShared(f"the pooler at {address} shares connections by {kind.value}")


def connect(
    dsn: str, answer_timeout: timedelta = _ANSWER_TIMEOUT, name: str = "doctor"
) -> Connection:
    """Connect without prepared statements, so that any kind of pooler works."""
    connection = Connection.connect(
        complete_conninfo(dsn, name), autocommit=True, prepare_threshold=None
    )
    connection.answer_seconds = answer_timeout.total_seconds()
    return connection


class _TransactionRefused(psycopg.OperationalError):
    """The pooler answers statements, but refuses BEGIN."""


def _occupy_backend(connection: Connection) -> int:
    """Begin a transaction, and return the process id of its backend."""
    # Before BEGIN, so that an error of BEGIN means that the pooler refuses it.
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
# after two hours. Behind a pooler, this statement sets nothing and returns null.
_KEEPALIVES: Final = ("keepalives_idle", "keepalives_interval", "keepalives_count")
_SET_KEEPALIVES: Final = "SELECT CASE WHEN pg_backend_pid() = %(pid)s THEN concat({}) END".format(
    ", ".join(
        f"set_config('tcp_{name}',"
        f" least(current_setting('tcp_{name}')::int, %({name})s)::text, false)"
        for name in _KEEPALIVES
    )
)
# At a stricter isolation level, concurrent calls cause serialization errors for each other.
_SET_UP: Final = """
    SELECT CASE WHEN pg_backend_pid() = %(pid)s THEN concat(
        set_config(
            'statement_timeout', coalesce(%(timeout)s, current_setting('statement_timeout')), false
        ),
        set_config('default_transaction_isolation', 'read committed', false)
    ) END
"""


async def connect_async(
    dsn: str, name: str, *, answer_seconds: float, statement_seconds: float | None = None
) -> AsyncConnection:
    """Connect with autocommit; set the isolation level and, if given, a statement timeout.

    ``name`` is for application_name.
    Behind a pooler, set nothing, and do not prepare statements. The pooler may give the backend
    with our settings and statements to another client, and give us a backend without them.
    """
    timeout = None if statement_seconds is None else f"{statement_seconds * 1000:.0f}"
    set_up = (_SET_UP, {"timeout": timeout})
    connection = await _connect_async(complete_conninfo(dsn, name), answer_seconds, *set_up)
    if connection.is_pooled:
        connection.prepare_threshold = None
    return connection


async def _connect_async(
    conninfo: str, answer_seconds: float, set_up: str, parameters: dict[str, Any]
) -> AsyncConnection:
    connection = await AsyncConnection.connect(conninfo, autocommit=True)
    connection.answer_seconds = answer_seconds
    try:
        parameters = {"pid": connection.info.backend_pid, **parameters}
        ((result,),) = await (await connection.execute(set_up, parameters)).fetchall()
    except BaseException:
        await connection.close()
        raise
    connection.is_pooled = result is None
    return connection


class Connector:
    """Creates the connections of one node, and refuses poolers that share connections.

    The pooler is detected before the first call, because shared connections seem to work while
    there is only one client.
    """

    def __init__(self, conninfo: str, answer_timeout: timedelta) -> None:
        self._conninfo = conninfo
        self._answer_seconds = answer_timeout.total_seconds()
        settings = conninfo_to_dict(conninfo)
        self._keepalives = {name: int(str(settings[name])) for name in _KEEPALIVES}
        # Whether there is a pooler that gives each client its own backend.
        self._is_session_pooler = False

    def connect(self) -> Connection:
        """Connect; raise ServerUnreachable, or ConnectionShared if a pooler shares connections."""
        try:
            connection = Connection.connect(self._conninfo, autocommit=True)
            connection.answer_seconds = self._answer_seconds
            parameters = {"pid": connection.info.backend_pid, **self._keepalives}
            try:
                ((result,),) = connection.execute(_SET_KEEPALIVES, parameters).fetchall()
            except BaseException:
                connection.close()
                raise
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        if result is not None or self._is_session_pooler:
            return connection
        # Close the connection first: the pooler may have no backends left for the detection.
        address = host_and_port(connection)
        connection.close()
        refuse_shared_connections(self._conninfo, address)
        self._is_session_pooler = True
        return self.connect()

    async def connect_async(self) -> AsyncConnection:
        """See :meth:`connect`."""
        try:
            set_up = (_SET_KEEPALIVES, self._keepalives)
            connection = await _connect_async(self._conninfo, self._answer_seconds, *set_up)
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        if not connection.is_pooled or self._is_session_pooler:
            return connection
        address = host_and_port(connection)
        await connection.close()
        await asyncio.to_thread(refuse_shared_connections, self._conninfo, address)
        self._is_session_pooler = True
        return await self.connect_async()
