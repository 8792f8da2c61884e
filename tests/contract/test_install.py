"""Installation: the database equals the scripts, from any earlier state."""

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import ProgrammingError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper as Database
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.test import override_settings

from psqlmessages import schema
from psqlmessages.checks import check_databases
from psqlmessages.cli.doctor_checks import FindingState, installed
from psqlmessages.models import Body, StreamMessage
from psqlmessages.schema import STORED_SCRIPTS, InstallSQL, ReinstallSQL
from psqlmessages.sql import MIGRATIONS, SCRIPTS, digest
from tests.conftest import TestedServer
from tests.contract.catalogue import Catalogue, catalogue
from tests.django.conftest import finding_of
from tests.exchanges.conftest import namespace
from tests.project.example import own_database
from tests.sql.conftest import World
from tests.sql.public import GRANTED, TABLES, VIEWS

KEPT_ROWS = """
    SELECT ARRAY[
        (SELECT s::text FROM messages._secret AS s),
        (SELECT s::text FROM messages._settings AS s),
        (SELECT g::text FROM messages._rules_lock AS g),
        (SELECT last_value::text FROM messages._message_id)
    ]
"""
OWNERS = r"""
    SELECT array_agg(DISTINCT o.owner) FROM (
        SELECT relowner FROM pg_class
        WHERE relnamespace = 'messages'::regnamespace OR relname LIKE 'psqlmessages\_%'
        UNION ALL SELECT proowner FROM pg_proc WHERE pronamespace = 'messages'::regnamespace
        UNION ALL SELECT nspowner FROM pg_namespace WHERE nspname = 'messages'
    ) AS o (owner)
"""
COLUMNS = """
    SELECT array_agg(concat_ws(
        ' ', a.attname, format_type(a.atttypid, a.atttypmod), nullif(l.collname, 'default'),
        CASE WHEN NOT a.attnotnull THEN 'null' END) ORDER BY a.attnum)
    FROM pg_attribute AS a LEFT JOIN pg_collation AS l ON l.oid = a.attcollation
    WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
"""
pytestmark = pytest.mark.versions
# What an older version of the scripts may have left in a database.
OLD = "CREATE FUNCTION messages._old() RETURNS int LANGUAGE sql AS 'SELECT 1'"
LEFTOVERS = {
    "a view of a function": f"{OLD}; CREATE VIEW messages.old AS SELECT messages._old()",
    "a function of a view": """
        CREATE VIEW messages.old AS SELECT 1 AS one;
        CREATE FUNCTION messages._old() RETURNS SETOF messages.old LANGUAGE sql
            BEGIN ATOMIC SELECT * FROM messages.old; END
    """,
    "a trigger and its function": """
        CREATE FUNCTION messages._old() RETURNS trigger LANGUAGE plpgsql
            AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER old AFTER INSERT ON psqlmessages_auth EXECUTE FUNCTION messages._old()
    """,
    "a trigger of a function still there": """
        CREATE TRIGGER old BEFORE INSERT ON psqlmessages_topic
            EXECUTE FUNCTION messages._before_rules_change()
    """,
    "another result": """
        DROP FUNCTION messages.evaluate();
        CREATE FUNCTION messages.evaluate() RETURNS int LANGUAGE sql AS 'SELECT 1'
    """,
    "another name of a column": "ALTER TABLE messages._queues RENAME maintained_at TO tended_at",
    "another name of a table": "ALTER TABLE messages._removed_topic RENAME TO _stream_gone",
    "another view": """
        DROP VIEW messages.errors CASCADE;
        CREATE VIEW messages.errors AS SELECT 1 AS one;
        GRANT SELECT ON messages.errors TO PUBLIC
    """,
}
SCRATCH = "scratch"
OTHER_VERSION = "COMMENT ON SCHEMA messages IS 'psqlmessages 0123456789abcdef'"
LATEST = ("psqlmessages", max(path.stem for path in MIGRATIONS.glob("0*.py")))
NOTHING = ("psqlmessages", None)


@pytest.fixture
def database(server: TestedServer, django_db_blocker) -> Iterator[Database]:
    with django_db_blocker.unblock():
        database = connections["default"].copy()
        database.settings_dict["NAME"] = server.database
        database.set_autocommit(False)
        yield database
        database.close()


