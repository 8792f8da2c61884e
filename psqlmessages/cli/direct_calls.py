"""Connections of commands that need no node, and the calls on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.calls import Call, translate_error
from psqlmessages.client.options import complete_conninfo
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
    row = connection.execute(call.sql, call.params).fetchone()
    return call.read(row[0] if row else None)
