"""Migration operations."""

from pathlib import Path
from typing import Any

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

from psqlmessages import install

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
        _install(schema_editor, self.folder())

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        """Install the scripts of the version before, or remove everything."""
        if self.before is not None:
            _install(schema_editor, KEPT / self.before)
        elif schema_editor.collect_sql:
            schema_editor.collected_sql += install.removal()
        else:
            install.remove(schema_editor.connection)

    def folder(self) -> Path:
        """Where the scripts of this version lie. FileNotFoundError where they are nowhere."""
        for folder in (install.SCRIPTS, KEPT / self.version):
            if install.digest(folder) == self.digest:
                return folder
        raise FileNotFoundError(
            f"The SQL scripts of version {self.version} (digest {self.digest}) are neither in "
            f"{install.SCRIPTS} nor in {KEPT / self.version}. Whoever changed a script after a "
            "release keeps the old ones there and writes a migration with the new digest "
            f"{install.digest()}."
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
        super().__init__("0.1", install.digest())

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Install the current scripts unless the database has exactly these."""
        if schema_editor.collect_sql or (
            install.installed_digest(schema_editor.connection) != self.digest
        ):
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
        schema_editor.collected_sql += install.installation(folder)
    else:
        install.install(schema_editor.connection, folder)
