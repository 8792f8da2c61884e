"""Dialing: the connections of one node: its backend's own, and watched from both ends."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from psqlmessages.client.connections import AsyncConnection, Connection
from psqlmessages.client.pooling import address_of, refuse_shared
from psqlmessages.exceptions import ServerUnreachable

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


class Dialer:
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
