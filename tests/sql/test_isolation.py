"""Isolation: transactions above READ COMMITTED and read-only ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.sql.conftest import Pair, Program, World

pytestmark = pytest.mark.versions
LEVELS = ["REPEATABLE READ", "SERIALIZABLE"]
every_level = pytest.mark.parametrize("level", LEVELS)
MEMBERS = """
    SELECT count(*) FROM psqlmessages_membership AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name ^@ 'O'
"""


@pytest.fixture
def nodes(world: World) -> Pair:
    world.rules(
        "user1 A Topic T RW 5", "user2 B Topic T RW 5", "user1 A Topic OTHER RW 5",
        "user1 A Rpc B W 5", "user3 VICTIM Topic T RW 5", "user2 B Topic O.* RW 5",
        "user1 A Topic O.* RW 5", "user1 C Topic T R 5", "hostile O Topic O.* O 5",
    )  # fmt: skip
    first, second = world.node("user1", "A", notify="T"), world.node("user2", "B", listen="T")
    first.payloads()
    return first, second


@contextmanager
def snapshot(program: Program, level: str) -> Iterator[None]:
    """Run a transaction that sees the database as it is now; it rolls back where it must."""
    program.execute(f"BEGIN ISOLATION LEVEL {level}")
    program.query("SELECT count(*) FROM messages.topics")
    try:
        yield
        program.execute("COMMIT")
    except (psycopg.errors.SerializationFailure, psycopg.errors.FeatureNotSupported):
        program.execute("ROLLBACK")


@every_level
def test_sends_work_at_every_level(nodes: Pair, level: str):
    with snapshot(nodes[0], level):
        nodes[0].ok("topic_send", "T", "one")
        nodes[0].ok("topic_send_many", "T", ["two", "three"])
        nodes[0].ok("topic_send_as", "A", "T", "four")
        nodes[0].ok("rpc", "B", "TOKEN", "five")
    bodies = [header["Body"] for header in nodes[1].headers() if header["Type"] != "Sys"]
    assert bodies == ["one", "two", "three", "four", "five"]


@every_level
def test_nothing_is_evaluated_above_read_committed(world: World, nodes: Pair, level: str):
    world.kill(world.node("user3", "VICTIM"))
    nodes[0].query("SELECT set_config('messages.housekeeping_at', '', false)")
    for call in ("topic_send", "T", "x"), ("topic_status", "T"), ("topic_unnotify", "T"):
        with snapshot(nodes[0], level):
            nodes[0].ok(*call)
    assert "crash VICTIM" not in nodes[0].events()


@every_level
def test_listening_to_a_changed_topic_raises_40001(world: World, nodes: Pair, level: str):
    with snapshot(nodes[0], level):
        nodes[1].ok("topic_unlisten", "T")
        nodes[1].ok("topic_listen", "T")
        with pytest.raises(psycopg.errors.SerializationFailure):
            nodes[0].ok("topic_listen", "T")
        nodes[0].execute("ROLLBACK")
    nodes[0].ok("topic_send", "T", "x")
    assert nodes[1].headers()[-1]["Body"] == "x"


@every_level
def test_a_snapshot_of_a_lost_rule_makes_no_member(world: World, nodes: Pair, level: str):
    world.rules("hostile O Topic T R 5", "user1 A Topic O2 RW 5")
    observer = world.node("hostile", "O")
    for program, call, loss in (
        (nodes[0], ("topic_listen", "OTHER"), "dest = 'OTHER'"),
        (nodes[0], ("topic_notify", "O2"), "dest = 'O2'"),
        (nodes[0], ("init", "C"), "ident = 'C'"),
        (observer, ("topic_observe", "O.*"), "mode = 'O'"),
    ):
        with snapshot(program, level):
            world.execute(f"DELETE FROM messages.auth WHERE {loss}")
            program.call(*call)
    assert not world.owner.query("SELECT count(*) FROM psqlmessages_client WHERE ident = 'C'")
    assert not world.owner.query("SELECT count(*) FROM psqlmessages_observation")
    assert not world.owner.query(MEMBERS)


@every_level
@pytest.mark.parametrize("older", ["listener", "observer"])
def test_an_observer_sees_a_new_topic(world: World, nodes: Pair, level: str, older: str):
    observer = world.node("hostile", "O")
    calls = [(nodes[1], "topic_listen", "O.NEW"), (observer, "topic_observe", "O.*")]
    if older == "listener":
        calls.reverse()
    with snapshot(calls[1][0], level):
        for program, function, name in calls:
            program.ok(function, name)
    # Who had to roll back tries again.
    for program, function, name in calls:
        program.ok(function, name)
    nodes[0].ok("topic_notify", "O.NEW")
    observer.payloads()
    nodes[0].ok("topic_send", "O.NEW", "x")
    assert [header["Body"] for header in observer.headers()] == ["x"]


@every_level
def test_a_node_newer_than_the_snapshot_ends(world: World, nodes: Pair, level: str):
    program = world.program("user1")
    with snapshot(world.owner, level):
        program.ok("init", "C")
        for kind in "listen", "notify":
            nodes[0].ok(f"topic_{kind}", "OTHER")
        world.execute("DELETE FROM messages.auth WHERE dest = 'OTHER' OR ident = 'C'")
    nodes[1].ok("evaluate")
    assert {"topic_unlisten A OTHER", "topic_unnotify A OTHER"} <= set(nodes[0].events())
    assert not world.owner.query(MEMBERS)
    assert program.events() == ["disconnect C"]


def test_status_calls_tell_the_truth_when_read_only(world: World, nodes: Pair):
    world.kill(world.node("user3", "VICTIM"))
    for level, function, argument in (
        ("READ COMMITTED", "topic_auth", "T"),
        ("READ COMMITTED", "use", "A"),
        ("READ COMMITTED", "audience", '{"Evt":"connect","Ident":"B"}'),
        *((level, "topic_status", "T") for level in ("READ COMMITTED", *LEVELS)),
    ):
        nodes[0].execute(f"BEGIN ISOLATION LEVEL {level} READ ONLY")
        nodes[0].ok(function, argument)
        nodes[0].execute("COMMIT")
    assert "crash VICTIM" not in nodes[0].events()
    world.kill(nodes[1])
    nodes[0].execute("BEGIN READ ONLY")
    assert nodes[0].ok("topic_status", "T")["Listeners"] == []
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        nodes[0].call("topic_send", "T", "x")
