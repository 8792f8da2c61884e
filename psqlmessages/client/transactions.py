"""Transactions and steps: generators without I/O, and functions that run them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import pq

from psqlmessages.client.calls import Call

T = TypeVar("T")

Rows = list[tuple[Any, ...]]


class SqlStatement(NamedTuple):
    """SQL and its parameters; SQL without parameters may consist of several statements."""

    sql: str
    params: tuple[Any, ...] | None = None

    @property
    def prepare(self) -> bool | None:
        """Value of psycopg's parameter ``prepare``: several statements cannot be prepared."""
        return None if self.params else False


# A generator that yields statements, receives the rows of each, and returns a result.
Script = Generator[SqlStatement, Rows, T]


@dataclass(slots=True, kw_only=True)
class TransactionCall(Call[T]):
    """A call that runs a script instead of one statement; the result is that of the script.

    The script itself begins and commits its transaction, which is rolled back if the script fails.
    """

    script: Callable[[], Script[T]]


def transaction(script: Callable[[], Script[T]]) -> TransactionCall[T]:
    """Create a call that runs a script."""
    return TransactionCall(sql="", params=(), read=lambda result: result, script=script)


def run_transaction(connection: psycopg.Connection[Any], script: Script[T]) -> T:
    """Run a script and return its result; roll back a transaction that it leaves open."""

    def execute(statement: SqlStatement) -> Rows:
        cursor = connection.execute(*statement, prepare=statement.prepare)
        return cursor.fetchall() if _has_rows(cursor) else []

    try:
        return run_steps(script, execute)
    finally:
        if not _is_idle(connection):
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK", prepare=False)
        if not _is_idle(connection):
            # Ctrl-C interrupted a query before its answer was read: the connection is unusable.
            connection.close()


async def run_transaction_async(connection: psycopg.AsyncConnection[Any], script: Script[T]) -> T:
    """See :func:`run_transaction`."""

    async def execute(statement: SqlStatement) -> Rows:
        cursor = await connection.execute(*statement, prepare=statement.prepare)
        return await cursor.fetchall() if _has_rows(cursor) else []

    try:
        return await run_steps_async(script, execute)
    finally:
        if not _is_idle(connection):
            with suppress(psycopg.Error):
                await connection.execute("ROLLBACK", prepare=False)
        if not _is_idle(connection):
            await connection.close()


def _has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    # Not ``cursor.description``, which takes a tenth of the time of a short call.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def _is_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


# Steps: a generator without I/O. It yields `Call` and `Wait` objects and receives their results.


@dataclass(frozen=True, slots=True)
class Wait:
    """A step: wait until something is ready, the deadline has passed, or the node is stopped."""

    is_ready: Callable[[], object]
    deadline: float


Steps = Generator[Call[Any] | Wait, Any, T]


def run_steps(steps: Generator[Any, Any, T], execute: Callable[[Any], Any]) -> T:
    """Execute the steps one after the other; send the result or error of each to the generator."""
    try:
        step = next(steps)
        while True:
            try:
                result = execute(step)
            except Exception as error:  # noqa: BLE001 - raised in the generator
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        steps.close()


async def run_steps_async(
    steps: Generator[Any, Any, T], execute: Callable[[Any], Awaitable[Any]]
) -> T:
    """See :func:`run_steps`."""
    try:
        step = next(steps)
        while True:
            try:
                result = await execute(step)
            except (Exception, asyncio.CancelledError) as error:
                # If this task was cancelled, stop. Otherwise the step has awaited another task that
                # was cancelled, and CancelledError is the error of the step.
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and (not task or task.cancelling()):
                    raise
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        steps.close()
