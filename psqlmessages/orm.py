"""ORM: calls on Django's own connection, within its transaction, and under which name."""

from __future__ import annotations

from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from psycopg import Error

from psqlmessages.client.calls import Call, error_of
from psqlmessages.conf import get_settings
from psqlmessages.databases import postgresql
from psqlmessages.exceptions import MessagesError

T = TypeVar("T")


def own_ident() -> str:
    """Return PSQLMESSAGES["NODE"]; raise ImproperlyConfigured where it is not set."""
    ident = get_settings().NODE
    if not ident:
        raise ImproperlyConfigured(
            "Under which name this project sends is not set:"
            ' PSQLMESSAGES = {"NODE": "shop"} in the settings, or ident="shop" in the call.'
        )
    return ident


def run(call: Call[T], using: str) -> T:
    """Run a call, and raise the error of its refusal, which breaks no transaction."""
    rows = fetch(call.sql, call.params, using)
    return call.read(rows[0][0] if rows else None)


def fetch(sql: str, params: Any, using: str) -> list[tuple[Any, ...]]:
    """Fetch the rows of a statement; a refusal raises its error, and breaks the transaction."""
    with postgresql(using).cursor() as cursor:
        try:
            cursor.execute(sql, params)
        except DatabaseError as error:
            raise_ours(error)
            raise
        return cursor.fetchall()


def raise_ours(error: DatabaseError) -> None:
    """Raise what an error of Django's is among ours; nothing where it is none of these."""
    if isinstance(cause := error.__cause__, Error):
        refusal = error_of(cause, is_broken=False)
        if isinstance(refusal, MessagesError):
            raise refusal from error
