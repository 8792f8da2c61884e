"""Roles: groups whose members come and go, roles that are dropped, and names of every kind."""

from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.sql.conftest import Program, World

NAMES = {
    "double quote": 'us"er',
    "single quote": "us'er",
    "percent": "100% %s %I",
    "dollar": "$$ $1",
    "backslash": r"\u0041\n",
    "capitals": "User Name",
    "emoji": "🐘🐘",
    "emoji of 60 bytes": "🐘" * 15,
    "63 bytes": "r" * 63,
    "63 bytes of 3 each": "€" * 21,
    "right to left": "\u05de\u05e9\u05ea\u200f",
    "combining": "e\u0301",
    "SQL": "x'); DROP SCHEMA messages; --",
    "newline": "a\nb",
}
every_name = pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))


@pytest.fixture
def member(world: World) -> Iterator[Program]:
    """user1 as node M, allowed only as a member of the group role `team`; A, of user2, sends."""
    world.rules("team M Topic T RW 50", "user2 A Topic T RW 5")
    superuser = world.superuser()
    superuser.connection.execute("GRANT team TO user1")
    yield world.node("user1", "M")
    superuser.connection.execute("REVOKE team FROM user1")


def revoke(world: World) -> None:
    """Take user1 out of the group."""
    world.superuser().connection.execute("REVOKE team FROM user1")


def test_a_member_of_a_group_role_may_what_the_group_may(member: Program) -> None:
    member.ok("topic_listen", "T")
    member.ok("topic_notify", "T")
    member.ok("topic_send", "T", "x")
    assert member.headers()[-1]["Body"] == "x"


def test_who_is_no_member_may_not(world: World, member: Program) -> None:
    member.ok("deinit", "M")
    assert world.program("user2").error("init", "M")[0] == 5


def test_a_member_that_was_revoked_is_disconnected_at_the_next_evaluation(
    world: World, member: Program
) -> None:
    member.ok("topic_listen", "T")
    other = world.node("user2", "A")
    member.payloads()
    revoke(world)
    assert member.events() == []
    other.ok("evaluate")
    assert member.events() == ["topic_unlisten M T", "disconnect M"]
    assert other.events() == ["topic_unlisten M T", "topic_none_listen T", "disconnect M"]
    assert member.error("init", "M")[0] == 5


def test_a_member_that_was_revoked_keeps_what_its_own_rules_allow(
    world: World, member: Program
) -> None:
    world.rules("user1 M Topic T R 5")
    member.ok("topic_listen", "T")
    member.ok("topic_notify", "T")
    other = world.node("user2", "A")
    member.payloads()
    revoke(world)
    other.ok("evaluate")
    assert member.events() == ["topic_unnotify M T", "topic_none_notify T"]
    assert other.ok("topic_status", "T")["Listeners"] == ["M"]


def test_the_timeout_of_a_group_counts_no_more_once_its_member_was_revoked(
    world: World, member: Program
) -> None:
    world.rules("user1 M Topic T RW 5")
    member.ok("topic_listen", "T")
    member.ok("topic_notify", "T")
    revoke(world)
    world.node("user2", "A").ok("evaluate")
    member.ok("topic_send", "T", "x" * 9000)
    assert member.headers()[-1]["Dkey"].split(".")[0] == "5"


def test_a_role_granted_a_group_may_use_its_rules_at_once(world: World, member: Program) -> None:
    member.ok("deinit", "M")
    revoke(world)
    assert member.error("init", "M")[0] == 5
    world.superuser().connection.execute("GRANT team TO user1")
    member.ok("init", "M")


@pytest.fixture
def former_heir(world: World, new_role: Callable[[str], Program]) -> Program:
    """A role that is registered as node M by a rule of its group, and then inherits no more."""
    program, superuser = new_role("heir"), world.superuser()
    superuser.connection.execute("GRANT team TO heir")
    world.rules("team M Topic T RW 50", "team M Queue Q RW 50")
    program.ok("init", "M")
    world.owner.ok("evaluate")
    if superuser.connection.info.server_version >= 160000:
        superuser.connection.execute("GRANT team TO heir WITH INHERIT FALSE, SET FALSE")
    else:
        superuser.connection.execute("ALTER ROLE heir NOINHERIT")
    assert superuser.query("SELECT pg_has_role('heir', 'team', 'MEMBER')")
    return program


def test_a_member_that_does_not_inherit_is_disconnected_at_the_next_evaluation(
    world: World, former_heir: Program
) -> None:
    world.owner.ok("evaluate")
    assert former_heir.events() == ["disconnect M"]


def test_a_member_that_does_not_inherit_may_nothing(world: World, former_heir: Program) -> None:
    former_heir.connection.execute("DISCARD ALL")
    assert former_heir.error("init", "M")[0] == 5
    assert former_heir.error("publish", "M", "T", "x")[0] == 2
    assert former_heir.error("push", "M", "Q", "x")[0] == 2
    assert former_heir.error("read_stream", "M", "T")[0] == 2
    assert former_heir.error("stream_horizons", "M", ["T"])[0] == 2
    assert [former_heir.elements(name) for name in ("list_topics", "list_queues")] == [[], []]


