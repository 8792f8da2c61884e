"""Hostile roles: what is not public is out of reach, and nobody acts as somebody else."""

import re

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.sql.public import FUNCTIONS, VIEWS

pytestmark = pytest.mark.versions
REACHED = r"""
    SELECT c.oid::regclass::text, p.privilege
    FROM pg_class AS c CROSS JOIN unnest(string_to_array(
        'SELECT INSERT UPDATE REFERENCES DELETE TRUNCATE TRIGGER USAGE', ' '
    )) AS p (privilege)
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
      AND (c.relnamespace = 'messages'::regnamespace
          OR c.relnamespace = 'public'::regnamespace AND c.relname LIKE 'psqlmessages\_%%')
      AND CASE
        WHEN c.relkind = 'S' THEN p.privilege IN ('USAGE', 'SELECT', 'UPDATE')
            AND has_sequence_privilege(%(role)s, c.oid, p.privilege)
        WHEN p.privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES')
            THEN has_any_column_privilege(%(role)s, c.oid, p.privilege)
        WHEN p.privilege <> 'USAGE' THEN has_table_privilege(%(role)s, c.oid, p.privilege)
      END
"""
STAGE = """
    INSERT INTO messages.staged (staging, place, bodies, {})
    VALUES (gen_random_uuid(), 1, '{{}}', NULL)
"""
DENIED = [
    *(f"SELECT messages.{call}" for call in (
        "_make_secret()", "_maintain_sessions_and_rules()", "_truncate_expired_bodies()",
        "_disconnect('NODE1')", "_prune_streams()", "_watermark(1)",
        "_store_messages(1, 0::smallint, 1, '', 'NODE1', ARRAY['x'], NULL)",
    )),
    "TABLE psqlmessages_auth",
    "LOCK TABLE psqlmessages_topic IN ACCESS SHARE MODE",
    "COMMENT ON TABLE psqlmessages_topic IS 'mine'",
    # Nobody says whose staged rows are.
    STAGE.format("role"),
    STAGE.format("staged_at"),
    "CREATE FUNCTION messages.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE TABLE messages.mine (id int)",
    "CREATE TABLE public.psqlmessages_mine (id int)",
    "CREATE OR REPLACE VIEW messages.topics AS SELECT 1 AS topic",
    "ALTER FUNCTION messages.init(text) RESET ALL",
    "DROP VIEW messages.auth",
    "GRANT SELECT ON messages.auth TO PUBLIC",
    "ALTER TABLE psqlmessages_auth DISABLE TRIGGER ALL",
    "SET ROLE psqlmessages",
    "SET SESSION AUTHORIZATION user2",
]  # fmt: skip


@pytest.fixture
def nodes(spec_world: World) -> dict[str, Program]:
    nodes = {
        "NODE1": spec_world.node("user1", "NODE1", notify="MYTOPIC"),
        "NODE2": spec_world.node("user2", "NODE2", listen="MYTOPIC"),
        "hostile": spec_world.program("hostile"),
    }
    spec_world.forget()
    return nodes


@pytest.mark.parametrize("role", ["hostile", "user1"])
def test_no_statement_reaches_a_table_or_alters_anything(world: World, role: str):
    reached = set(world.execute(REACHED, {"role": role}).fetchall())
    readable = {(f"messages.{view}", "SELECT") for view in VIEWS}
    # Anybody may insert into columns that say nothing of who it is.
    assert reached == readable | {("messages.staged", "INSERT")}
    executable = world.owner.query(
        "SELECT array_agg(DISTINCT proname::text) FROM pg_proc WHERE"
        " pronamespace = 'messages'::regnamespace AND has_function_privilege(%s, oid, 'EXECUTE')",
        role,
    )
    assert sorted(executable) == FUNCTIONS
    program = world.program(role)
    assert [statement for statement in DENIED if not is_denied(program, statement)] == []


def is_denied(program: Program, statement: str) -> bool:
    try:
        program.execute(f"ROLLBACK; BEGIN; {statement}")
    except psycopg.errors.InsufficientPrivilege:
        return True
    return False


def test_the_view_topics_shows_a_role_its_topics_only(spec_world: World):
    spec_world.rules(
        "user1 A Topic ALPHA.* RW 5", "user2 B Topic ALPHA.1 R 5", "team C Topic GAMMA O 5",
        "user1 A Rpc RPC W 5", "no_such_role X Topic DELTA R 5",
    )  # fmt: skip
    look = "SELECT array_agg(topic ORDER BY topic) FROM messages.topics"
    seen = {role: spec_world.program(role).query(look) for role in ("user1", "user2", "user3")}
    both = ["ALPHA.1", "MYTOPIC"]
    assert seen == {"user1": both, "user2": both, "user3": ["GAMMA", "MYTOPIC"]}
    assert spec_world.program("hostile").query(look) is None
    assert spec_world.owner.query(look) == ["ALPHA.1", "DELTA", "GAMMA", "MYTOPIC"]


