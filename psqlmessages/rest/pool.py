"""Connection pool of one database, and the queries of queues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import psycopg

from psqlmessages.client.calls import raise_for_error, translate_error
from psqlmessages.client.connect import connect_async
from psqlmessages.client.connection import AsyncConnection, is_broken, is_readable
from psqlmessages.exceptions import QueueNotExistent, ServerUnreachable
from psqlmessages.models import Queue
from psqlmessages.orm import counting_refused_calls
from psqlmessages.rest.errors import ServiceUnavailable

Row = tuple[Any, ...]

ANSWER_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 5.0
# Maximum wait for a free connection.
_MAX_WAIT_SECONDS: Final = 5.0
# For this long after a failed attempt to connect, calls fail without another attempt, which may
# take seconds.
_FAIL_FAST_SECONDS: Final = 0.5
# Close idle connections if the pool was not used for this long.
_IDLE_SECONDS: Final = 60.0
# For this long after a call that failed to reach the server, the pool is broken, unless a later
# call reaches the server.
_BROKEN_SECONDS: Final = 5.0


class Pool:
    """A limited number of connections for one event loop, opened if needed and closed when idle."""

    def __init__(self, dsn: str, name: str, max_connections: int) -> None:
        self._dsn = dsn
        self._name = name
        self._idle: list[AsyncConnection] = []
        self._slots = asyncio.Semaphore(max_connections)
        self._fail_fast_until = 0.0
        self._failed_at: float | None = None
        self._tasks: set[asyncio.Task[list[Row]]] = set()
        self._idle_timer: asyncio.TimerHandle | None = None

    def is_broken(self) -> bool:
        """Return whether the last call failed to reach the server, less than 5 s ago."""
        if self._failed_at is None:
            return False
        return asyncio.get_running_loop().time() - self._failed_at < _BROKEN_SECONDS

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[Row]:
        """Run a statement in its own transaction and return its rows.

        If the caller is cancelled, a running statement still completes. Raises ServerUnreachable;
        ServiceUnavailable if all connections are busy for too long; and psycopg's errors, or those
        that ``translate_error`` makes of them, if the server aborts the statement.
        """
        try:
            async with asyncio.timeout(_MAX_WAIT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            raise ServiceUnavailable("too many calls are waiting for the database") from None
        task = asyncio.create_task(self._fetch(sql, params), name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return await asyncio.shield(task)

    async def call(self, function: str, *params: Any) -> dict[str, Any]:
        """Call an SQL function, such as "pause(%s, %s)"; return its answer, or raise its error.

        Also raises the errors of ``fetch``.
        """
        sql = f"SELECT messages.{function}"
        ((answer,),) = await self.fetch(sql, params)
        with counting_refused_calls(sql, params):
            return raise_for_error(answer)

    def _on_task_done(self, task: asyncio.Task[list[Row]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Mark the exception as retrieved, in case the caller was cancelled.
            task.exception()

    async def _fetch(self, sql: str, params: Sequence[Any]) -> list[Row]:
        try:
            connection = await self._get_connection()
            try:
                cursor = await connection.execute(sql, params)
                rows = await cursor.fetchall()
            except psycopg.Error as error:
                is_lost = is_broken(connection, error)
                await self._return_connection(connection, is_lost=is_lost)
                with counting_refused_calls(sql, params):
                    raise translate_error(error, is_broken=is_lost) from error
            except BaseException:
                await connection.close()
                raise
            await self._return_connection(connection, is_lost=False)
            return rows
        finally:
            self._slots.release()

    async def _get_connection(self) -> AsyncConnection:
        while self._idle:
            connection = self._idle.pop()
            # If an idle connection has data to read, the server has closed it.
            if not connection.closed and not is_readable(connection.fileno()):
                return connection
            await connection.close()
        loop = asyncio.get_running_loop()
        if loop.time() < self._fail_fast_until:
            raise ServerUnreachable("the last attempt to connect has just failed")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await connect_async(
                    self._dsn, self._name,
                    answer_seconds=ANSWER_SECONDS, statement_seconds=ANSWER_SECONDS * 0.8,
                )  # fmt: skip
        except (psycopg.Error, TimeoutError) as error:
            self._failed_at = loop.time()
            self._fail_fast_until = loop.time() + _FAIL_FAST_SECONDS
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error

    async def _return_connection(self, connection: AsyncConnection, *, is_lost: bool) -> None:
        loop = asyncio.get_running_loop()
        self._failed_at = loop.time() if is_lost else None
        if is_lost or connection.closed:
            await connection.close()
            # The idle connections may have failed too: close them now, not one call at a time.
            self._close_idle()
            return
        self._idle.append(connection)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = loop.call_later(_IDLE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.pgconn.finish()


# Queries of queues

# Times are text, because PostgreSQL's range of times exceeds Python's. A lease need not survive a
# server crash, so the statement commits asynchronously.
_RESERVE: Final = (
    "SELECT id, body, enc, headers::text, to_json(mature) #>> '{}', tries, lease"
    " FROM set_config('synchronous_commit', 'off', true), messages.reserve(%s, %s, %s, %s::float8)"
)
# Returns JSON text, which Python does not parse: it would round the numbers in headers.
_PEEK: Final = """
    SELECT coalesce(json_agg(r ORDER BY p.place), '[]')::text
    FROM (
        SELECT e.*, sum(octet_length(e.body)) OVER (ORDER BY e.place) AS bytes
        FROM messages.peek(%s, %s, %s, %s) WITH ORDINALITY AS e (
            id, queue, body, enc, headers, mature, tries, hops, pushed_at, state, place
        )
    ) AS p, LATERAL (
        SELECT p.id, p.body, p.enc, p.headers::json, p.mature, p.tries, p.hops, p.pushed_at, p.state
    ) AS r
    WHERE p.place = 1 OR p.bytes <= %s OR p.bytes IS NULL
