"""Pool: a few connections to one database, which all requests of an event loop share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import psycopg

from psqlmessages.client.calls import error_of
from psqlmessages.client.connections import AsyncConnection, is_broken, is_readable
from psqlmessages.client.dialing import bound
from psqlmessages.client.options import conninfo
from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.rest.faults import Unavailable

Row = tuple[Any, ...]

ANSWER_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 5.0
# So long a call waits for one of the connections.
_TURN_SECONDS: Final = 5.0
# After a failed connection all are refused for a moment: each attempt may take seconds.
_REFUSING_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 60.0
# Without requests no later success is seen, so a failure is reported for this long.
_REPORTED_SECONDS: Final = 5.0


async def connected(dsn: str, name: str) -> AsyncConnection:
    """Connect within some seconds; raises ServerUnreachable."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            connection = await AsyncConnection.connect(conninfo(dsn, name), autocommit=True)
    except (psycopg.OperationalError, TimeoutError) as error:
        raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
    connection.answer_seconds = ANSWER_SECONDS
    return connection


class Pool:
    """At most so many connections, opened when they are needed and closed when nobody calls."""

    def __init__(self, dsn: str, name: str, most: int) -> None:
        self._dsn = dsn
        self._name = name
        self._idle: list[AsyncConnection] = []
        self._turns = asyncio.Semaphore(most)
        self._refused_until = 0.0
        self._failed_at: float | None = None
        self._working: set[asyncio.Task[list[Row]]] = set()
        self._resting: asyncio.TimerHandle | None = None

    def is_broken(self) -> bool:
        """Return whether the server was just unreachable, and has not answered since."""
        if self._failed_at is None:
            return False
        return asyncio.get_running_loop().time() - self._failed_at < _REPORTED_SECONDS

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[Row]:
        """Run a statement in a transaction of its own; return its rows.

        Where the caller is cancelled a statement that has begun goes on to its end. Raises the
        error of a refusal, ServerUnreachable, Unavailable where all connections are busy for too
        long, and psycopg's errors for what the server aborts.
        """
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise Unavailable("too many calls wait for the database") from None
        task = asyncio.create_task(self._fetch(sql, params), name=self._name)
        self._working.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[list[Row]]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            # Seen, though its caller may have gone.
            task.exception()

    async def _fetch(self, sql: str, params: Sequence[Any]) -> list[Row]:
        try:
            connection = await self._connection()
            try:
                cursor = await connection.execute(sql, params)
                rows = await cursor.fetchall()
            except psycopg.Error as error:
                broken = is_broken(connection, error)
                self._answered(is_lost=broken)
                await self._put_back(connection, is_usable=not broken)
                raise error_of(error, is_broken=broken) from error
            except BaseException:
                await connection.close()
                raise
            self._answered(is_lost=False)
            await self._put_back(connection, is_usable=True)
            return rows
        finally:
            self._turns.release()

    async def _connection(self) -> AsyncConnection:
        while self._idle:
            connection = self._idle.pop()
            # Readable while nobody asked: the server has said good-bye.
            if not connection.closed and not is_readable(connection.fileno()):
                return connection
            await connection.close()
        loop = asyncio.get_running_loop()
        if loop.time() < self._refused_until:
            raise ServerUnreachable("it failed a moment ago")
        try:
            connection = await connected(self._dsn, self._name)
            await bound(connection, ANSWER_SECONDS * 0.8)
        except (ServerUnreachable, psycopg.Error) as error:
            self._answered(is_lost=True)
            self._refused_until = loop.time() + _REFUSING_SECONDS
            raise ServerUnreachable(str(error)) from error
        return connection

    def _answered(self, *, is_lost: bool) -> None:
        self._failed_at = asyncio.get_running_loop().time() if is_lost else None

    async def _put_back(self, connection: AsyncConnection, *, is_usable: bool) -> None:
        if not is_usable or connection.closed:
            await connection.close()
            # What befell it may have befallen those that rest, which would be found out one by one.
            self._rest()
            return
        self._idle.append(connection)
        if self._resting is not None:
            self._resting.cancel()
        loop = asyncio.get_running_loop()
        self._resting = loop.call_later(_IDLE_SECONDS, self._rest)

    def _rest(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.pgconn.finish()
