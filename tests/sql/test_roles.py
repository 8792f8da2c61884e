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
    "braces": "{}",
    "blank": "a b ",
}
pytestmark = pytest.mark.versions


@pytest.fixture
def member(world: World) -> Iterator[Program]:
    """user1 as node M, allowed only as a member of the group role `team`; A, of user2, sends."""
    world.rules("team M Topic T RW 50", "user2 A Topic T RW 5")
    superuser = world.superuser()
    superuser.execute("GRANT team TO user1")
    yield world.node("user1", "M")
    superuser.execute("REVOKE team FROM user1")


def revoke(world: World) -> None:
    """Take user1 out of the group."""
    world.superuser().execute("REVOKE team FROM user1")


def test_a_member_of_a_group_role_may_what_the_group_may_until_it_is_revoked(
    world: World, member: Program
) -> None:
    member.ok("topic_listen", "T")
    member.ok("topic_notify", "T")
    member.ok("topic_send", "T", "x")
    assert member.headers()[-1]["Body"] == "x"
    other = world.node("user2", "A")
    assert world.program("user2").error("init", "M")[0] == 5
    member.ok("topic_unnotify", "T")
    member.payloads(), other.payloads()
    revoke(world)
    assert member.events() == []
    other.ok("evaluate")
    assert member.events() == ["topic_unlisten M T", "disconnect M"]
    assert other.events() == ["topic_unlisten M T", "topic_none_listen T", "disconnect M"]
    assert member.error("init", "M")[0] == 5
    world.superuser().execute("GRANT team TO user1")
    member.ok("init", "M")


def test_a_member_that_was_revoked_keeps_what_its_own_rules_allow_and_their_timeout(
    world: World, member: Program
) -> None:
    world.rules("user1 M Topic T R 5", "user1 M Topic U RW 5", "team M Topic U RW 50")
    for topic in "T", "U":
        member.ok("topic_listen", topic)
        member.ok("topic_notify", topic)
    other = world.node("user2", "A")
    member.payloads()
    revoke(world)
    other.ok("evaluate")
    assert member.events() == ["topic_unnotify M T", "topic_none_notify T"]
    assert other.ok("topic_status", "T")["Listeners"] == ["M"]
    member.ok("topic_send", "U", "x" * 9000)
    assert member.headers()[-1]["Dkey"].split(".")[0] == "5"


@pytest.fixture
def former_heir(world: World, new_role: Callable[[str], Program]) -> Program:
    """A role that is registered as node M by a rule of its group, and then inherits no more."""
    program, superuser = new_role("heir"), world.superuser()
    superuser.execute("GRANT team TO heir")
    world.rules("team M Topic T RW 50", "team M Queue Q RW 50")
    program.ok("init", "M")
    world.owner.ok("evaluate")
    if superuser.connection.info.server_version >= 160000:
        superuser.execute("GRANT team TO heir WITH INHERIT FALSE, SET FALSE")
    else:
        superuser.execute("ALTER ROLE heir NOINHERIT")
    assert superuser.query("SELECT pg_has_role('heir', 'team', 'MEMBER')")
    return program


def test_a_member_that_does_not_inherit_is_disconnected_and_may_nothing(
    world: World, former_heir: Program
) -> None:
    world.owner.ok("evaluate")
    assert former_heir.events() == ["disconnect M"]
    former_heir.execute("DISCARD ALL")
    assert former_heir.error("init", "M")[0] == 5
    for call in (
        ("publish", "M", "T", "x"), ("push", "M", "Q", "x"), ("read_stream", "M", "T"),
        ("stream_horizons", "M", ["T"]),
    ):  # fmt: skip
        assert former_heir.error(*call)[0] == 2, call
    assert [former_heir.elements(name) for name in ("list_topics", "list_queues")] == [[], []]


