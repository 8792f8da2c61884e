"""System checks. Ids never change: E0xx settings, E1xx and W1xx database, W2xx ``--deploy``.

Database checks run with ``check --database ALIAS`` and before ``migrate``. Problems that
``migrate`` fixes are warnings, because an error would stop ``migrate``.
"""

from collections.abc import Collection, Iterator
from typing import Any

import psycopg
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder
from psycopg.conninfo import conninfo_to_dict

from psqlmessages.client.connect import detect_pooler
from psqlmessages.client.options import CONNECTION_DEFAULTS
from psqlmessages.conf import SettingError, find_errors, get_settings
from psqlmessages.exceptions import DOCS_URL
from psqlmessages.orm import database_dsn, direct_alias, direct_dsn
from psqlmessages.schema import has_unapplied_migrations, installed_digest
from psqlmessages.sql import MIN_VERSION, digest

# Django's role, whether it is a superuser, and whether all roles may create objects in ``public``.
_PRIVILEGES = """
    SELECT session_user, (SELECT rolsuper FROM pg_roles WHERE rolname = session_user),
        EXISTS (
            SELECT FROM pg_namespace AS n CROSS JOIN aclexplode(n.nspacl) AS a
            WHERE n.nspname = 'public' AND a.privilege_type = 'CREATE' AND a.grantee = 0
        )
"""
# The tag of the checks that `manage.py psqlmessages` runs.
COMMAND_TAG = "psqlmessages"


def register() -> None:
    """Register all checks; called once, when the app is ready."""
    checks.register(check_settings, checks.Tags.compatibility, COMMAND_TAG)
    checks.register(check_databases, checks.Tags.database)
    checks.register(check_deployment, checks.Tags.database, deploy=True)
    checks.register(check_connections, checks.Tags.database)


def check_settings(**_: Any) -> list[CheckMessage]:
    """Check the values of PSQLMESSAGES."""
    return [
        checks.Error(
            problem.text,
            hint="Code that reads this setting would fail. Correct it; the allowed values are on"
            f" {DOCS_URL}reference/settings/",
            id=f"psqlmessages.{problem.check}",
        )
        for problem in _find_setting_errors()
    ]


