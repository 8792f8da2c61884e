"""Migrations of a server of a test's own, and all that its tables hold, to compare."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.core.management import call_command
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.conftest import TestedServer

ALIAS = "upgraded"
LATEST = "0008_reinstall"
TABLES = r"""
    SELECT c.oid::regclass::text FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
      AND (c.relnamespace = to_regnamespace('messages') OR c.relname LIKE 'psqlmessages\_%')
"""

Contents = dict[str, list[str]]


@contextmanager
def owners_database(own: TestedServer) -> Iterator[BaseDatabaseWrapper]:
    """Name another server's database to Django for a while, as an alias of its own."""
    given = conninfo_to_dict(own.url())
    connections.settings[ALIAS] = connections.settings["default"] | {
        "NAME": given["dbname"], "USER": given["user"], "PASSWORD": given["password"],
        "HOST": given["host"], "PORT": given["port"],
    }  # fmt: skip
    try:
        yield connections[ALIAS]
    finally:
        connections[ALIAS].close()
        del connections[ALIAS], connections.settings[ALIAS]


def migrate(name: str) -> None:
    """Migrate that database to a state."""
    call_command("migrate", "psqlmessages", name, database=ALIAS, verbosity=0)


def contents(database: BaseDatabaseWrapper) -> Contents:
    """Read all rows of all tables, as text."""
    with database.cursor() as cursor:
        cursor.execute(TABLES)
        found: Contents = {}
        for (table,) in cursor.fetchall():
            cursor.execute(sql.SQL("SELECT t::text FROM {} AS t ORDER BY 1").format(sql.SQL(table)))
            found[table] = [row for (row,) in cursor.fetchall()]
    return found
