"""Databases: the address of a database of Django's, for connections of our own."""

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import pq
from psycopg.conninfo import make_conninfo


def postgresql(using: str = DEFAULT_DB_ALIAS) -> BaseDatabaseWrapper:
    """Return Django's connection of an alias; raise ImproperlyConfigured unless PostgreSQL."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"Database {using!r} is {connection.display_name}, and messages need PostgreSQL."
        )
    return connection


def dsn(using: str = DEFAULT_DB_ALIAS) -> str:
    """Write the connection string of a configured database, as Django itself would connect."""
    return address_of(postgresql(using))


def address_of(connection: BaseDatabaseWrapper) -> str:
    """Write the connection string of one of Django's connections."""
    parameters = connection.get_connection_params()
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    return make_conninfo(**{name: value for name, value in parameters.items() if name in known})
