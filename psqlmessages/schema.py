"""Installation of the SQL functions, and the migration operations that install them."""

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

# Oid and version of each installed function, view and trigger. A replacement changes the version.
_VERSIONS = """
    SELECT p.oid, p.xmin::text || p.ctid::text
    FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = to_regnamespace('messages')
    UNION ALL
    SELECT c.oid, r.xmin::text || r.ctid::text
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_rewrite AS r ON r.ev_class = c.oid
    WHERE c.relnamespace = to_regnamespace('messages') AND c.relkind = 'v'
    UNION ALL
    SELECT t.oid, t.xmin::text || t.ctid::text
    FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
    WHERE p.pronamespace = to_regnamespace('messages') AND NOT t.tgisinternal
"""


def install(connection: BaseDatabaseWrapper, folder: Path = SCRIPTS) -> None:
    """Make the schema ``messages`` equal to the scripts of a folder.

    Replaces functions, views and triggers, and drops those that the scripts do not contain. Data
    and grants stay, except grants on single columns of a view that must be dropped. Calls wait
    until the installation ends. Raises RuntimeError if the default schema is not ``public``, and
    PostgreSQL's error if one of your objects depends on an object that must be dropped.
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
        cursor.execute(_read_script("list_grants.sql"))
        grants = cursor.fetchall()
        try:
            # Replaced functions keep their oid, so calls that waited for the locks find them again.
            with cursor.connection.transaction():
                prepare_tables(cursor, "some")
                _replace_objects(cursor, folder)
        except OperationalError:
            # A lock was not available: dropping the objects would not help.
            raise
        except Error:
            # Some objects cannot be replaced, only dropped: for instance, with a renamed parameter.
            prepare_tables(cursor, "all")
            _drop_objects(cursor)
            _run_scripts(cursor, scripts(folder))
        for kind, name, statement in grants:
            for signature in _find_objects(cursor, kind, name):
                cursor.execute(statement.replace("%s", signature))
        cursor.execute(f"COMMENT ON SCHEMA messages IS 'psqlmessages {digest(folder)}'")


def _create_schema(cursor: Any) -> None:
    """Create the schema if it is missing; raise an error that names a missing GRANT."""
    cursor.execute(
        "SELECT to_regnamespace('messages') IS NOT NULL, current_user, quote_ident(current_user),"
        " quote_ident(current_database()), has_database_privilege(current_database(), 'CREATE')"
    )
    exists, role, quoted, database, may_create = cursor.fetchone()
    if exists:
        return
    if not may_create:
        raise ProgrammingError(
            f"Role {role} may not create the schema 'messages' in this database. Run as its owner"
            f" or a superuser: GRANT CREATE ON DATABASE {database} TO {quoted};"
        )
    cursor.execute("CREATE SCHEMA messages")


def removal_statements() -> list[str]:
    """List the statements that drop the schema ``messages`` and its objects, if it exists."""
    return [
        "SELECT set_config('messages.locks', 'all', true);",
        _read_script("prepare_tables.sql"),
        "SELECT set_config('messages.kept', '', true);",
        _read_script("drop_code.sql"),
        _read_script("remove.sql"),
    ]


def prepare_tables(cursor: Any, scope: str) -> None:
    """Lock tables, so that calls wait, and rename those of an earlier development state.

    ``scope``: the locks to take, "some" to replace objects, or "all" to drop objects.
    """
    cursor.execute("SELECT set_config('messages.locks', %s, true)", [scope])
    cursor.execute(_read_script("prepare_tables.sql"))


def installed_digest(connection: BaseDatabaseWrapper) -> str | None:
    """Return the digest of the scripts installed in a database; None if none are installed."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT obj_description(to_regnamespace('messages'), 'pg_namespace')")
        comment = cursor.fetchone()[0]
    return comment.removeprefix("psqlmessages ") if comment else None


