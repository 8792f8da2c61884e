"""Calls: what the admin asks of SQL. Django is the owner of the functions, or a superuser."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import psycopg
from django.db import OperationalError, connections, router, transaction

from psqlmessages.client.calls import is_passing
from psqlmessages.models import Auth

_PATIENCE = "10s"

Parameters = list[Any] | dict[str, Any] | None


class Gate:
    """What must be closed before rules are looked at that are to be changed.

    Whoever waited for it in vain once does not wait again within the same request.
    """

    @cached_property
    def fault(self) -> str:
        """Close it until the end of the transaction: "" or why it cannot be closed now."""
        try:
            with transaction.atomic(using=database()):
                close_gate()
        except OperationalError as error:
            return refusal(error)
        return ""


def database() -> str:
    """Return the alias of the database that holds the rules."""
    return router.db_for_write(Auth)


def refusal(error: OperationalError) -> str:
    """Return why PostgreSQL refused what may succeed later; raise any other error."""
    cause = error.__cause__
    if not (isinstance(cause, psycopg.Error) and is_passing(cause)):
        raise error
    text = cause.diag.message_primary or str(cause)
    hint = f" {cause.diag.message_hint}" if cause.diag.message_hint else ""
    return f"Nothing was saved: {text}.{hint}"


def role() -> str:
    """Return the role that Django connects as."""
    ((name,),) = rows("SELECT session_user::text")
    return str(name)


def close_gate() -> None:
    """Block other changes of rules until this transaction ends; wait 10 s at most to do so.

    Changes of state are blocked too, unless open transactions have already made one.
    """
    rows("SELECT messages._close_gate()")


def live_sessions() -> list[int]:
    """Return the sessions whose connection is there."""
    return [session for (session,) in rows("SELECT messages._live_sessions()")]


def clients_of(rules: Iterable[int]) -> list[int]:
    """Return the registrations that rules apply to."""
    return rows("SELECT messages._clients_of(%s)", [list(rules)])[0][0]


def patterns(name: str) -> list[str]:
    """Return what a rule may hold to match a name."""
    return rows("SELECT messages._patterns(%s)", [name])[0][0]


def missing_roles(roles: Iterable[str]) -> list[str]:
    """Return those of these roles that PostgreSQL does not know."""
    found = rows(
        "SELECT DISTINCT g.role FROM unnest(%s::text[]) AS g (role)"
        " WHERE g.role NOT IN (SELECT r.rolname::text FROM pg_roles AS r) ORDER BY g.role",
        [list(roles)],
    )
    return [role for (role,) in found]


def bound_waits() -> None:
    """Wait 10 s at most for each lock, until the transaction ends."""
    rows("SELECT set_config('lock_timeout', %s, true)", [_PATIENCE])


def disconnect(client: int) -> bool:
    """End a registration, with the event `disconnect`; False where it is no more.

    Raises OperationalError where a change of rules holds it up for 10 s.
    """
    with transaction.atomic(using=database()):
        bound_waits()
        found = rows(
            "SELECT messages._disconnect(c.ident) FROM psqlmessages_client AS c WHERE c.id = %s",
            [client],
        )
        return bool(found and found[0][0])


def evaluate() -> None:
    """Have nodes found whose connection has ended, and their crash told."""
    rows("SELECT messages.evaluate()")


def execute(statement: str) -> None:
    """Run a statement without parameters or rows."""
    with connections[database()].cursor() as cursor:
        cursor.execute(statement)


def rows(statement: str, parameters: Parameters = None) -> list[tuple[Any, ...]]:
    """Run a statement in the database that holds the rules; return all rows."""
    with connections[database()].cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()
