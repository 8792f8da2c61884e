"""Roles: groups whose members come and go, and roles that are dropped."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from tests.sql.conftest import Program, World

# How a role comes to a right of a group, and loses it.
LOSSES = [
    ("GRANT team TO middle; GRANT middle TO member", "team", "REVOKE team FROM middle"),
    ("ALTER ROLE member SUPERUSER", "team", "ALTER ROLE member NOSUPERUSER"),
    ("GRANT middle TO member", "middle", "ALTER ROLE middle RENAME TO company"),
    ("GRANT team TO member", "team", "ALTER ROLE member NOINHERIT"),
]
pytestmark = pytest.mark.versions


@pytest.fixture
def member(world: World) -> Iterator[Program]:
    world.rules("team M Topic T RW 50", "user2 A Topic T RW 5")
    superuser = world.superuser()
    superuser.execute("GRANT team TO user1")
    yield world.node("user1", "M")
    superuser.execute("REVOKE team FROM user1")


def test_a_member_has_the_rights_of_its_group_until_revoked(world: World, member: Program):
    member.ok("topic_listen", "T")
    member.ok("topic_notify", "T")
    member.ok("topic_send", "T", "x")
    assert member.headers()[-1]["Body"] == "x"
    other = world.node("user2", "A")
    assert world.program("user2").error("init", "M")[0] == 5
    member.ok("topic_unnotify", "T")
    member.payloads(), other.payloads()
    world.superuser().execute("REVOKE team FROM user1")
    assert member.events() == []
    other.ok("evaluate")
    assert member.events() == ["topic_unlisten M T", "disconnect M"]
    assert other.events() == ["topic_unlisten M T", "topic_none_listen T", "disconnect M"]
    assert member.error("init", "M")[0] == 5
    world.superuser().execute("GRANT team TO user1")
    member.ok("init", "M")


def test_a_revoked_member_keeps_the_rights_of_its_own_rules(world: World, member: Program):
    world.rules("user1 M Topic T R 5", "user1 M Topic U RW 5", "team M Topic U RW 50")
    for kind, topic in product(("listen", "notify"), "TU"):
        member.ok(f"topic_{kind}", topic)
    other = world.node("user2", "A")
    member.payloads()
    world.superuser().execute("REVOKE team FROM user1")
    other.ok("evaluate")
    assert member.events() == ["topic_unnotify M T", "topic_none_notify T"]
    assert other.ok("topic_status", "T")["Listeners"] == ["M"]
    member.ok("topic_send", "U", "x" * 9000)
    assert member.headers()[-1]["Dkey"].split(".")[0] == "5"


@pytest.mark.parametrize(("gain", "group", "loss"), LOSSES)
def test_a_role_that_lost_its_inherited_rights_is_disconnected(
    world: World, new_role: Callable[[str], Program], gain: str, group: str, loss: str
):
    program, superuser = new_role("member"), world.superuser()
    new_role("middle")
    superuser.execute(gain)
    world.rules(f"{group} M Topic T RW 50", f"{group} M Queue Q RW 50")
    program.ok("init", "M")
    world.owner.ok("evaluate")
    if "NOINHERIT" in loss and superuser.connection.info.server_version >= 160000:
        loss = "GRANT team TO member WITH INHERIT FALSE, SET FALSE"
    superuser.execute(loss)
    try:
        world.owner.ok("evaluate")
        assert program.events() == ["disconnect M"]
        program.execute("DISCARD ALL")
        assert program.error("init", "M")[0] == 5
        for call in (
            ("publish", "M", "T", "x"), ("push", "M", "Q", "x"), ("read_stream", "M", "T"),
            ("stream_horizons", "M", ["T"]),
        ):  # fmt: skip
            assert program.error(*call)[0] == 2, call
        assert [program.elements(name) for name in ("list_topics", "list_queues")] == [[], []]
    finally:
        if "RENAME" in loss:
            superuser.execute("ALTER ROLE company RENAME TO middle")


def test_a_dropped_role_affects_no_other_role(world: World, new_role: Callable[[str], Program]):
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
