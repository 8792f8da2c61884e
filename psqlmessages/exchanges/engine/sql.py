"""Queries that take and deliver elements, and a connection that reconnects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from psqlmessages.client.connect import connect_async
from psqlmessages.client.connection import AsyncConnection, is_broken
from psqlmessages.exchanges.engine.batch import LocalCopy, RemoteCopy, RoutedBatch, TakenElement

# Connections: opened when needed, and reopened after they break.

Row = tuple[Any, ...]
# A server that is away must not hold up the exchanges of others.
CONNECT_SECONDS: Final = 5


@dataclass(frozen=True, slots=True)
class Query:
    """A statement and its parameters. ``is_binary`` requests the result in binary format."""

    sql: str
    parameters: tuple[Any, ...] | None = None
    is_binary: bool = False


class ReconnectingConnection:
    """A connection to one database, for one task at a time."""

    def __init__(self, address: str, answer_seconds: float) -> None:
        self._conninfo = make_conninfo(address, connect_timeout=CONNECT_SECONDS)
        self._answer_seconds = answer_seconds
        self._connection: AsyncConnection | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as known."""
        return self._connection is not None and not self._connection.closed

    async def _ensure_open(self) -> AsyncConnection:
        """Return the connection; open it if necessary."""
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(
                self._conninfo, "exchange", answer_seconds=self._answer_seconds
            )
        return self._connection

    async def execute(self, *queries: Query) -> list[list[Row]]:
        """Run statements in one round trip; return the rows of each."""
        connection = await self._ensure_open()
        try:
            if len(queries) == 1:
                cursors = [await _execute(connection, queries[0])]
            else:
                async with connection.pipeline():
                    cursors = [await _execute(connection, query) for query in queries]
        except psycopg.Error as error:
            if is_broken(connection, error):
                await connection.close()
            raise
        return await _rows(cursors)

    async def execute_and_prefetch(
        self, queries: Sequence[Query], prefetch: Sequence[Query]
    ) -> tuple[list[list[Row]], list[list[Row]] | None]:
        """Run ``queries``, which end with a commit, and ``prefetch``, which begins a transaction.

        Both take one round trip. Return the rows of ``queries`` and of ``prefetch``. If a query in
        ``prefetch`` fails, roll its transaction back, and return None instead of its rows. To get
        the error, run ``prefetch`` alone.
        """
        connection = await self._ensure_open()
        cursors: list[psycopg.AsyncCursor[Row]] = []
        try:
            async with connection.pipeline():
                # Not a comprehension: the cursors before an error are needed below.
                for query in (*queries, *prefetch):
                    cursors.append(await _execute(connection, query))  # noqa: PERF401
        except psycopg.Error as error:
            if is_broken(connection, error):
                await connection.close()
            count = len(queries)
            is_committed = len(cursors) >= count and cursors[count - 1].statusmessage is not None
            if not is_committed:
                raise
            await self.reset()
            return await _rows(cursors[: len(queries)]), None
        rows = await _rows(cursors)
        return rows[: len(queries)], rows[len(queries) :]

    async def reset(self) -> None:
        """Roll back an open transaction; close the connection if that fails."""
        if self._is_idle():
            return
        with suppress(psycopg.Error):
            await self.execute(Query("ROLLBACK"))
        if not self._is_idle():
            await self.close()

    async def shut_down(self, answer_seconds: float) -> None:
        """Roll back and disconnect; ``answer_seconds`` limits each wait for the server."""
        if self._connection is not None:
            self._connection.answer_seconds = answer_seconds
        await self.reset()
        await self.close()

    def _is_idle(self) -> bool:
        if self._connection is None or self._connection.closed:
            return True
        return self._connection.info.transaction_status is pq.TransactionStatus.IDLE

    async def close(self) -> None:
        """Disconnect; a transaction in progress is rolled back."""
        if self._connection is not None:
            await self._connection.close()


async def _rows(cursors: Sequence[psycopg.AsyncCursor[Row]]) -> list[list[Row]]:
    return [await cursor.fetchall() if cursor.description else [] for cursor in cursors]


async def _execute(connection: AsyncConnection, query: Query) -> psycopg.AsyncCursor[Row]:
    return await connection.execute(query.sql, query.parameters, binary=query.is_binary)