"""
_MAX_PEEKED_BYTES: Final = 1024**2
_READ_STATUS: Final = (
    "SELECT messages.sizes(%s, %s),"
    " (SELECT to_json(q) FROM messages.list_queues(ARRAY[%s::text]) AS q LIMIT 1)"
)
# Lists only queues that the node may use: other queues have an error in ``sizes``. OFFSET 0 keeps
# the subqueries apart, so that ``sizes`` is called once per queue, in order, until LIMIT.
_LIST: Final = (
    "SELECT l.queue, l.sizes, l.counters FROM ("
    "SELECT q.queue, messages.sizes(%s, q.queue) AS sizes, to_json(q) AS counters"
    ' FROM (SELECT * FROM messages.queues AS q WHERE q.queue COLLATE "C" > %s'
    ' ORDER BY q.queue COLLATE "C" OFFSET 0) AS q OFFSET 0'
    ") AS l WHERE l.sizes ->> 'Err' = '0' LIMIT %s"
)

_EMPTY_SIZES: Final = {
    **dict.fromkeys(("Total", "Available", "Scheduled", "Reserved"), 0),
    "Paused": False,
}


class LeasedElement(NamedTuple):
    """A reserved element. ``headers`` is JSON text; ``mature``: when it became available."""

    id: int
    body: str
    enc: str | None
    headers: str
    mature: str
    tries: int
    lease: str


async def reserve(
    pool: Pool, ident: str, queue: str, count: int, seconds: float
) -> list[LeasedElement]:
    """Reserve up to ``count`` elements, with leases of this many seconds."""
    rows = await pool.fetch(_RESERVE, (ident, queue, count, seconds))
    return [LeasedElement(*row) for row in rows]


async def peek(pool: Pool, ident: str, queue: str, max_rows: int, with_bodies: bool) -> str:
    """Return the first elements of a queue as a JSON array; they stay in the queue."""
    params = (ident, queue, max_rows, with_bodies, _MAX_PEEKED_BYTES)
    ((elements,),) = await pool.fetch(_PEEK, params)
    return str(elements)


async def read_status(pool: Pool, ident: str, queue: str) -> dict[str, Any]:
    """Return the sizes and counters of a queue; if it does not exist, those of an empty queue."""
    ((sizes, counters),) = await pool.fetch(_READ_STATUS, (ident, queue, queue))
    if sizes["Err"] == str(QueueNotExistent.number) and not queue.endswith("*"):
        defaults = Queue(name=queue)
        settings = {name: getattr(defaults, name) for name in ("dead_letter_queue", "key_timeout")}
        return _build_status(queue, _EMPTY_SIZES, settings)
    with counting_refused_calls(_READ_STATUS, (ident, queue)):
        return _build_status(queue, raise_for_error(sizes), counters or {})


async def list_statuses(
    pool: Pool, ident: str, after: str, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Return up to ``limit`` queues that the node may use, and ``after`` for the next page."""
    rows = await pool.fetch(_LIST, (ident, after, limit))
    queues = [_build_status(*row) for row in rows]
    return queues, rows[-1][0] if len(rows) == limit else None


def _build_status(queue: str, sizes: dict[str, Any], counters: dict[str, Any]) -> dict[str, Any]:
    lower_case = {name.lower(): value for name, value in sizes.items() if name != "Err"}
    return {**counters, **lower_case, "queue": queue}
