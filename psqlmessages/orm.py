"""Calls on Django's own connection, in its transaction; connection strings; times with zones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.timezone import get_default_timezone, is_naive, make_aware
from psycopg import Error, pq
from psycopg.conninfo import make_conninfo

from psqlmessages.client.calls import Call, translate_error
from psqlmessages.client.refused_calls import Params, caller_of, refused_calls, rule_of_call
from psqlmessages.conf import get_settings
from psqlmessages.exceptions import MessagesError

DIRECT_ALIAS: Final = "direct"

T = TypeVar("T")


def resolve_alias(using: str | None) -> str:
    """Return ``using``, a database alias; if that is empty, PSQLMESSAGES["DATABASE"]."""
    return using or get_settings().DATABASE


def postgresql_connection(using: str | None = None) -> BaseDatabaseWrapper:
    """Return Django's connection to a database; raise ImproperlyConfigured if not PostgreSQL."""
    connection = connections[resolve_alias(using)]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"Database {connection.alias!r} is {connection.display_name}:"
            " psqlmessages needs PostgreSQL."
        )
    return connection


def database_dsn(using: str | None = None) -> str:
    """Return the connection string of a configured database."""
    return connection_dsn(postgresql_connection(using))


def direct_dsn(using: str | None = None) -> str:
    """Return the connection string for sessions that LISTEN, which a pooler must not share.

    For PSQLMESSAGES["DATABASE"], return the string of PSQLMESSAGES["DIRECT_DATABASE"], or else of
    the alias "direct" if it exists. For any other alias, return the string of this alias.
    """
    if resolve_alias(using) == get_settings().DATABASE:
        using = direct_alias() or using
    return database_dsn(using)


def direct_alias() -> str | None:
    """Return the alias for PSQLMESSAGES["DATABASE"] without a pooler; None if there is none."""
    alias = get_settings().DIRECT_DATABASE
    return alias or (DIRECT_ALIAS if DIRECT_ALIAS in connections else None)


def connection_dsn(connection: BaseDatabaseWrapper) -> str:
    """Return the connection string of a Django connection, from its parameters for libpq."""
    parameters = connection.get_connection_params()
    libpq_names = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    return make_conninfo(**{key: parameters[key] for key in parameters if key in libpq_names})


def own_ident(ident: str | None = None) -> str:
    """Return ``ident``, or NODE of the settings; raise ImproperlyConfigured if both are unset."""
    if ident is not None:
        return ident
    if not (ident := get_settings().NODE):
        raise ImproperlyConfigured(
            'PSQLMESSAGES["NODE"] is not set. Add PSQLMESSAGES = {"NODE": "shop"} to the settings,'
            ' or pass ident="shop" to the call.'
        )
    return ident


def run(call: Call[T], using: str | None) -> T:
    """Run a call. An error in its answer is raised, and does not break the transaction."""
    rows = fetch(call.sql, call.params, using)
    with explaining_refused_calls(call.sql, call.params, using):
        return call.read(rows[0][0] if rows else None)


@contextmanager
def explaining_refused_calls(sql: str, params: Params, using: str | None) -> Iterator[None]:
    """Count a call that is refused in the block, and store its caller in the error."""
    try:
        with counting_refused_calls(sql, params):
            yield
    except MessagesError as error:
        error.caller = caller_of(postgresql_connection(using).connection.info.user, sql, params)
        raise


@contextmanager
def counting_refused_calls(sql: str, params: Params) -> Iterator[None]:
    """Count a call that is refused in the block, by its node."""
    try:
        yield
    except MessagesError as error:
        refused_calls.record(rule_of_call(sql, params).ident, error, sql, params)
        raise


def fetch(sql: str, params: Any, using: str | None) -> list[tuple[Any, ...]]:
    """Run a statement and return its rows. An error of PostgreSQL breaks the transaction."""
    with postgresql_connection(using).cursor() as cursor:
        try:
            cursor.execute(sql, params)
        except DatabaseError as error:
            with explaining_refused_calls(sql, params, using):
                raise_messages_error(error)
            raise
        return cursor.fetchall()


def raise_messages_error(error: DatabaseError) -> None:
    """Raise the MessagesError for this database error; return if there is none."""
    if isinstance(cause := error.__cause__, Error):
        translated = translate_error(cause, is_broken=False)
        if isinstance(translated, MessagesError):
            raise translated from error


def with_zone(time: datetime) -> datetime:
    """Return a time that Django has read, with its zone; with USE_TZ = False, Django omits it."""
    return make_aware(time, get_default_timezone()) if is_naive(time) else time