# Duration of a lease, and idle timeout of a transaction that has taken elements. The timeout
# returns the elements if the process has died.
LEASE_SECONDS: Final = 120
_LIMIT_IDLE_TIME: Final = (
    "SELECT set_config('idle_in_transaction_session_timeout', '120s', true), statement_timestamp()"
)
_TAKE: Final = (
    "SELECT id::text, id, body, enc, headers, tries, hops, pushed_at, delivered"
    " FROM messages.take(%s, %s, %s, %s)"
)
_RESERVE: Final = (
    "SELECT lease, id, body, enc, headers, tries, hops, pushed_at, delivered,"
    " statement_timestamp() FROM messages.reserve(%s, %s, %s, %s)"
)
# Measured: psycopg's binary arrays take three times as long as `_array_literal`, and its text
# arrays 30 times as long.
_DELIVER: Final = (
    "SELECT messages.deliver(%s, %s, %s::text[], %s::text[], %s::text[], %s::text[], %s::text[],"
    " %b::text[], %b::text[], %b::text[], %b::timestamptz[], %b::int[])"
)
_PUSH: Final = (
    "SELECT messages.push_many(%s, %s, %b::text[], %s, %b::text[], %s::timestamptz,"
    " %s::float8, %s, %b::text[])"
)


def take(ident: str, queue: str, count: int, *, with_body: bool) -> list[Query]:
    """Create the queries that begin a transaction and take elements; see `read_taken`."""
    take_query = Query(_TAKE, (ident, queue, count, with_body), is_binary=True)
    return [Query("BEGIN"), Query(_LIMIT_IDLE_TIME, is_binary=True), take_query]


def read_taken(answers: Sequence[Sequence[Row]]) -> list[TakenElement]:
    """Read the answers to the three queries of `take`."""
    _, time_rows, rows = answers
    now = time_rows[0][1]
    return [TakenElement._make((*row, now)) for row in rows]


def reserve(ident: str, queue: str, count: int) -> Query:
    """Create a query that reserves elements for LEASE_SECONDS."""
    return Query(_RESERVE, (ident, queue, count, LEASE_SECONDS), is_binary=True)


def release(ident: str, leases: Sequence[str]) -> Query:
    """Create a query that gives elements back without counting an attempt."""
    return Query("SELECT messages.release(%s, VARIADIC %b::text[])", (ident, list(leases)))


def deliver(batch: RoutedBatch) -> Query:
    """Create a query that pushes local copies, removes elements, and gives back failed ones."""
    copies = batch.copies
    return Query(
        _DELIVER,
        (
            batch.plan.ident,
            batch.plan.exchange.source.name,
            # Ids and leases need no quotes.
            _array_literal(batch.outcome_of),
            _array_literal(sorted(batch.failed)) if batch.failed else None,
            _array_literal(copy.ref for copy in copies),
            _array_literal(_quote(copy.mark) for copy in copies),
            _array_literal(_quote(copy.queue) for copy in copies),
            *_change_columns(copies),
        ),
    )


_CHANGES: Final = ("headers", "body", "enc", "mature", "tries")
_FIRST_CHANGE: Final = LocalCopy._fields.index(_CHANGES[0])
_NO_CHANGES: Final = (None,) * len(_CHANGES)


def _change_columns(copies: Sequence[LocalCopy]) -> Sequence[list[Any] | None]:
    """Return the changed values of copies in columns; None for a column without values."""
    changes = [copy[_FIRST_CHANGE:] for copy in copies]
    if changes.count(_NO_CHANGES) == len(changes):
        return _NO_CHANGES
    columns = map(list, zip(*changes, strict=True))
    return [column if any(value is not None for value in column) else None for column in columns]


def _array_literal(texts: Iterable[str]) -> str:
    """Format a PostgreSQL array of texts that are quoted or need no quotes."""
    return "{" + ",".join(texts) + "}"


@lru_cache(maxsize=4096)
def _quote(text: str | None) -> str:
    """Quote an element of an array; return NULL for None."""
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def push(ident: str, copies: Sequence[RemoteCopy]) -> Query:
    """Create a query that pushes copies, which may differ only in body, headers and key."""
    first = copies[0]
    return Query(
        _PUSH,
        (
            ident,
            first.queue,
            [copy.body for copy in copies],
            first.enc,
            [copy.headers for copy in copies],
            first.mature,
            first.delay,
            first.tries,
            [copy.key for copy in copies],
        ),
    )
