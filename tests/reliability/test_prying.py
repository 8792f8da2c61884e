"""A hostile role reads all that PostgreSQL lets it read, and makes views tell what they hide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.reliability.counts import counted
from tests.reliability.overheard import Overheard
from tests.reliability.treasure import Treasure
from tests.sql.conftest import Program, World
from tests.sql.public import VIEWS

FAULT = "a hostile role"
MARK = "CANARY-7c1f-of-others"
RELATIONS = """
    SELECT c.oid::regclass::text FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
      AND c.relnamespace NOT IN (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_(temp|toast)')
    ORDER BY 1
"""
COLUMNS = """
    SELECT attrelid::regclass::text, attname::text FROM pg_attribute
    WHERE attrelid = ANY (%s::regclass[]) AND attnum > 0
"""
# Cheaper than anything else in a condition, and it tells what it was asked about.
LEAK = """
    CREATE FUNCTION pg_temp.leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001
    AS $$ BEGIN RAISE NOTICE 'leaked %', $1; RETURN true; END $$
"""
# Each in place of a condition on a column.
CONDITIONS = (
    "pg_temp.leak({}::text)",
    "{}::text::int > 0",
    "{}::text::json IS NOT NULL",
    "{}::text::inet IS NOT NULL",
    "1 / length(left({}::text, 0)) > 0",
    "{0}::text > 'CANARY' AND pg_temp.leak({0}::text)",
)
FUNCTIONS = (
    "pg_listening_channels()", "pg_stat_get_activity(NULL)", "pg_lock_status()", "pg_cursor()",
    "pg_prepared_statement()", "pg_prepared_xact()", "pg_notification_queue_usage()",
    "pg_show_all_settings()", "pg_ls_logdir()", "pg_ls_waldir()", "pg_ls_tmpdir()",
    "pg_current_logfile()", "pg_read_file('postgresql.conf')", "pg_backup_start('x')",
    "pg_get_publication_tables('x')", "pg_stat_get_backend_idset()", "pg_config()",
    "lo_import('/etc/passwd')", "pg_logical_emit_message(false, 'x', 'x')", "pg_export_snapshot()",
    "pg_export_snapshot()", "query_to_xml('TABLE psqlmessages_element', true, false, '')",
    "schema_to_xml('messages', true, false, '')", "database_to_xml(true, false, '')",
)  # fmt: skip


@pytest.fixture
def treasure(world: World) -> Iterator[Treasure]:
    """Every store filled by others, whose sessions have just said what nobody else may know."""
    world.rules("hostile H1 Topic H* RW 3000", "hostile H1 Queue H* RW 3000")
    treasure = Treasure(world, MARK)
    for role in "user1", "user2":
        program = world.program(role)
        program.connection.execute(f"LISTEN \"{MARK}\"; SET messages.x = '{MARK}'")
        program.connection.autocommit = False
        program.query(f"SELECT '{MARK}'")
    world.owner.connection.execute("ANALYZE")
    yield treasure
    treasure.empty()


@pytest.fixture
def burglar(treasure: Treasure) -> Program:
    """The hostile role, connected as a node of its own."""
    return treasure.world.node("hostile", "H1")


def tried(program: Program, statement: str) -> bool:
    """Run a statement: whether PostgreSQL let it."""
    try:
        program.connection.execute(statement)
    except psycopg.Error:
        return False
    return True


def test_nothing_that_can_be_read_holds_anything_of_others(
    treasure: Treasure, burglar: Program, tmp_path: Path
) -> None:
    relations = [name for (name,) in treasure.world.owner.connection.execute(RELATIONS)]
    burglar.connection.execute("SET statement_timeout = '20s'")
    with Overheard(burglar.connection, tmp_path / "trace") as heard:
        read = [name for name in relations if tried(burglar, f"SELECT * FROM {name} AS r")]
        called = [each for each in FUNCTIONS if tried(burglar, f"SELECT * FROM {each}")]
        found = heard.look(treasure.secrets())
    counted(
        FAULT, "reading every relation", relations=len(relations), readable=len(read),
        functions_of_postgresql=len(called), answers_looked_through=heard.messages,
        things_of_others_seen=len(found),
    )  # fmt: skip
    assert found == []
    assert {name for name in read if name.startswith(("psqlmessages", "messages."))} == {
        f"messages.{view}" for view in VIEWS
    }


def test_no_condition_makes_a_view_tell_what_it_hides(
    treasure: Treasure, burglar: Program, tmp_path: Path
) -> None:
    views = [f"messages.{view}" for view in sorted(VIEWS)]
    columns = treasure.world.owner.connection.execute(COLUMNS, [views]).fetchall()
    burglar.connection.execute(LEAK)
    statements = [
        f"{begin} SELECT * FROM {view} WHERE {condition.format(column)}"
        for view, column in columns
        for condition in CONDITIONS
        for begin in ("", "EXPLAIN (ANALYZE, VERBOSE)")
    ]
    with Overheard(burglar.connection, tmp_path / "trace") as heard:
        done = sum(tried(burglar, statement) for statement in statements)
        found = heard.look(treasure.secrets())
    counted(
        FAULT, "conditions that tell what they are asked about, on every column of every view",
        conditions=len(statements), evaluated=done, things_of_others_seen=len(found),
    )  # fmt: skip
    assert found == []
    assert done > len(statements) / 3


def test_such_a_condition_would_tell_where_there_were_no_barrier(
    treasure: Treasure, tmp_path: Path
) -> None:
    program = treasure.world.superuser()
    with (
        Overheard(program.connection, tmp_path / "trace") as heard,
        program.connection.transaction(force_rollback=True),
    ):
        program.connection.execute("ALTER VIEW messages.queued RESET (security_barrier)")
        program.connection.execute("SET LOCAL SESSION AUTHORIZATION hostile")
        program.connection.execute(LEAK)
        program.query("SELECT count(*) FROM messages.queued WHERE pg_temp.leak(body)")
        found = heard.look([MARK])
    assert any(f"leaked {MARK}" in message for message in found)


def test_what_any_role_sees_of_others_is_what_the_documents_say(
    treasure: Treasure, burglar: Program
) -> None:
    pids = {program.pid for program in treasure.world.programs[:3]}
    seen = burglar.connection.execute(
        "SELECT pid, usename, query FROM pg_stat_activity WHERE usename <> session_user"
    ).fetchall()
    assert pids <= {pid for pid, _, _ in seen}
    assert {query for _, _, query in seen} == {"<insufficient privilege>"}
    rows = burglar.query("SELECT reltuples FROM pg_class WHERE relname = 'psqlmessages_element'")
    assert rows > 0
