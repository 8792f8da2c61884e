"""A hostile role calls, reads and asks about everything, and gets nothing of others."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.reliability.counts import report, size
from tests.reliability.marked_data import MARK, STAGED, MarkedData, TracedConnection, fill_stores
from tests.sql.conftest import Program, World
from tests.sql.public import FUNCTIONS as FUNCTIONS_OF_OURS
from tests.sql.public import VIEWS
from tests.sql.test_random_calls import Fuzzer

FAULT = "a hostile role"
OURS = ("psqlmessages_", "messages.")
PUBLIC = sorted(f"messages.{view}" for view in VIEWS)
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
# PostgreSQL evaluates the cheapest condition first; this one prints its argument.
LEAK = """
    CREATE FUNCTION pg_temp.leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001
    AS $$ BEGIN RAISE NOTICE 'leaked %', $1; RETURN true; END $$
"""
CONDITIONS = (
    "pg_temp.leak({}::text)", "{}::text::int > 0", "{}::text::json IS NOT NULL",
    "{}::text::inet IS NOT NULL", "1 / length(left({}::text, 0)) > 0",
    "{0}::text > 'CANARY' AND pg_temp.leak({0}::text)",
)  # fmt: skip
FUNCTIONS = (
    "pg_listening_channels()", "pg_stat_get_activity(NULL)", "pg_lock_status()", "pg_cursor()",
    "pg_prepared_statement()", "pg_prepared_xact()", "pg_notification_queue_usage()",
    "pg_show_all_settings()", "pg_ls_logdir()", "pg_ls_waldir()", "pg_ls_tmpdir()",
    "pg_current_logfile()", "pg_read_file('postgresql.conf')", "pg_backup_start('x')",
    "pg_get_publication_tables('x')", "pg_stat_get_backend_idset()", "pg_config()",
    "lo_import('/etc/passwd')", "pg_logical_emit_message(false, 'x', 'x')", "pg_export_snapshot()",
    "query_to_xml('TABLE psqlmessages_element', true, false, '')",
    "schema_to_xml('messages', true, false, '')", "database_to_xml(true, false, '')",
)  # fmt: skip
# A call of each public function with NULL arguments.
CALLS = """
    SELECT format('messages.%%I(%%s)', p.proname, (
        SELECT string_agg(
            CASE WHEN p.provariadic <> 0 AND a.place = p.pronargs THEN 'VARIADIC ' ELSE '' END
            || 'NULL::' || format_type(a.type, NULL), ', ' ORDER BY a.place
        )
        FROM unnest(p.proargtypes) WITH ORDINALITY AS a (type, place)
    ))
    FROM pg_proc AS p
    WHERE p.pronamespace = 'messages'::regnamespace AND p.proname = ANY (%s)
"""
COUNTS = (
    "EXPLAIN (ANALYZE, VERBOSE, COSTS OFF, TIMING OFF, SUMMARY OFF, BUFFERS OFF, FORMAT JSON)"
    " SELECT * FROM {} WHERE {}::text COLLATE \"C\" >= '{}'"
)
LOCK_MODES = (
    "ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE", "SHARE",
    "SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE",
)  # fmt: skip
# Locks of this session on tables and sequences.
LOCKED = """
    SELECT coalesce(array_agg(DISTINCT c.relname::text), '{}')
    FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
    WHERE l.pid = pg_backend_pid() AND c.relkind IN ('r', 'p', 'S')
      AND c.relnamespace IN ('messages'::regnamespace, 'public'::regnamespace)