@pytest.fixture(scope="module")
def migrated(server: TestedServer, django_db_blocker) -> Iterator[tuple[Database, Catalogue]]:
    """Yield a database, migrated by an owner without superuser rights, and its catalogue."""
    name = f"{server.database}_scratch"
    with own_database(server, name), namespace(SCRATCH, NAME=name), django_db_blocker.unblock():
        migrate(connections[SCRATCH], LATEST)
        yield connections[SCRATCH], catalogue(connections[SCRATCH])


@pytest.fixture
def scratch(migrated: tuple[Database, Catalogue], django_db_blocker) -> Iterator[Database]:
    """Yield that database; the test must leave it unchanged."""
    with django_db_blocker.unblock():
        yield migrated[0]
        assert catalogue(migrated[0]) == migrated[1]


def value(database: Database, query: str, *arguments: Any) -> Any:
    with database.cursor() as cursor:
        cursor.execute(query, arguments or None)
        return cursor.fetchone()[0]


def execute(database: Database, *statements: str) -> None:
    with database.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def migrate(database: Database, target: tuple[str, str | None]) -> None:
    MigrationExecutor(database).migrate([target])


def test_removal_leaves_a_table_of_another_owner_and_no_old_name(database: Database, world: World):
    superuser = world.superuser()
    superuser.execute("CREATE TABLE public.psqlmessages_backup ()")
    try:
        execute(database, LEFTOVERS["another name of a table"])
        execute(database, *schema.removal_statements())
        assert value(database, "SELECT to_regnamespace('messages') IS NULL")
    finally:
        database.rollback()
        superuser.execute("DROP TABLE public.psqlmessages_backup")


def test_the_digest_of_every_installing_migration_is_that_of_a_folder():
    migrations = MigrationLoader(None).disk_migrations.values()
    # A database that has all earlier migrations also gets the scripts of today.
    ours = [each for each in migrations if each.app_label == LATEST[0]]
    assert isinstance(max(ours, key=lambda each: each.name).operations[-1], ReinstallSQL)
    operations = [operation for migration in migrations for operation in migration.operations]
    installing = [operation for operation in operations if isinstance(operation, InstallSQL)]
    assert installing
    for operation in installing:
        assert operation.find_folder() in (SCRIPTS, STORED_SCRIPTS / operation.version)
        assert operation.before is None or (STORED_SCRIPTS / operation.before).is_dir()
    with pytest.raises(FileNotFoundError, match=digest()):
        InstallSQL("0.0", digest="0" * 16).find_folder()


def sqlmigrate(name: str, **how: bool) -> str:
    printed = StringIO()
    call_command("sqlmigrate", "psqlmessages", name, database=SCRATCH, stdout=printed, **how)
    return printed.getvalue()


