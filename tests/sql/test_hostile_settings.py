"""Hostile settings and shadows: whatever a session sets or makes, it deceives nobody."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.sql.conftest import LISTS, Pair, Program, World
from tests.sql.public import WITHOUT_SESSION, public_functions

SETTINGS = ["channel", "node", "housekeeping_at", "publishing"]
JUNK = [
    "", " ", "*", "0", "-1", "1e3", "NaN", "9" * 18, "9" * 400, "1.5", "null", "'", '"', "$$",
    "x'; DROP SCHEMA messages; --", "x" * 10_000, "🐘" * 100, "\n", "user2_1", "infinity",
]  # fmt: skip
ARGUMENTS = {
    "ident": "NODE2", "node": "NODE1", "topic": "MYTOPIC", "message": "{}", "messages": ["x"],
    "token": None, "param": "x", "enc": None, "event": '{"Evt":"connect","Ident":"NODE1"}',
    "reason": "x", "client_id": "NODE2", "payload": "x", "payloads": ["x"], "timeout": 60,
    "max_rows": 10, "queue": "WORK", "source": "WORK", "body": "x", "bodies": ["x"],
    "headers": None, "mature": None, "delay": None, "tries": 0, "key": None, "keys": None,
    "count": 1, "duration": 60.0, "leases": ["5.00000000-0000-0000-0000-000000000000"], "id": 1,
    "with_body": True, "elements": [], "failed": [], "copy_of": [], "marks": [], "queues": [],
    "encs": [], "matures": [], "topics": ["MYTOPIC"], "positions": [0], "after": "{}",
    "query": "q", "batch": 0, "stagings": [], "row_count": 0, "names": ["*"], "after_id": 0,
    "up_to_id": 9, "with_bodies": True, "nodes": ["NODE2"], "tokens": ["T"], "params": ["x"],
    "max_tries": None, "dead_letter_queue": None, "key_timeout": None,
    "to_queue": "OTHER", "ids": [1],
}  # fmt: skip
SHADOWED = r"""
    SELECT format('CREATE TEMP TABLE %%I (%%s)', c.relname, string_agg(
        format('%%I %%s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum
    ))
    FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
    WHERE c.relname LIKE 'psqlmessages\_%%' AND c.relkind IN ('r', 'p') AND NOT c.relispartition
      AND a.attnum > 0 AND NOT a.attisdropped
    GROUP BY c.relname
"""


def put(program: Program, setting: str, value: str) -> None:
    program.query("SELECT set_config(%s, %s, false)", f"messages.{setting}", value)


def got(program: Program, setting: str) -> str:
    return program.query("SELECT current_setting(%s, true)", f"messages.{setting}")


@pytest.fixture
def nodes(spec_world: World) -> Pair:
    spec_world.rules("user1 TWIN Topic MYTOPIC RW 500")
    sender = spec_world.node("user1", "NODE1", notify="MYTOPIC")
    return sender, spec_world.node("user2", "NODE2", listen="MYTOPIC")


def call_all(world: World, program: Program) -> dict[str, str]:
    functions = public_functions(world)
    numbers = {}
    for name in sorted(functions):
        # The last removes what the role itself has staged, for whichever node.
        if name not in ("init", "deinit", "crash", "connect_stream", "evaluate", "unstage"):
            parameters = functions[name].parameters.items()
            arguments = [[] if kind == "integer[]" else ARGUMENTS[key] for key, kind in parameters]
            numbers[name] = program.call(name, *arguments)["Err"]
            assert numbers[name] in functions[name].errors | {"0"}, name
    assert {numbers.pop(name) for name in LISTS} == {"0"}
    return numbers


@pytest.mark.parametrize("setting", SETTINGS)
def test_junk_in_a_setting_makes_no_node_and_no_internal_error(world: World, setting: str):
    program = world.program("hostile")
    for junk in JUNK:
        put(program, setting, junk)
        assert set(call_all(world, program).values()) == {"50", "16"}
        assert program.error("init", "NODE1")[0] == 5
        program.ok("deinit", "NODE1")
        program.ok("evaluate")


@pytest.mark.parametrize("role", ["hostile", "user1", "user2"])
@pytest.mark.parametrize("has_node", [False, True])
def test_copied_settings_make_no_node(world: World, nodes: Pair, role: str, has_node: bool):
    world.rules(f"{role} OWN Topic X R 5")
    program = world.node(role, "OWN") if has_node else world.program(role)
    for setting in SETTINGS:
        put(program, setting, got(nodes[0], setting))
    numbers = call_all(world, program)
    for name in WITHOUT_SESSION - {"unstage"}:
        del numbers[name]
    assert numbers.pop("use") == ("53" if has_node else "50")
    assert set(numbers.values()) == {"50"}


def test_one_setting_of_another_session_serves_for_nothing(world: World, nodes: Pair):
    program = world.node("user1", "TWIN", notify="MYTOPIC")
    for taken in "channel", "node":
        own = got(program, taken)
        put(program, taken, got(nodes[0], taken))
        assert program.error("topic_send", "MYTOPIC", "x")[0] == 50
        assert program.error("topic_status", "MYTOPIC")[0] == 50
        put(program, taken, own)
    program.ok("topic_send", "MYTOPIC", "x")
    program.ok("deinit", "TWIN")
    # Nor is its channel listened to.
    for foreign in (got(node, "channel") for node in nodes):
        for act in "init", "deinit", "use":
            own = program.ok("init", "TWIN")["Channel"]
            put(program, "channel", foreign)
            program.ok(act, "TWIN")
            listening = program.query("SELECT array_agg(c) FROM pg_listening_channels() AS c")
            assert listening == ([own] if act != "deinit" else None)


def test_a_forged_time_of_evaluation_only_puts_off_its_own(world: World, nodes: Pair):
    world.kill(nodes[1])
    put(nodes[0], "housekeeping_at", "9" * 18)
    nodes[0].ok("topic_status", "MYTOPIC")
    assert nodes[0].events()[-1] == "crash NODE2"


@pytest.fixture
def shadows(world: World) -> Iterator[str]:
    """A schema of `hostile` and user1 where what our functions call exists, and raises."""
    superuser = world.superuser()
    superuser.execute("CREATE SCHEMA shadows")
    superuser.execute("GRANT ALL ON SCHEMA shadows TO PUBLIC")
    boom = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'the shadow of % was used', '{}'; END $$"
    for signature, answer in {
        "octet_length(text)": "int", "octet_length(varchar)": "int", "length(text)": "int",
        "length(varchar)": "int", "to_json(text)": "json", "to_json(varchar)": "json",
        "to_json(text[])": "json", "pg_notify(text, text)": "void", "pg_backend_pid()": "int",
        "right(text, int)": "text", "left(text, int)": "text", "right(varchar, int)": "text",
        "left(varchar, int)": "text", "set_config(text, text, boolean)": "text",
        "current_setting(text, boolean)": "text", "sha256(bytea)": "bytea",
        "starts_with(varchar, text)": "boolean", "gen_random_uuid()": "uuid",
        "pg_try_advisory_lock(int, int)": "boolean", "clock_timestamp()": "timestamptz",
        "nextval(text)": "bigint", "equal(varchar, varchar)": "boolean",
        "equal(text, text)": "boolean", "equal(varchar, text)": "boolean",
        "equal(name, text)": "boolean", "equal(text, name)": "boolean",
        "joined(text, text)": "text", "equal(varchar, name)": "boolean",
    }.items():  # fmt: skip
        world.program("user1").execute(
            f"CREATE FUNCTION shadows.{signature} RETURNS {answer} {boom.format(signature)}"
        )
    for left, right in [
        ("varchar", "varchar"), ("text", "text"), ("varchar", "text"), ("name", "text"),
        ("text", "name"), ("varchar", "name"),
    ]:  # fmt: skip
        options = f"LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = shadows.equal"
        superuser.execute(f"CREATE OPERATOR shadows.= ({options})")
    options = "LEFTARG = text, RIGHTARG = text, FUNCTION = shadows.joined"
    superuser.execute(f"CREATE OPERATOR shadows.|| ({options})")
    for domain in "json", "text", "int", "bigint":
        superuser.execute(f'CREATE DOMAIN shadows."{domain}" AS bytea')
    yield "pg_temp, shadows, pg_catalog, messages, public"
    superuser.execute("DROP SCHEMA shadows CASCADE")


def make_shadow_tables(world: World, program: Program, role: str) -> None:
    """Make temporary tables and views of the names of ours; the rules there allow all."""
    statements = world.execute(SHADOWED, []).fetchall()
    assert len(statements) > 10
    for (statement,) in statements:
        program.execute(statement)
    insert = "INSERT INTO pg_temp.psqlmessages_auth (id, role, ident, type, dest, mode, timeout)"
    program.execute(f"{insert} VALUES (1, %s, '*', 'Topic', '*', 'RW', 5)", [role])
    program.execute("CREATE TEMP TABLE pg_roles (rolname name, oid oid)")
    program.execute("CREATE TEMP TABLE pg_locks (objid oid)")
    program.execute("CREATE TEMP TABLE _rules_lock (id boolean)")


def test_shadow_objects_grant_nothing(world: World, nodes: Pair, shadows: str):
    del nodes
    program = world.program("hostile")
    make_shadow_tables(world, program, "hostile")
    program.execute(f"SET search_path = {shadows}")
    assert program.error("init", "NODE9")[0] == 5
    numbers = call_all(world, program)
    # Nobody has such a lease: there is nothing that a right would be needed for.
    assert [numbers.pop(name) for name in ("commit", "rollback", "release")] == ["0"] * 3
    assert set(numbers.values()) == {"50", "2"}
    assert [name for name in LISTS if program.elements(name)] == []


def test_a_node_never_uses_shadow_objects_it_has(world: World, nodes: Pair, shadows: str):
    world.rules("user1 TWIN Rpc NODE2 W 5", "user1 TWIN Topic OBSERVED O 5")
    program = world.program("user1")
    make_shadow_tables(world, program, "user1")
    program.execute(f"SET search_path = {shadows}")
    with pytest.raises(psycopg.errors.RaiseException, match="the shadow of octet_length"):
        program.query("SELECT octet_length(version())")
    for function, *arguments in (
        ("init", "TWIN"), ("topic_notify", "MYTOPIC"), ("topic_listen", "MYTOPIC"),
        ("topic_status", "MYTOPIC"), ("topic_auth", "MYTOPIC"), ("topic_observe", "OBSERVED"),
        ("topic_send", "MYTOPIC", "one", "TOKEN"),
        ("topic_send_many", "MYTOPIC", ["two", "x" * 9000]),
        ("topic_send_as", "TWIN", "MYTOPIC", "three"), ("rpc", "NODE2", "TOKEN", "four"),
        ("rpc_many", ["NODE2", "NODE2"], ["TOKEN", "TOKEN"], ["five", "x" * 9000]),
        ("subscribe", "TWIN", "MYTOPIC", 60), ("publish", "TWIN", "MYTOPIC", "stored"),
        ("publish_many", "TWIN", "MYTOPIC", ["stored", "too"]), ("subscription", "TWIN", "MYTOPIC"),
    ):  # fmt: skip
        program.ok(function, *arguments)
    assert program.got("TWIN", "MYTOPIC") == ["stored", "stored", "too"]
    program.ok("unsubscribe", "TWIN", "MYTOPIC")
    program.ok("connect_stream", "TWIN")
    program.ok("get_data", next(p for p in nodes[1].payloads() if "Dkey" in p))
    received = [header for header in program.headers() if header["Type"] == "Topic"]
    token = received[0]["Token"]
    program.ok("return", "TWIN", token, "five")
    answer = program.ok("return_many", ["TWIN"] * 2, [token] * 2, ["six", "x" * 9000])
    assert answer["Answers"] == [None, None]
    program.ok("evaluate")
    program.ok("deinit", "TWIN")
    assert len(received) == 7


CALLERS = [
    "transform_null_equals = on", "standard_conforming_strings = off",
    "quote_all_identifiers = on", "escape_string_warning = off",
    "bytea_output = escape", "extra_float_digits = 0", "TimeZone = 'Asia/Kathmandu'",
    "DateStyle = 'SQL, DMY'", "IntervalStyle = sql_standard", "client_encoding = LATIN1",
    "client_min_messages = debug5", "client_min_messages = error", "row_security = off",
    "check_function_bodies = off", "plan_cache_mode = force_generic_plan",
    "plan_cache_mode = force_custom_plan", "jit_above_cost = 0", "default_tablespace = ''",
    "plpgsql.extra_errors = 'all'", "enable_indexscan = off", "lc_numeric = 'C'",
    "backslash_quote = off", "xmlbinary = hex",
]  # fmt: skip


def test_settings_of_the_caller_do_not_change_the_message(world: World, nodes: Pair):
    world.rules("user1 NODE1 Topic NEW RW 5")
    for setting in CALLERS:
        nodes[1].payloads()
        nodes[0].execute(f"SET {setting}")
        nodes[0].call("topic_unnotify", "NEW")
        nodes[0].ok("topic_notify", "NEW")
        nodes[0].ok("topic_send", "MYTOPIC", "small", "TOKEN")
        nodes[0].ok("topic_send_many", "MYTOPIC", ["x" * 9000, None])
        small, large, empty = nodes[1].headers()
        found = small["Body"], small["From"], empty["Size"], large["Size"]
        assert found == ("small", "NODE1", 0, 9000), setting
        assert nodes[0].error("topic_listen", "NONE") == (9, "Topic NONE is not existent")
        nodes[0].execute(f"RESET {setting.partition(' ')[0]}")