def has_unapplied_migrations(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a migration of this app has not been applied yet."""
    executor = MigrationExecutor(connection)
    migrations = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "psqlmessages"]
    return bool(executor.migration_plan(migrations))


def write_settings(*, using: str, **_: Any) -> None:
    """Store MAX_BODY_BYTES in the database, for calls without Django. Called after migrate."""
    from psqlmessages.conf import get_settings

    connection = connections[using]
    if connection.vendor == "postgresql" and installed_digest(connection) is not None:
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE messages._settings SET max_body_bytes = %s", [get_settings().MAX_BODY_BYTES]
            )


def _replace_objects(cursor: Any, folder: Path) -> None:
    """Run the scripts, and drop the objects that they have not created or replaced."""
    versions = _read_versions(cursor)
    # Run the last script at the end, because its grants change the versions of all functions.
    *code, grants = scripts(folder)
    _run_scripts(cursor, code)
    current = _read_versions(cursor).items()
    installed = [oid for oid, version in current if versions.get(oid) != version]
    _drop_objects(cursor, keep=installed)
    _run_scripts(cursor, [grants])


def _run_scripts(cursor: Any, files: Iterable[Path]) -> None:
    for script in files:
        cursor.execute(script.read_text())


def _drop_objects(cursor: Any, keep: Iterable[int] = ()) -> None:
    cursor.execute("SELECT set_config('messages.kept', %s, true)", [",".join(map(str, keep))])
    cursor.execute(_read_script("drop_code.sql"))


def _read_versions(cursor: Any) -> dict[int, str]:
    """Read the row version of each function, view and trigger, by oid."""
    cursor.execute(_VERSIONS)
    return dict(cursor.fetchall())


def _read_script(name: str) -> str:
    return (SCRIPTS / "install" / name).read_text()


def _find_objects(cursor: Any, kind: str, name: str) -> list[str]:
    """Return the quoted names of views, or signatures of functions, with this name."""
    cursor.execute(
        "SELECT p.oid::regprocedure::text FROM pg_catalog.pg_proc AS p"
        " WHERE p.pronamespace = 'messages'::regnamespace AND p.proname = %s"
        if kind == "FUNCTION"
        else "SELECT c.oid::regclass::text FROM pg_catalog.pg_class AS c"
        " WHERE c.relnamespace = 'messages'::regnamespace AND c.relname = %s",
        [name],
    )
    return [signature for (signature,) in cursor.fetchall()]


STORED_SCRIPTS = Path(__file__).parent / "migrations" / "sql"


class InstallSQL(Operation):
    """Make the SQL functions equal to the scripts of one version.

    If the current scripts have this digest, the operation installs them. Otherwise it installs the
    scripts in ``migrations/sql/<version>/``, where a later migration has stored them. Backward, the
    operation installs the scripts of the version ``before``, or removes everything if ``before`` is
    None.
    """

    def __init__(self, version: str, digest: str, before: str | None = None) -> None:
        self.version = version
        self.digest = digest
        self.before = before

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Leave the models unchanged."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Install the scripts of this version."""
        if router.allow_migrate(schema_editor.connection.alias, app_label):
            _install_or_collect(schema_editor, self.find_folder())

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Install the scripts of the version ``before``, or remove everything if it is None."""
        if not router.allow_migrate(schema_editor.connection.alias, app_label):
            return
        if self.before is not None:
            _install_or_collect(schema_editor, STORED_SCRIPTS / self.before)
        else:
            for statement in removal_statements():
                schema_editor.execute(statement, params=None)

    def find_folder(self) -> Path:
        """Return the folder of this version's scripts; raise FileNotFoundError if there is none."""
        for folder in (SCRIPTS, STORED_SCRIPTS / self.version):
            if digest(folder) == self.digest:
                return folder
        raise FileNotFoundError(
            f"The SQL scripts of version {self.version} (digest {self.digest}) are neither in "
            f"{SCRIPTS} nor in {STORED_SCRIPTS / self.version}. If you changed a script that is "
            "not in a release, run make digest. After a release, keep the old scripts there and "
            f"write a migration with the new digest {digest()}."
        )

    def describe(self) -> str:
        """Return the text for `migrate --plan`."""
        return f"Install the SQL functions of version {self.version}"


class ReinstallSQL(InstallSQL):
    """Update SQL functions that an earlier development state of this version has installed.

    Until 1.0 the earlier migrations are rewritten, so a new database already has the current
    scripts. Backward, the operation changes nothing, because the earlier scripts are the same.
    """

    def __init__(self) -> None:
        super().__init__("0.1", digest())

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Install the current scripts, unless the database already has them."""
        if not router.allow_migrate(schema_editor.connection.alias, app_label):
            return
        if schema_editor.collect_sql or installed_digest(schema_editor.connection) != self.digest:
            super().database_forwards(app_label, schema_editor, *states)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Change nothing."""

    def describe(self) -> str:
        """Return the text for `migrate --plan`."""
        return "Install the current SQL functions if the database has earlier ones"


def _install_or_collect(schema_editor: BaseDatabaseSchemaEditor, folder: Path) -> None:
    """Install the scripts of a folder; for ``sqlmigrate``, only collect their text."""
    if not schema_editor.collect_sql:
        install(schema_editor.connection, folder)
        return
    # Unlike `install`, these statements drop no objects of earlier versions and restore no grants.
    schema_editor.collected_sql += [
        "CREATE SCHEMA IF NOT EXISTS messages;",
        _read_script("prepare_tables.sql"),
        *(script.read_text() for script in scripts(folder)),
        f"COMMENT ON SCHEMA messages IS 'psqlmessages {digest(folder)}';",
    ]
