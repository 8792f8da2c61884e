"""Lines: connections that are made when they are needed, and anew after they broke."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import pq

from psqlmessages.client.connections import AsyncConnection, is_broken

CONNECT_SECONDS: Final = 5

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Query:
    """A statement and its parameters; ``is_binary`` asks for the answer in binary form."""

    sql: str
    parameters: tuple[Any, ...] | None = None
    is_binary: bool = False


# Whatever the role has by default: above it, loops that take from one queue fail each other, and
# what was popped is not there to be pushed again. On a backend that a pooler lends nothing is set.
_READ_COMMITTED: Final = """
    SELECT CASE WHEN pg_backend_pid() = %s
        THEN set_config('default_transaction_isolation', 'read committed', false) END
"""


class Line:
    """A connection to one database, for one task at a time."""

    def __init__(self, address: str, answer_seconds: float) -> None:
        self._address = address
        self._answer_seconds = answer_seconds
        self._connection: AsyncConnection | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None and not self._connection.closed

    async def open(self) -> AsyncConnection:
        """Return the connection, made where there is none."""
        if self._connection is None or self._connection.closed:
            self._connection = await self._connected()
        return self._connection

    async def _connected(self) -> AsyncConnection:
        connection = await AsyncConnection.connect(
            self._address, autocommit=True, connect_timeout=CONNECT_SECONDS
        )
        connection.answer_seconds = self._answer_seconds
        try:
            await connection.execute(_READ_COMMITTED, (connection.info.backend_pid,))
        except BaseException:
            await connection.close()
            raise
        return connection

    async def ask(self, *queries: Query) -> list[list[Row]]:
        """Run statements in one round trip; return the rows of each."""
        connection = await self.open()
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

    async def ask_on(
        self, queries: Sequence[Query], ahead: Sequence[Query]
    ) -> tuple[list[list[Row]], list[list[Row]] | None]:
        """Run statements, of which the last commits, and ahead of time those of a next transaction.

        All in one round trip. Return the rows of each; None for those ahead where one failed:
        nothing is left of them, and whoever asks for them alone is told why.
        """
        connection = await self.open()
        cursors: list[psycopg.AsyncCursor[Row]] = []
        try:
            async with connection.pipeline():
                # One by one: those before an error are wanted.
                for query in (*queries, *ahead):
                    cursors.append(await _execute(connection, query))  # noqa: PERF401
        except psycopg.Error as error:
            if is_broken(connection, error):
                await connection.close()
            if len(cursors) < len(queries) or cursors[len(queries) - 1].statusmessage is None:
                raise
            await self.reset()
            return await _rows(cursors[: len(queries)]), None
        rows = await _rows(cursors)
        return rows[: len(queries)], rows[len(queries) :]

    async def transact(self, queries: Sequence[Query]) -> list[list[Row]]:
        """Run statements as one transaction, in one round trip; return the rows of each."""
        return (await self.ask(Query("BEGIN"), *queries, Query("COMMIT")))[1:-1]

    async def reset(self) -> None:
        """Leave a transaction that failed; a connection that cannot be used is closed."""
        if self._connection is None or self._is_idle():
            return
        with suppress(psycopg.Error):
            await self.ask(Query("ROLLBACK"))
        if not self._is_idle():
            await self._connection.close()

    async def end(self, seconds: float) -> None:
        """Leave a transaction, within some seconds, and disconnect."""
        if self._connection is not None:
            self._connection.answer_seconds = seconds
        await self.reset()
        await self.close()

    def _is_idle(self) -> bool:
        if self._connection is None or self._connection.closed:
            return True
        return self._connection.info.transaction_status is pq.TransactionStatus.IDLE

    async def close(self) -> None:
        """Disconnect; what is under way is rolled back."""
        if self._connection is not None:
            await self._connection.close()


async def _rows(cursors: Sequence[psycopg.AsyncCursor[Row]]) -> list[list[Row]]:
    return [await cursor.fetchall() if cursor.description else [] for cursor in cursors]


async def _execute(connection: AsyncConnection, query: Query) -> psycopg.AsyncCursor[Row]:
    return await connection.execute(query.sql, query.parameters, binary=query.is_binary)
