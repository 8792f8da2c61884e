"""Connection pool of one database, shared by the requests of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import psycopg

from psqlmessages.client.calls import raise_for_error, translate_error
from psqlmessages.client.connect import bound
from psqlmessages.client.connection import AsyncConnection, is_broken, is_readable
from psqlmessages.client.options import conninfo
from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.rest.errors import ServiceUnavailable

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
            raise ServiceUnavailable("too many calls wait for the database") from None
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
                raise translate_error(error, is_broken=broken) from error
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


# Elements: the SQL calls of queues as the API makes them, for any node and without a session.

# Times as text: PostgreSQL's reach further than Python's. The reservation need not outlive a crash
# of the server, so it does not wait for the disk: who takes for good does so as it commits.
_RESERVE: Final = (
    "SELECT id, body, enc, headers::text, to_json(mature) #>> '{}', tries, lease"
    " FROM set_config('synchronous_commit', 'off', true), messages.reserve(%s, %s, %s, %s::float8)"
)
_PUSH: Final = (
    "SELECT messages.push(client_id => %s, queue => %s, body => %s, enc => %s, headers => %s,"
    " mature => %s::timestamptz, delay => %s::float8, tries => %s::int, key => %s)"
)
_STATUS: Final = (
    "SELECT messages.sizes(%s, %s),"
    " (SELECT to_json(q) FROM messages.list_queues(ARRAY[%s::text]) AS q LIMIT 1)"
)
# What the node may not use is passed over within: its names are not to be told.
_LIST: Final = (
    "SELECT l.queue, l.sizes, l.counted FROM ("
    "SELECT q.queue, messages.sizes(%s, q.queue) AS sizes, to_json(q) AS counted"
    ' FROM (SELECT * FROM messages.queues AS q WHERE q.queue COLLATE "C" > %s'
    ' ORDER BY q.queue COLLATE "C" OFFSET 0) AS q OFFSET 0'
    ") AS l WHERE l.sizes ->> 'Err' = '0' LIMIT %s"
)


class TakenRow(NamedTuple):
    """An element that was taken: its body as it travels, its headers as JSON text."""

    id: int
    body: str
    enc: str | None
    headers: str
    mature: str
    tries: int
    lease: str


class Push(NamedTuple):
    """What is pushed, besides the body."""

    headers: str
    mature: datetime | None
    delay: float | None
    tries: int
    key: str | None


async def push(
    pool: Pool, ident: str, queue: str, body: str, enc: str | None, given: Push
) -> dict[str, Any]:
    """Push; the answer has ``Id``, and ``Already`` where the key was there."""
    params = (ident, queue, body, enc, given.headers, given.mature, given.delay)
    return await _answer(pool, _PUSH, (*params, given.tries, given.key))


async def reserve(pool: Pool, ident: str, queue: str, count: int, seconds: float) -> list[TakenRow]:
    """Reserve elements for some seconds."""
    rows = await pool.fetch(_RESERVE, (ident, queue, count, seconds))
    return [TakenRow(*row) for row in rows]


async def commit(pool: Pool, ident: str, lease: str) -> bool:
    """Remove a reserved element for good; False where the lease does not hold any more."""
    return await _is_done(pool, "SELECT messages.commit(%s, %s)", (ident, lease))


async def rollback(pool: Pool, ident: str, delay: float | None, lease: str) -> bool:
    """Give a reserved element back; False where the lease does not hold any more."""
    sql = "SELECT messages.rollback(%s, %s::float8, %s)"
    return await _is_done(pool, sql, (ident, delay, lease))


async def release(pool: Pool, ident: str, leases: Sequence[str]) -> None:
    """Give back reserved elements that nobody has looked at."""
    sql = "SELECT messages.release(%s, VARIADIC %s::text[])"
    await _answer(pool, sql, (ident, list(leases)))


async def remove(pool: Pool, ident: str, queue: str, number: int) -> bool:
    """Remove an element that is not reserved."""
    answer = await _answer(pool, "SELECT messages.remove(%s, %s, %s)", (ident, queue, number))
    return bool(answer["Done"])


async def pause(pool: Pool, ident: str, queue: str) -> None:
    """Have takers wait."""
    await _answer(pool, "SELECT messages.pause(%s, %s)", (ident, queue))


async def resume(pool: Pool, ident: str, queue: str) -> None:
    """Let takers go on."""
    await _answer(pool, "SELECT messages.resume(%s, %s)", (ident, queue))


async def status(pool: Pool, ident: str, queue: str) -> dict[str, Any]:
    """Read the sizes and counters of a queue."""
    ((sizes, counted),) = await pool.fetch(_STATUS, (ident, queue, queue))
    return queue_status(queue, raise_for_error(sizes), counted or {})


async def statuses(
    pool: Pool, ident: str, after: str, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Read those of the next queues by name that this node may use; and where to go on."""
    rows = await pool.fetch(_LIST, (ident, after, limit))
    found = [queue_status(queue, sizes, counted) for queue, sizes, counted in rows]
    return found, rows[-1][0] if len(rows) == limit else None


def queue_status(queue: str, sizes: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """Put together what the API tells of a queue."""
    named = {name.lower(): value for name, value in sizes.items() if name != "Err"}
    return {**counted, **named, "queue": queue}


async def _is_done(pool: Pool, sql: str, params: Sequence[Any]) -> bool:
    answer = await _answer(pool, sql, params)
    return bool(answer["Done"][0])


async def _answer(pool: Pool, sql: str, params: Sequence[Any]) -> dict[str, Any]:
    ((answer,),) = await pool.fetch(sql, params)
    return raise_for_error(answer)