def test_migrating_to_zero_leaves_nothing_and_sqlmigrate_prints_all_steps(scratch: Database):
    names = sorted(name for app, name in MigrationLoader(None).disk_migrations if app == LATEST[0])
    migrated = catalogue(scratch)
    migrate(scratch, NOTHING)  # what the tables refer to, Django's users, stays
    left = value(
        scratch,
        "SELECT array_agg(oid::regclass::text) FROM pg_class"
        " WHERE relnamespace = 'public'::regnamespace AND relname LIKE '%psqlmessages%'",
    )
    assert (left, catalogue(scratch)) == (None, {})
    forward = [sqlmigrate(name) for name in names]
    assert catalogue(scratch) == {}
    execute(scratch, *forward)
    assert catalogue(scratch) == migrated
    backward = [sqlmigrate(name, backwards=True) for name in reversed(names)]
    assert catalogue(scratch) == migrated
    execute(scratch, *backward)
    assert catalogue(scratch) == {}
    migrate(scratch, LATEST)
    assert catalogue(scratch) == migrated
    execute(scratch, "DROP SCHEMA messages CASCADE")
    migrate(scratch, NOTHING)
    assert catalogue(scratch) == {}
    migrate(scratch, LATEST)
    # The usual way to empty a database leaves the functions, but neither views nor triggers.
    execute(scratch, "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    migrate(scratch, LATEST)


def test_install_fixes_what_doctor_and_check_find(scratch: Database, server: TestedServer):
    url = server.server.url(scratch.settings_dict["NAME"], server.server.owner)
    for damage, found in (
        ("DROP SCHEMA messages CASCADE", "although Django's migrations are recorded as applied"),
        (OTHER_VERSION, "another version"),
    ):
        execute(scratch, damage)
        finding = finding_of(installed, url)
        assert found in finding.found
        assert finding.fix.startswith("python manage.py psqlmessages install")
        (warning,) = check_databases(databases=[SCRATCH])
        assert f"python manage.py psqlmessages --database {SCRATCH} install" in str(warning.hint)
        call_command("psqlmessages", "--database", SCRATCH, "install")
        assert finding_of(installed, url).state is FindingState.OK


def test_migrate_replaces_the_functions_of_an_earlier_state_and_keeps_the_rules(scratch: Database):
    rule = "INSERT INTO psqlmessages_auth (role, ident, type, dest, mode, timeout)"
    execute(scratch, f"{rule} VALUES ('r', 'A', 'Topic', 'T', 'W', 5)")
    migrate(scratch, ("psqlmessages", "0006_pipeline"))
    execute(scratch, LEFTOVERS["another result"], OTHER_VERSION)
    with pytest.raises(SystemExit):
        call_command("psqlmessages", "--database", SCRATCH, "install")
    migrate(scratch, ("psqlmessages", "0002_queues"))
    assert value(scratch, "SELECT to_regnamespace('messages')::text") is None
    migrate(scratch, LATEST)
    assert value(scratch, "SELECT ident FROM messages.auth") == "A"


def test_installing_again_keeps_secret_settings_counters_and_grants(database: Database):
    execute(
        database,
        "GRANT SELECT, INSERT ON messages.auth TO hostile;"
        "GRANT EXECUTE ON FUNCTION messages._disconnect TO hostile;"
        "UPDATE messages._settings SET max_body_bytes = 9000;"
        "SELECT nextval('messages._message_id')",
    )
    before = value(database, KEPT_ROWS), catalogue(database)
    schema.install(database)
    assert (value(database, KEPT_ROWS), catalogue(database)) == before


def test_objects_of_an_older_version_are_replaced_or_dropped(database: Database):
    installed, wrong = catalogue(database), []
    assert schema.installed_digest(database) == digest()
    for name, leftover in LEFTOVERS.items():
        execute(database, leftover)
        is_there = catalogue(database) != installed
        schema.install(database)
        if not is_there or catalogue(database) != installed:
            wrong.append(name)
        database.rollback()
    assert not wrong


def test_a_connected_node_lives_through_an_installation(world: World, database: Database):
    world.rules("user1 N Topic T RW 5")
    node = world.node("user1", "N")
    node.ok("topic_listen", "T")
    node.ok("topic_notify", "T")
    schema.install(database)
    database.commit()
    node.ok("topic_send", "T", "x")
    assert node.headers()[-1]["Body"] == "x"


def test_an_installation_waits_for_no_vacuum_of_queues(world: World, database: Database):
    as_vacuum = "psqlmessages_element, psqlmessages_queuecount IN SHARE UPDATE EXCLUSIVE MODE"
    with world.owner.connection.transaction(force_rollback=True):
        world.execute(f"LOCK TABLE {as_vacuum}")
        execute(database, "SET LOCAL lock_timeout = '30s'")
        schema.install(database)


def test_a_default_schema_other_than_public_is_refused_with_the_fix(database: Database):
    execute(database, "CREATE SCHEMA other", "SET LOCAL search_path = other, public")
    with pytest.raises(RuntimeError, match=r"'other'.*Remove search_path from the OPTIONS"):
        schema.install(database)


def test_the_error_for_a_role_without_create_names_the_grant(scratch: Database):
    name, role = scratch.settings_dict["NAME"], scratch.settings_dict["USER"]
    # The first of these migrations only installs the functions, so the later ones do not run.
    forget = "DELETE FROM django_migrations WHERE app = 'psqlmessages' AND name >= '0016_reinstall'"
    revoke = f"REVOKE CREATE ON DATABASE {name} FROM {role}"
    with transaction.atomic(using=SCRATCH):
        execute(scratch, "ALTER SCHEMA messages RENAME TO away", forget, revoke)
        with pytest.raises(ProgrammingError, match=f"GRANT CREATE ON DATABASE {name} TO {role};"):
            call_command("migrate", "psqlmessages", database=SCRATCH, verbosity=0)
        transaction.set_rollback(True, using=SCRATCH)


def test_everything_is_owned_by_a_role_that_is_no_superuser(database: Database):
    (owner,) = value(database, OWNERS)
    powers = "rolsuper OR rolreplication OR rolbypassrls"
    assert value(database, f"SELECT {powers} FROM pg_roles WHERE oid = %s", owner) is False


FUNCTIONS = r"""
    SELECT p.*, p.oid::regprocedure::text AS signature, p.proconfig::text AS config,
        p.proname LIKE '\_%' AS is_private,
        has_function_privilege('public', p.oid, 'EXECUTE') AS is_for_all, l.lanname AS language
    FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
    WHERE p.pronamespace = 'messages'::regnamespace
"""
PATH = "'search_path=pg_catalog, public, pg_temp' = ANY (proconfig)"
# The search path, the planner, lock timeouts, and debug output.
SETTINGS = (
    "^(search_path|enable_[a-z]+|max_parallel_workers_per_gather|plan_cache_mode|jit|geqo"
    "|[a-z]+_collapse_limit|lock_timeout|[a-z_]+_cost|work_mem|trace_[a-z]+|debug_print_[a-z_]+)="
)
FAULTS = {
    "no comment": "obj_description(oid, 'pg_proc') IS NULL",
    "a definer with another path than the pinned one": f"prosecdef AND NOT coalesce({PATH}, false)",
    "with a setting of another kind": (
        f"EXISTS (SELECT FROM unnest(proconfig) AS c (setting) WHERE c.setting !~ '{SETTINGS}')"
    ),
    # Before PostgreSQL 18 the high cost of a disabled plan lets JIT compile it.
    "switches off a kind of plan, and lets the rest be compiled each time": (
        "config ~ 'enable_' AND config !~ 'jit=off'"
    ),
    "an invoker with a path": "NOT prosecdef AND config ~ 'search_path'",
    "private, but to be executed by all, or public, but not": "is_private = is_for_all",
    "public, but with the rights of the caller": "NOT is_private AND NOT prosecdef",
    "reads the last id of streams by SELECT, which may be ahead": (
        r"prosrc ~ 'last_value' AND prosrc ~ '(FROM|,) messages\._stream_id'"
    ),
    "written twice": (
        "language <> 'sql' AND (SELECT count(*) > 1 FROM functions AS o"
        " WHERE o.proname = functions.proname AND o.language <> 'sql')"
    ),
    "of a language not trusted": "language NOT IN ('sql', 'plpgsql')",
    "with a parameter that has no name": (
        "'' = ANY (proargnames) OR pronargs > 0 AND proargnames IS NULL"
    ),
}


def test_no_function_has_a_fault(database: Database):
    faulty = f"WITH functions AS ({FUNCTIONS}) SELECT array_agg(signature) FROM functions WHERE "
    found = {name: value(database, f"{faulty} ({fault})") for name, fault in FAULTS.items()}
    assert found == dict.fromkeys(FAULTS)


def test_the_public_functions_and_views_are_those_of_the_grants(database: Database):
    names = f"SELECT array_agg(proname::text) FROM ({FUNCTIONS}) AS f WHERE NOT is_private"
    assert {*value(database, names), *VIEWS, *TABLES} == GRANTED


@pytest.mark.django_db
@override_settings(PSQLMESSAGES={"MAX_BODY_BYTES": 12_345})
def test_migrate_writes_the_setting_that_binds_psql():
    call_command("migrate", verbosity=0)
    assert value(connections["default"], "SELECT max_body_bytes FROM messages._settings") == 12_345


def test_the_models_of_tables_made_by_a_script_have_their_columns(database: Database):
    for model in (Body, StreamMessage):
        table = model._meta.db_table
        fields = [field for field in model._meta.fields if field.column]
        words = [
            (each.column, each.db_type(database), getattr(each, "db_collation", None),
             "null" if each.null else None)
            for each in fields
        ]  # fmt: skip
        assert value(database, COLUMNS, table) == [" ".join(filter(None, each)) for each in words]
        key = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p'"
        primary = f"PRIMARY KEY ({', '.join(model._meta.pk.field_names)})"
        assert value(database, f"{key} AND conrelid = %s::regclass", table) == primary