def test_the_login_counts_not_a_functions_owner(nodes: dict[str, Program], world: World):
    owner = world.superuser()
    owner.execute("CREATE SCHEMA borrowed AUTHORIZATION user1")
    try:
        owner.execute("GRANT USAGE ON SCHEMA borrowed TO PUBLIC")
        nodes["NODE1"].execute(
            "CREATE FUNCTION borrowed.send() RETURNS json LANGUAGE sql SECURITY DEFINER AS"
            " $$ SELECT messages.topic_send_as('NODE1', 'MYTOPIC', 'x') $$"
        )
        assert nodes["hostile"].query("SELECT borrowed.send()")["Err"] == "2"
    finally:
        owner.execute("DROP SCHEMA borrowed CASCADE")


def test_rights_are_those_of_the_session_user_not_of_set_role(spec_world: World):
    spec_world.rules("team GROUPNODE Topic MYTOPIC RW 5")
    node = spec_world.node("user3", "NODE3")
    node.execute("SET ROLE team")
    assert node.ok("topic_listen", "MYTOPIC") == {"Err": "0"}
    assert node.ok("init", "NODE3")["Channel"].startswith("user3_")
    node.execute("RESET ROLE")
    assert node.ok("topic_listen", "MYTOPIC")["Already"] == 1
    node.ok("deinit", "NODE3")
    # An authorization that a superuser sets is a login, and finds no session of the former one.
    superuser = spec_world.superuser()
    superuser.execute("SET SESSION AUTHORIZATION hostile")
    assert superuser.error("init", "NODE3")[0] == 5
    superuser.execute("SET SESSION AUTHORIZATION user3")
    assert superuser.ok("init", "NODE3")["Channel"].startswith("user3_")
    for statement in "SET SESSION AUTHORIZATION hostile", "RESET SESSION AUTHORIZATION":
        superuser.execute(f"{statement}; RESET ALL")
        assert superuser.error("topic_listen", "MYTOPIC")[0] == 50
        assert superuser.error("use", "NODE3")[0] == 50
        assert superuser.ok("deinit", "NODE3") == {"Err": "0", "Already": 1}
    assert spec_world.owner.query("SELECT count(*) FROM psqlmessages_client") == 1


def test_a_channel_holds_over_100_random_bits(world: World):
    world.rules("user1 N Topic T R 5")
    program, tails = world.program("user1"), []
    for _ in range(32):
        head, _, tail = program.ok("init", "N")["Channel"].partition("_")
        program.ok("deinit", "N")
        assert re.fullmatch(rf"{program.pid}[0-9a-f]{{32}}", tail)
        assert head == "user1"
        tails.append(tail[-32:])
    digits = [len(set(column)) for column in zip(*tails, strict=True)]
    # Two of a UUID's digits say its version and variant; four values each are two bits.
    assert sum(count >= 8 for count in digits) * 4 >= 100
    assert len(set(tails)) == 32
    weak = world.owner.query(
        "SELECT array_agg(proname::text) FROM pg_proc"
        r" WHERE pronamespace = 'messages'::regnamespace AND prosrc ~ '\mrandom\('"
    )
    assert set(weak) == {"_open_session", "_begin_publishing"}, (
        "the number of a lock may be guessed, a channel may not"
    )


def test_any_role_that_knows_a_channel_can_notify_it_as_documented(nodes: dict[str, Program]):
    channel = nodes["NODE2"].ok("init", "NODE2")["Channel"]
    forged = '{"Type":"Topic","From":"NODE1","To":"MYTOPIC","Size":1}\nx'
    nodes["hostile"].query("SELECT pg_notify(%s, %s)", channel, forged)
    assert nodes["NODE2"].payloads() == [forged]


@pytest.mark.parametrize(
    ("act", "held_up"),
    [(("topic_listen", "T"), ("topic_listen", "T")), (("topic_observe", "T"), ("init", "LATE"))],
)
def test_transactions_hold_up_others(world: World, act: tuple[str, ...], held_up: tuple[str, ...]):
    world.rules(
        "hostile H Topic T RW 5", "hostile H* Topic T O 5", "user1 A Topic T R 5",
        "user1 DEAD Topic T R 5", "user1 LATE Topic T R 5",
    )  # fmt: skip
    hostile, other = world.node("hostile", "H"), world.node("user1", "A")
    dying = world.node("user1", "DEAD")
    hostile.ok("evaluate")
    world.kill(dying)
    hostile.execute("BEGIN")
    hostile.ok(*act)
    other.execute("SET lock_timeout = '200ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        other.call(*held_up)
    hostile.execute("COMMIT")
    other.ok(*held_up)
