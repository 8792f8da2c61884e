"""Connections of commands that need no node, and the calls on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.calls import Call, translate_error
from psqlmessages.client.options import complete_conninfo
from psqlmessages.client.refused_calls import caller_of
from psqlmessages.client.transactions import SqlStatement
from psqlmessages.exceptions import MessagesError

T = TypeVar("T")

Connection = psycopg.Connection[tuple[Any, ...]]


@contextmanager
def connect_as(dsn: str, name: str, *, owner_task: str = "") -> Iterator[Connection]:
    """Connect with autocommit and ``name`` in application_name.

    Within the block, an error of the SQL functions or a lost connection raises MessagesError. Other
    errors of psycopg do not change. ``owner_task`` is a task that only the owner of the tables can
    do, such as "prune". If it is given, a missing privilege raises MessagesError too.
    """
    with psycopg.connect(complete_conninfo(dsn, name), autocommit=True) as connection:
        try:
            yield connection
        except psycopg.Error as error:
            if owner_task and isinstance(error, psycopg.errors.InsufficientPrivilege):
                raise MessagesError(
                    f"role {connection.info.user} cannot {owner_task}"
                    f" ({error.diag.message_primary}); connect as the owner of the tables"
                ) from error
            raise translate_error(error, is_broken=connection.closed) from error


def run_call(connection: Connection, call: Call[T]) -> T:
    """Run a call; return its result, or raise the error in its answer."""
    with _storing_caller(connection, call):
        row = connection.execute(call.sql, call.params).fetchone()
        return call.read(row[0] if row else None)


def fetch(connection: Connection, statement: SqlStatement) -> list[tuple[Any, ...]]:
    """Run a statement; return its rows, or raise its error."""
    with _storing_caller(connection, statement):
        return connection.execute(statement.sql, statement.params).fetchall()


@contextmanager
def _storing_caller(connection: Connection, call: Call[Any] | SqlStatement) -> Iterator[None]:
    """Store the caller in an error of the block, so that its text names the missing rule."""
    try:
        try:
            yield
        except psycopg.Error as error:
            raise translate_error(error, is_broken=connection.closed) from error
    except MessagesError as error:
        error.caller = caller_of(connection.info.user, call.sql, call.params or ())
        raise