"""

# Names for which the attacker has rules.
OWN = {"topic": ["H1", "H2", "H*"], "topics": ["H1", "H2", "H*"], "stagings": [str(UUID(int=1))]}
OWN |= {name: ["HQ1", "HQ2"] for name in ("queue", "source", "to_queue", "queues")}
OWN_NODES = ["H1", "H2"]
OWN |= dict.fromkeys(("ident", "node", "nodes", "client_id"), OWN_NODES)
RULES = [
    f"hostile {node} {rule}"
    for node in OWN_NODES
    for rule in (
        "Topic H* RW 3000", "Topic H1* O 3000", "Queue HQ1 RW 3000", "Queue HQ2 RW 3000",
        "Queue HQ* A 3000", "Rpc H1 W 3000", "Rpc H2 W 3000",
    )
]  # fmt: skip


@pytest.fixture
def marked(world: World) -> Iterator[MarkedData]:
    """Data of others in every store, also in queries and settings of their sessions."""
    with fill_stores(world, *RULES) as marked:
        for role in "user1", "user2":
            program = world.program(role)
            program.connection.execute(f"LISTEN \"{MARK}\"; SET messages.x = '{MARK}'")
            program.connection.autocommit = False
            program.query(f"SELECT '{MARK}'")
        world.owner.connection.execute("ANALYZE")
        yield marked


@pytest.fixture
def attacker(marked: MarkedData) -> Program:
    return marked.world.node("hostile", "H1")


@pytest.fixture
def stranger(marked: MarkedData) -> Program:
    marked.world.owner.connection.execute("DELETE FROM messages.auth WHERE role = 'user3'")
    return marked.world.program("user3")


def tried(program: Program, statement: str) -> bool:
    """Return whether PostgreSQL allows a statement."""
    try:
        program.connection.execute(statement)
    except psycopg.Error:
        return False
    return True


def columns_of(marked: MarkedData, views: list[str]) -> list[tuple[str, str]]:
    return marked.world.owner.connection.execute(COLUMNS, [views]).fetchall()


@pytest.mark.versions
def test_no_relation_shows_data_of_others(marked: MarkedData, attacker: Program, tmp_path: Path):
    relations = [name for (name,) in marked.world.owner.connection.execute(RELATIONS)]
    statements = [
        f"{begin} SELECT * FROM {view} WHERE {condition.format(column)}"
        for view, column in columns_of(marked, PUBLIC)
        for condition in CONDITIONS
        for begin in ("", "EXPLAIN (ANALYZE, VERBOSE)")
    ]
    attacker.connection.execute("SET statement_timeout = '20s'")
    attacker.connection.execute(LEAK)
    with TracedConnection(attacker.connection, tmp_path / "trace") as traced:
        read = [name for name in relations if tried(attacker, f"SELECT * FROM {name} AS r")]
        called = [each for each in FUNCTIONS if tried(attacker, f"SELECT * FROM {each}")]
        seen, messages = traced.find(marked.secrets()), traced.messages
        done = sum(tried(attacker, statement) for statement in statements)
        leaked = traced.find(marked.secrets())
    report(
        FAULT, "reading every relation", relations=len(relations), readable=len(read),
        built_in_functions=len(called), results_searched=messages, leaks=len(seen),
    )  # fmt: skip
    report(
        FAULT, "conditions that leak their arguments, on every column of every view",
        conditions=len(statements), evaluated=done, leaks=len(leaked),
    )  # fmt: skip
    assert seen == leaked == []
    assert sorted(name for name in read if name.startswith(OURS)) == PUBLIC
    assert done > len(statements) / 3
    # If a role may read the table, such a condition prints its contents.
    program = marked.world.superuser()
    with TracedConnection(program.connection, tmp_path / "other trace") as traced:
        program.connection.execute(LEAK)
        program.query("SELECT count(*) FROM psqlmessages_element WHERE pg_temp.leak(body)")
        assert any(f"leaked {MARK}" in message for message in traced.find([MARK]))


@pytest.mark.versions
def test_no_plan_shows_private_relations(marked: MarkedData, attacker: Program, stranger: Program):
    owner = marked.world.owner.connection
    private = {
        name.removeprefix("messages.")
        for (name,) in owner.execute(RELATIONS)
        if name.startswith(OURS)
    } - VIEWS
    functions = owner.execute(CALLS, [FUNCTIONS_OF_OURS]).fetchall()
    assert len(functions) >= len(FUNCTIONS_OF_OURS)
    plans = {
        source: str(
            attacker.connection.execute(f"EXPLAIN (VERBOSE) SELECT * FROM {source}").fetchall()
        )
        for source in (*PUBLIC, *(call for (call,) in functions))
    }
    named = {
        source: [name for name in private if re.search(rf"\b{name}\b", plan)]
        for source, plan in plans.items()
    }
    assert {source: names for source, names in named.items() if names} == {}

    leaks = []
    views = sorted({*PUBLIC} - {"messages.errors"})
    for program, (view, column) in product((attacker, stranger), columns_of(marked, views)):
        visible = program.query(f"SELECT count(*) FROM {view}")
        for bound in ("", MARK, "~"):
            # A leakproof comparison of text may run before any check.
            plan = program.query(COUNTS.format(view, column, bound))[0]["Plan"]
            counted_rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
            if plan["Node Type"] != "Function Scan" or counted_rows != visible:
                leaks.append((view, column, bound, visible, plan))
    assert leaks == []


@pytest.mark.versions
def test_private_relations_are_unlockable(marked: MarkedData, attacker: Program, stranger: Program):
    owner = marked.world.owner.connection
    ours = [name for (name,) in owner.execute(RELATIONS) if name.startswith(OURS)]
    locked, private = set(), set()
    for program, relation, mode in product((attacker, stranger), ours, LOCK_MODES):
        # Without a savepoint: its rollback would release the locks.
        with program.connection.transaction(force_rollback=True):
            try:
                program.connection.execute(f"LOCK TABLE {relation} IN {mode} MODE")
            except (psycopg.errors.InsufficientPrivilege, psycopg.errors.WrongObjectType):
                continue
            locked.add(relation)
            private.update(program.query(LOCKED))
    assert sorted(locked) == PUBLIC
    assert private == set()
    # A role without rules does not block the removal of stream messages.
    with stranger.connection.transaction():
        for view in PUBLIC:
            stranger.connection.execute(f"SELECT * FROM {view}")
        assert [name for name in stranger.query(LOCKED) if "streammessage" in name] == []

    pids = {program.pid for program in marked.world.programs[:3]}
    seen = attacker.connection.execute(
        "SELECT pid, usename, query FROM pg_stat_activity WHERE usename <> session_user"
    ).fetchall()
    assert pids <= {pid for pid, _, _ in seen}
    assert {query for _, _, query in seen} == {"<insufficient privilege>"}
    rows = attacker.query("SELECT reltuples FROM pg_class WHERE relname = 'psqlmessages_element'")
    assert rows > 0


class AttackerFuzzer(Fuzzer):
    """A fuzzer that also uses its own names and leaked values."""

    def __init__(self, world: World, marked: MarkedData, seed: int) -> None:
        super().__init__(world, "hostile", seed)
        self._marked = marked
        self._own_random = random.Random(seed)  # noqa: S311

    def argument(self, name: str, kind: str) -> Any:
        draw = self._own_random.random()
        if kind == "text" and name in OWN and draw < 0.6:
            return self._own_random.choice(OWN[name])
        if kind == "text" and draw > 0.9:
            return self._own_random.choice(self._marked.leaked)
        if kind == "bigint" and draw < 0.5:
            numbers = [int(text) for text in self._marked.leaked if text.isdecimal()]
            return self._own_random.choice(numbers)
        return super().argument(name, kind)


@pytest.mark.timeout(500)
def test_no_call_brings_anything_of_others_or_changes_it(marked: MarkedData, tmp_path: Path):
    reached: Counter[str] = Counter()
    calls = messages = 0
    found: list[str] = []
    for seed in range(12):
        attacker = AttackerFuzzer(marked.world, marked, seed)
        # Use the ids of others.
        with attacker.program.connection.cursor().copy(STAGED) as copy:
            for number in (1, 2, 11, 12):
                copy.write_row((UUID(int=number), 0, ["mine"], None, None, None))
        with TracedConnection(attacker.program.connection, tmp_path / "trace") as traced:
            for number in range(1, size(800, 10_000) + 1):
                attacker.step()
                if number % 500 == 0:
                    traced.find(marked.secrets())
        reached += attacker.reached
        calls += number
        messages += traced.messages
        found += traced.found
        attacker.program.close()
        functions = len(attacker.functions)
        # If the random calls have reached too few functions, try another seed.
        if seed + 1 >= size(1, 5) and len(reached) > functions * 0.8:
            break
    report(
        FAULT, "random calls to every public function", calls=calls, functions=functions,
        calls_per_function=calls // functions, functions_with_an_effect=len(reached),
        results_searched=messages, leaks=len(found),
    )  # fmt: skip
    assert found == []
    assert marked.rows() == marked.before
    assert len(reached) > functions * 0.8, sorted(reached)
