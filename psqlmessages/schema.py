"""Installation of the SQL functions, and its migration operations."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.db import Error, OperationalError, ProgrammingError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

from psqlmessages.sql import SCRIPTS, digest, scripts

# Installation: the SQL scripts of this version into a database.


def install(connection: BaseDatabaseWrapper, folder: Path = SCRIPTS) -> None:
    """Make the schema ``messages`` equal the scripts of a folder.

    Functions, views and triggers are replaced, and what the scripts do not make is dropped; data
    stays, and so do grants on whole functions and views. Calls wait meanwhile. Raises what
    PostgreSQL raises where an object of yours depends on what is dropped.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_schema()")
        if (schema := cursor.fetchone()[0]) != "public":
            raise RuntimeError(
                f"The default schema of this connection is {schema!r}: psqlmessages installs into "
                "'public' only, because its functions pin their search path to it. "
                "Remove search_path from the OPTIONS of DATABASES."
            )
        _create_schema(cursor)
        cursor.execute(_text("list_grants.sql"))
        given = [statement for (statement,) in cursor.fetchall()]
        try:
            # A function that keeps its oid is found by calls that have been waiting for the locks.
            with cursor.connection.transaction():
                lock(cursor, "some")
                _replace(cursor, folder)
        except OperationalError:
            # Somebody holds what we need.
            raise
        except Error:
            # Not everything can be replaced: another type of result, another name of a parameter.
            lock(cursor, "all")
            _drop(cursor)
            _run(cursor, scripts(folder))
        for statement in given:
            if _is_there(cursor, statement):
                cursor.execute(statement)
        cursor.execute(f"COMMENT ON SCHEMA messages IS 'psqlmessages {digest(folder)}'")


def _create_schema(cursor: Any) -> None:
    """Create the schema; an error for missing rights names the GRANT that gives them."""
    cursor.execute("SELECT to_regnamespace('messages') IS NOT NULL")
    if cursor.fetchone()[0]:
        return
    cursor.execute(
        "SELECT current_user, quote_ident(current_user), quote_ident(current_database()),"
        " has_database_privilege(current_database(), 'CREATE')"
    )
    role, quoted, database, may_create = cursor.fetchone()
    if not may_create:
        raise ProgrammingError(
            f"Role {role} may not create the schema 'messages' in this database. Run as its owner"
            f" or a superuser: GRANT CREATE ON DATABASE {database} TO {quoted};"
        )
    cursor.execute("CREATE SCHEMA messages")


def remove(connection: BaseDatabaseWrapper) -> None:
    """Drop the schema ``messages`` and all in it, object by object; fine if it is not there."""
    with connection.cursor() as cursor:
        for statement in removal():
            cursor.execute(statement)


def installation(folder: Path = SCRIPTS) -> list[str]:
    """List the statements that install the scripts of a folder, for ``sqlmigrate``.

    ``install`` also drops objects of an earlier version, and restores grants on functions.
    """
    return [
        "CREATE SCHEMA IF NOT EXISTS messages;",
        *(script.read_text() for script in scripts(folder)),
        f"COMMENT ON SCHEMA messages IS 'psqlmessages {digest(folder)}';",
    ]


def removal() -> list[str]:
    """List the statements that remove what the scripts install."""
    return [
        "SELECT set_config('messages.locks', 'all', true);",
        _text("lock_tables.sql"),
        "SELECT set_config('messages.kept', '', true);",
        _text("drop_code.sql"),
        _text("remove.sql"),
    ]


def lock(cursor: Any, which: str) -> None:
    """Lock what calls wait for, before anything else: "some" for replacing, "all" for dropping."""
    cursor.execute("SELECT set_config('messages.locks', %s, true)", [which])
    cursor.execute(_text("lock_tables.sql"))


def installed_digest(connection: BaseDatabaseWrapper) -> str | None:
    """Return the digest of the scripts that a database holds, or None without them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT obj_description(to_regnamespace('messages'), 'pg_namespace')")
        comment = cursor.fetchone()[0]
    return comment.removeprefix("psqlmessages ") if comment else None


def unapplied(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a migration of this app has yet to be applied."""
    executor = MigrationExecutor(connection)
    ours = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "psqlmessages"]
    return bool(executor.migration_plan(ours))


def write_settings(*, using: str, **_: Any) -> None:
    """After migrate: tell SQL the settings that bind psql, too."""
    from psqlmessages.conf import get_settings

    connection = connections[using]
    if connection.vendor == "postgresql" and installed_digest(connection) is not None:
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE messages._settings SET max_body_bytes = %s",
                [get_settings().MAX_BODY_BYTES],
            )