def check_databases(*, databases: Collection[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check PostgreSQL's version, the installed SQL functions and the pooler."""
    return [message for alias in _own_aliases(databases) for message in _check_database(alias)]


def check_deployment(*, databases: Collection[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that Django's role is no superuser, and that not all roles may create objects."""
    aliases = _postgresql_aliases(databases)
    return [message for alias in aliases for message in _check_privileges(alias)]


def check_connections(*, databases: Collection[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the timeouts of connections to other machines, and the alias for direct connections."""
    aliases = _postgresql_aliases(databases)
    return [message for alias in aliases for message in _check_connection(alias)]


def _find_setting_errors() -> list[SettingError]:
    return list(find_errors(getattr(settings, "PSQLMESSAGES", {})))


def _own_aliases(databases: Collection[str] | None) -> list[str]:
    """Return the aliases of databases that may have the tables of this app.

    Returns none if the settings have errors, which `check_settings` reports.
    """
    if _find_setting_errors():
        return []
    return [alias for alias in databases or () if router.allow_migrate(alias, "psqlmessages")]


def _postgresql_aliases(databases: Collection[str] | None) -> list[str]:
    return [each for each in _own_aliases(databases) if connections[each].vendor == "postgresql"]


def _check_database(alias: str) -> Iterator[CheckMessage]:
    connection = connections[alias]
    if connection.vendor != "postgresql":
        yield checks.Error(
            f"Database {alias!r} is {connection.display_name}, not PostgreSQL.",
            hint="The SQL functions cannot be installed in it. Set ENGINE to"
            " django.db.backends.postgresql, or keep the app out of this database with a router's"
            ' allow_migrate("psqlmessages").',
            id="psqlmessages.E101",
        )
        return
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('server_version_num')")
            version = int(cursor.fetchone()[0]) // 10_000
        if version < MIN_VERSION:
            yield checks.Error(
                f"Database {alias!r} is PostgreSQL {version}; {MIN_VERSION} or newer is needed.",
                hint="The SQL functions need features that older servers lack. Upgrade the server"
                " with pg_upgrade.",
                id="psqlmessages.E102",
            )
            return
        yield from _check_digest(alias, connection)
        pooler = detect_pooler(direct_dsn(alias))
        if pooler.shares_connections:
            yield checks.Warning(
                f"The pooler of database {alias!r} shares connections by {pooler.value}.",
                hint="send works, but nodes, call and `psqlmessages run` would lose their"
                " registration. Add a database alias 'direct' that connects to PostgreSQL itself,"
                " or set pool_mode = session in pgbouncer.ini.",
                id="psqlmessages.W103",
            )
    except (DatabaseError, ImproperlyConfigured, psycopg.Error) as error:
        yield checks.Warning(
            f"Database {alias!r} could not be checked: {str(error).strip()}",
            hint="It is unknown whether messages can be sent. Make sure that the server runs, then"
            f" run: python manage.py check --database {alias}",
            id="psqlmessages.W101",
        )


def _check_connection(alias: str) -> Iterator[CheckMessage]:
    direct = direct_alias()
    is_bypass = direct is not None and alias == get_settings().DATABASE != direct
    if is_bypass and connections[direct].settings_dict["ATOMIC_REQUESTS"]:
        yield checks.Warning(
            f"Database {direct!r}, the alias for direct connections, has ATOMIC_REQUESTS.",
            hint="Each request of this project opens a connection and a transaction there, past"
            f" the pooler. Remove ATOMIC_REQUESTS from this alias; {alias!r} may have it.",
            id="psqlmessages.W105",
        )
    parameters = conninfo_to_dict(database_dsn(alias))
    # Packets to the own machine are not lost.
    hosts = str(parameters.get("hostaddr") or parameters.get("host") or "").split(",")
    missing = [name for name in CONNECTION_DEFAULTS if name not in parameters]
    if missing and any(map(_is_remote, hosts)):
        yield checks.Warning(
            f"Connections to database {alias!r} have no {', '.join(missing)}.",
            hint="If the network or a firewall drops packets without an error, threads of this"
            " project may wait for minutes or hours. Add to OPTIONS of the database: "
            + ", ".join(f"{name!r}: {CONNECTION_DEFAULTS[name]}" for name in missing)
            + ".",
            id="psqlmessages.W104",
        )


def _is_remote(host: str) -> bool:
    is_socket = not host or host.startswith(("/", "@"))
    return not (is_socket or host.startswith("127.") or host in ("localhost", "::1"))


def _check_digest(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    installed = installed_digest(connection)
    if installed == digest():
        return
    applied = {app for app, _ in MigrationRecorder(connection).applied_migrations()}
    if installed is None and "psqlmessages" not in applied:
        # The first ``migrate`` installs the functions.
        return
    command = (
        f"migrate psqlmessages --database {alias}"
        if has_unapplied_migrations(connection)
        else f"psqlmessages --database {alias} install"
    )
    yield checks.Warning(
        f"The SQL functions in database {alias!r} are missing or of another version"
        f" ({installed or 'none'} instead of {digest()}).",
        hint="Calls may fail, or behave differently from the documentation. Run:"
        f" python manage.py {command}",
        id="psqlmessages.W102",
    )


def _check_privileges(alias: str) -> Iterator[CheckMessage]:
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(_PRIVILEGES)
            role, is_superuser, is_public_writable = cursor.fetchone()
    except DatabaseError:
        # W101 reports the error.
        return
    if is_superuser:
        yield checks.Warning(
            f"Django connects to database {alias!r} as the superuser {role}.",
            hint="The SQL functions run with the rights of their owner: a bug in one would expose"
            " the whole server. Connect as an ordinary role that owns the database.",
            id="psqlmessages.W201",
        )
    if is_public_writable:
        yield checks.Warning(
            f"Every role may create objects in the schema public of database {alias!r}.",
            hint="The SQL functions could call a function of such a role in place of PostgreSQL's"
            " own, with the rights of their owner. Run in psql:"
            " REVOKE CREATE ON SCHEMA public FROM PUBLIC;",
            id="psqlmessages.W202",
        )
