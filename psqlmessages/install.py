"""Installation: the SQL scripts of this version into a database."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from psqlmessages.scripts import SCRIPTS, digest, scripts

_FUNCTION = re.compile(r"^CREATE OR REPLACE FUNCTION messages\.(\w+)\(", re.MULTILINE)
_VIEW = re.compile(r"^CREATE OR REPLACE VIEW messages\.(\w+)", re.MULTILINE)


def install(connection: BaseDatabaseWrapper, folder: Path = SCRIPTS) -> None:
    """Make the schema ``messages`` equal the scripts of a folder. Data and grants stay."""
    texts = [script.read_text() for script in scripts(folder)]
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_schema()")
        if (schema := cursor.fetchone()[0]) != "public":
            raise RuntimeError(
                f"The default schema of this connection is {schema!r}: psqlmessages installs into "
                "'public' only, because its functions pin their search path to it. "
                "Remove search_path from the OPTIONS of DATABASES."
            )
        cursor.execute("CREATE SCHEMA IF NOT EXISTS messages")
        for text in texts:
            cursor.execute(text)
        _drop_leftovers(cursor, "FUNCTION", _FUNCTION.findall("\n".join(texts)))
        _drop_leftovers(cursor, "VIEW", _VIEW.findall("\n".join(texts)))
        cursor.execute(f"COMMENT ON SCHEMA messages IS 'psqlmessages {digest(folder)}'")


def remove(connection: BaseDatabaseWrapper) -> None:
    """Drop the schema ``messages`` and all in it, object by object."""
    with connection.cursor() as cursor:
        cursor.execute((SCRIPTS / "remove.sql").read_text())


def installed_digest(connection: BaseDatabaseWrapper) -> str | None:
    """Return the digest of the scripts that a database holds, or None without them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT obj_description(to_regnamespace('messages'), 'pg_namespace')")
        comment = cursor.fetchone()[0]
    return comment.removeprefix("psqlmessages ") if comment else None


def write_settings(*, using: str, plan: Iterable[Any] = (), **_: Any) -> None:
    """After migrate: tell SQL the settings that bind psql, too."""
    from psqlmessages.conf import get_settings

    connection = connections[using]
    if connection.vendor == "postgresql" and installed_digest(connection) is not None:
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE messages._settings SET max_body_bytes = %s",
                [get_settings().MAX_BODY_BYTES],
            )


def _drop_leftovers(cursor: Any, kind: str, kept: list[str]) -> None:
    """Drop the functions or views that an earlier version had and this one has not."""
    catalogue = {
        "FUNCTION": "SELECT oid::regprocedure::text FROM pg_proc"
        " WHERE pronamespace = 'messages'::regnamespace AND proname <> ALL (%s)",
        "VIEW": "SELECT oid::regclass::text FROM pg_class"
        " WHERE relnamespace = 'messages'::regnamespace AND relkind = 'v' AND relname <> ALL (%s)",
    }
    cursor.execute(catalogue[kind], [kept])
    for (name,) in cursor.fetchall():
        cursor.execute(f"DROP {kind} {name}")