def test_a_group_within_a_group_counts(world: World, new_role: Callable[[str], Program]) -> None:
    program, superuser = new_role("deep"), world.superuser()
    new_role("middle")
    superuser.connection.execute("GRANT team TO middle")
    superuser.connection.execute("GRANT middle TO deep")
    world.rules("team M Topic T RW 50")
    program.ok("init", "M")
    superuser.connection.execute("REVOKE team FROM middle")
    world.owner.ok("evaluate")
    assert program.events() == ["disconnect M"]


def test_who_is_no_superuser_any_more_may_no_more_what_all_groups_may(
    world: World, new_role: Callable[[str], Program]
) -> None:
    program = new_role("former")
    superuser = world.superuser()
    superuser.connection.execute("ALTER ROLE former SUPERUSER")
    world.rules("team M Topic T RW 50")
    program.ok("init", "M")
    world.owner.ok("evaluate")
    superuser.connection.execute("ALTER ROLE former NOSUPERUSER")
    world.owner.ok("evaluate")
    assert program.events() == ["disconnect M"]


def test_a_group_of_another_name_is_another_group(
    world: World, new_role: Callable[[str], Program]
) -> None:
    program, superuser = new_role("member"), world.superuser()
    new_role("crew")
    superuser.connection.execute("GRANT crew TO member")
    world.rules("crew M Topic T RW 50")
    program.ok("init", "M")
    world.owner.ok("evaluate")
    superuser.connection.execute("ALTER ROLE crew RENAME TO company")
    try:
        world.owner.ok("evaluate")
        assert program.events() == ["disconnect M"]
    finally:
        superuser.connection.execute("ALTER ROLE company RENAME TO crew")


def test_a_group_without_members_named_like_nobody_harms_nobody(world: World) -> None:
    world.rules("team * Topic * RW 5", "user1 A Topic T R 5", "no_such_role A Topic T W 5")
    assert world.node("user1", "A").error("topic_notify", "T")[0] == 3


def test_a_dropped_role_harms_nobody_while_its_node_is_still_connected(
    world: World, new_role: Callable[[str], Program]
) -> None:
    world.rules("dropped D Topic T RW 5", "team D Topic T RW 5", "user1 A Topic T RW 5")
    dropped, other = new_role("dropped"), world.node("user1", "A")
    dropped.ok("init", "D")
    dropped.ok("topic_listen", "T")
    world.superuser().connection.execute("DROP ROLE dropped")
    other.ok("topic_notify", "T")
    other.ok("topic_listen", "T")
    other.ok("topic_send", "T", "x")
    other.ok("evaluate")
    assert other.ok("topic_status", "T")["Notifiers"] == ["A"]


def test_a_crashed_node_of_a_dropped_role_is_evaluated(
    world: World, new_role: Callable[[str], Program]
) -> None:
    world.rules("dropped D Topic T RW 5", "team D Topic T RW 5", "user1 A Topic T RW 5")
    dropped, other = new_role("dropped"), world.node("user1", "A")
    dropped.ok("init", "D")
    other.payloads()
    world.kill(dropped)
    world.superuser().connection.execute("DROP ROLE dropped")
    other.ok("evaluate")
    assert other.events() == ["crash D"]


def test_rules_can_be_changed_while_a_node_of_a_dropped_role_is_connected(
    world: World, new_role: Callable[[str], Program]
) -> None:
    world.rules("dropped D Topic T RW 5", "team D Topic T RW 5")
    dropped = new_role("dropped")
    dropped.ok("init", "D")
    dropped.ok("topic_listen", "T")
    world.superuser().connection.execute("DROP ROLE dropped")
    world.owner.connection.execute("UPDATE messages.auth SET mode = 'W'")
    assert "topic_unlisten D T" in dropped.events()


@every_name
def test_a_role_of_any_name_may_use_its_rules(
    world: World, new_role: Callable[[str], Program], name: str
) -> None:
    try:
        program = new_role(name)
    except psycopg.errors.InvalidParameterValue:
        pytest.skip("this version of PostgreSQL refuses the name")
    world.rule(name, "NODE", "Topic", "T", "RW", 5)
    channel = program.ok("init", "NODE")["Channel"]
    program.ok("topic_listen", "T")
    program.ok("topic_notify", "T")
    program.ok("topic_send", "T", "x")
    assert program.headers()[-1]["Body"] == "x"
    assert len(channel.encode()) <= 63
    assert name.startswith(channel.rpartition("_")[0])
    assert program.ok("init", "NODE") == {"Err": "0", "Channel": channel, "Already": 1}


@every_name
def test_a_topic_and_a_node_of_any_name_work(world: World, name: str) -> None:
    world.rule("user1", name, "Topic", name, "RW", 5)
    world.rule("user1", name, "Rpc", name, "W", 5)
    program = world.node("user1", name)
    program.ok("topic_listen", name)
    program.ok("topic_notify", name)
    program.ok("topic_send", name, name, name)
    program.ok("rpc", name, name, name)
    topic, request = program.headers()
    assert (topic["To"], topic["From"], topic["Body"]) == (name, name, name)
    program.ok("return", name, topic["Token"], name)
    program.ok("return", name, request["Token"], name)
    assert [answer["Token"] for answer in program.headers()] == [name, name]
    assert program.ok("topic_status", name)["Listeners"] == [name]
