"""Calls of several statements, as generators without I/O and their drivers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import pq

from psqlmessages.client.calls import Call
from psqlmessages.exceptions import MessagesError

T = TypeVar("T")

Rows = list[tuple[Any, ...]]


class SqlStatement(NamedTuple):
    """One statement; without parameters it may contain several."""

    sql: str
    params: tuple[Any, ...] | None = None

    @property
    def may_be_prepared(self) -> bool | None:
        """Value of psycopg's ``prepare``: several statements in one string cannot be prepared."""
        return None if self.params else False


Script = Generator[SqlStatement, Rows, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionCall(Call[T]):
    """A call with a script that yields statements and receives the rows of each.

    The script begins and commits its transaction. If it does not finish, it is rolled back.
    """

    script: Callable[[], Script[T]]


def transaction(script: Callable[[], Script[T]]) -> TransactionCall[T]:
    """Create a call from a script."""
    return TransactionCall("", (), lambda result: result, script=script)


def transact(connection: psycopg.Connection[Any], script: Script[T]) -> T:
    """Run a script; the connection has no open transaction before and after it."""
    try:
        statement = next(script)
        while True:
            cursor = connection.execute(
                statement.sql, statement.params, prepare=statement.may_be_prepared
            )
            statement = script.send(cursor.fetchall() if _has_rows(cursor) else [])
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        script.close()
        if not _is_idle(connection):
            _leave(connection)


def _has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    # ``cursor.description`` creates an object per column: a tenth of the time of a short call.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def _is_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


def _leave(connection: psycopg.Connection[Any]) -> None:
    with suppress(psycopg.Error):
        connection.execute("ROLLBACK", prepare=False)
    if not _is_idle(connection):
        # A query was interrupted during its answer: the connection is unusable.
        connection.close()


async def transact_async(connection: psycopg.AsyncConnection[Any], script: Script[T]) -> T:
    """See :func:`transact`."""
    try:
        statement = next(script)
        while True:
            cursor = await connection.execute(
                statement.sql, statement.params, prepare=statement.may_be_prepared
            )
            statement = script.send(await cursor.fetchall() if _has_rows(cursor) else [])
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        script.close()
        if not _is_idle(connection):
            await _leave_async(connection)


async def _leave_async(connection: psycopg.AsyncConnection[Any]) -> None:
    with suppress(psycopg.Error):
        await connection.execute("ROLLBACK", prepare=False)
    if not _is_idle(connection):
        await connection.close()


# Steps: calls and waits that a generator without I/O yields, and drivers that execute them


@dataclass(frozen=True, slots=True)
class Wait:
    """A step: wait until something is ready, the deadline has passed, or the node is stopped."""

    is_ready: Callable[[], object]
    deadline: float


Steps = Generator[Call[Any] | Wait, Any, T]


def drive(steps: Steps[T], do: Callable[[Any], Any]) -> T:
    """Execute the steps one after the other; send the answer or error of each to the generator."""
    try:
        step = next(steps)
        while True:
            try:
                answer = do(step)
            except (MessagesError, psycopg.Error) as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def drive_async(steps: Steps[T], do: Callable[[Any], Awaitable[Any]]) -> T:
    """See :func:`drive`."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await do(step)
            except (MessagesError, psycopg.Error) as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