def test_a_group_within_a_group_counts(world: World, new_role: Callable[[str], Program]) -> None:
    program, superuser = new_role("deep"), world.superuser()
    new_role("middle")
    superuser.execute("GRANT team TO middle")
    superuser.execute("GRANT middle TO deep")
    world.rules("team M Topic T RW 50")
    program.ok("init", "M")
    superuser.execute("REVOKE team FROM middle")
    world.owner.ok("evaluate")
    assert program.events() == ["disconnect M"]


def test_who_is_no_superuser_any_more_may_no_more_what_all_groups_may(
    world: World, new_role: Callable[[str], Program]
) -> None:
    program = new_role("former")
    superuser = world.superuser()
    superuser.execute("ALTER ROLE former SUPERUSER")
    world.rules("team M Topic T RW 50")
    program.ok("init", "M")
    world.owner.ok("evaluate")
    superuser.execute("ALTER ROLE former NOSUPERUSER")
    world.owner.ok("evaluate")
    assert program.events() == ["disconnect M"]


def test_a_group_of_another_name_is_another_group(
    world: World, new_role: Callable[[str], Program]
) -> None:
    program, superuser = new_role("member"), world.superuser()
    new_role("crew")
    superuser.execute("GRANT crew TO member")
    world.rules("crew M Topic T RW 50")
    program.ok("init", "M")
    world.owner.ok("evaluate")
    superuser.execute("ALTER ROLE crew RENAME TO company")
    try:
        world.owner.ok("evaluate")
        assert program.events() == ["disconnect M"]
    finally:
        superuser.execute("ALTER ROLE company RENAME TO crew")


def test_a_dropped_role_harms_nobody_while_its_node_is_still_connected(
    world: World, new_role: Callable[[str], Program]
) -> None:
    world.rules(
        "dropped D Topic T RW 5", "team D Topic T RW 5", "dropped E Topic T RW 5",
        "user1 A Topic T RW 5", "team * Topic * RW 5",
    )  # fmt: skip
    dropped, other = new_role("dropped"), world.node("user1", "A")
    dying = Program(dropped.url)
    dying.ok("init", "E")
    dropped.ok("init", "D")
    dropped.ok("topic_listen", "T")
    other.payloads()
    world.kill(dying)
    world.superuser().execute("DROP ROLE dropped")
    other.ok("evaluate")
    assert other.events() == ["crash E"]
    other.ok("topic_notify", "T")
    other.ok("topic_listen", "T")
    other.ok("topic_send", "T", "x")
    assert other.ok("topic_status", "T")["Notifiers"] == ["A"]
    dropped.payloads()
    world.execute("UPDATE messages.auth SET mode = 'W'")
    assert "topic_unlisten D T" in dropped.events()


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_a_role_a_topic_and_a_node_may_have_any_name(
    world: World, new_role: Callable[[str], Program], name: str
) -> None:
    try:
        program = new_role(name)
    except psycopg.errors.InvalidParameterValue:
        pytest.skip("this version of PostgreSQL refuses the name")
    world.rule(name, name, "Topic", name, "RW", 5)
    world.rule(name, name, "Rpc", name, "W", 5)
    channel = program.ok("init", name)["Channel"]
    assert len(channel.encode()) <= 63
    assert name.startswith(channel.rpartition("_")[0])
    assert program.ok("init", name) == {"Err": "0", "Channel": channel, "Already": 1}
    program.ok("topic_listen", name)
    program.ok("topic_notify", name)
    program.ok("topic_send", name, name, name)
    program.ok("topic_send_many", name, [name], name)
    program.ok("topic_send_as", name, name, name, name)
    program.ok("rpc", name, name, name)
    headers = program.headers()
    assert [header["Type"] for header in headers] == ["Topic"] * 3 + ["Rpc"]
    assert {header[field] for header in headers for field in ("To", "From", "Body")} == {name}
    for header in headers:
        program.ok("return", name, header["Token"], name)
    assert [answer["Token"] for answer in program.headers()] == [name] * 4
    assert program.ok("topic_status", name)["Listeners"] == [name]