def _replace(cursor: Any, folder: Path) -> None:
    """Run the scripts, and drop what they have not written."""
    before = _code(cursor)
    # The last one grants and revokes, which marks all functions as if they were written.
    *code, grants = scripts(folder)
    _run(cursor, code)
    _drop(cursor, kept=[oid for oid, mark in _code(cursor).items() if before.get(oid) != mark])
    _run(cursor, [grants])


def _run(cursor: Any, files: Iterable[Path]) -> None:
    for script in files:
        cursor.execute(script.read_text())


def _drop(cursor: Any, kept: Iterable[int] = ()) -> None:
    cursor.execute("SELECT set_config('messages.kept', %s, true)", [",".join(map(str, kept))])
    cursor.execute(_text("drop_code.sql"))


def _code(cursor: Any) -> dict[int, str]:
    cursor.execute(_text("list_code.sql"))
    return dict(cursor.fetchall())


def _text(name: str) -> str:
    return (SCRIPTS / "install" / name).read_text()


def _is_there(cursor: Any, grant: str) -> bool:
    """Whether what a grant is on has survived the change of version."""
    name = grant.partition(" messages.")[2].partition(" TO ")[0]
    lookup = "to_regproc" if " ON FUNCTION " in grant else "to_regclass"
    cursor.execute(f"SELECT {lookup}(%s) IS NOT NULL", [f"messages.{name}"])
    return bool(cursor.fetchone()[0])


KEPT = Path(__file__).parent / "migrations" / "sql"


class InstallSQL(Operation):
    """Make the SQL functions equal the scripts of one version.

    The scripts are the present ones when their digest is the one named; else those kept aside
    under ``migrations/sql/<version>/`` by the migration that replaced them. Backward installs the
    scripts of ``before``, or removes everything where there was no version before.
    """

    reversible = True

    def __init__(self, version: str, digest: str, before: str | None = None) -> None:
        self.version = version
        self.digest = digest
        self.before = before

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Models do not change."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        """Install the scripts of this version."""
        if router.allow_migrate(schema_editor.connection.alias, app_label):
            _install(schema_editor, self.folder())

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        """Install the scripts of the version before, or remove everything."""
        if not router.allow_migrate(schema_editor.connection.alias, app_label):
            return
        if self.before is not None:
            _install(schema_editor, KEPT / self.before)
        elif schema_editor.collect_sql:
            schema_editor.collected_sql += removal()
        else:
            remove(schema_editor.connection)

    def folder(self) -> Path:
        """Where the scripts of this version lie. FileNotFoundError where they are nowhere."""
        for folder in (SCRIPTS, KEPT / self.version):
            if digest(folder) == self.digest:
                return folder
        raise FileNotFoundError(
            f"The SQL scripts of version {self.version} (digest {self.digest}) are neither in "
            f"{SCRIPTS} nor in {KEPT / self.version}. Whoever changed a script after a "
            "release keeps the old ones there and writes a migration with the new digest "
            f"{digest()}."
        )

    def describe(self) -> str:
        """Say what `migrate --plan` shows."""
        return f"Install the SQL functions of version {self.version}"

    @property
    def migration_name_fragment(self) -> str:
        """What a generated migration is named after."""
        return f"sql_{self.version}"

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return name and arguments, as a migration file writes them."""
        return self.__class__.__name__, [self.version, self.digest], {"before": self.before}


class ReinstallSQL(InstallSQL):
    """Replace the SQL functions of a database that an earlier state of this version installed.

    Until 1.0 the first migrations are rewritten in place, so a new database already has the
    current scripts. Backward it changes nothing: the migration before has the same scripts.
    """

    def __init__(self) -> None:
        super().__init__("0.1", digest())

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Install the current scripts unless the database has exactly these."""
        if not router.allow_migrate(schema_editor.connection.alias, app_label):
            return
        if schema_editor.collect_sql or (installed_digest(schema_editor.connection) != self.digest):
            super().database_forwards(app_label, schema_editor, *states)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Change nothing."""

    def describe(self) -> str:
        """Say what `migrate --plan` shows."""
        return "Install the current SQL functions if the database has earlier ones"

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the name alone: there are no arguments."""
        return self.__class__.__name__, [], {}


def _install(schema_editor: BaseDatabaseSchemaEditor, folder: Path) -> None:
    """Install the scripts of a folder, or only collect them for ``sqlmigrate``."""
    if schema_editor.collect_sql:
        schema_editor.collected_sql += installation(folder)
    else:
        install(schema_editor.connection, folder)
