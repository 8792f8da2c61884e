"""A role that no rule names holds up nobody, whatever transactions it leaves open."""

import threading
from collections.abc import Iterator

import pytest

from tests.sql.conftest import PATIENCE_SECONDS, Program, World
from tests.streams.conftest import Stream

# What else than a commit runs what is put off until then, and says so nowhere.
EARLY = "DO $$ BEGIN EXECUTE 'SET CON' || 'STRAINTS ALL IMMEDIATE'; END $$"
LATE = "DECLARE late CURSOR WITH HOLD FOR SELECT pg_advisory_xact_lock(1, 1)"


@pytest.fixture
def due(stream: Stream, world: World) -> Stream:
    """A table is to be emptied, by whoever evaluates next; nobody else waits for long."""
    stream.got()
    stream.publish("read")
    stream.got()
    world.owner.connection.execute(
        "UPDATE messages._stream SET tended_at = 'epoch', switched_at = 'epoch'"
    )
    for program in (stream.subscriber, stream.publisher, world.owner):
        program.connection.execute("SET statement_timeout = '30s'")
    return stream


@pytest.fixture(params=["evaluate", "deinit"])
def stranger(world: World, request: pytest.FixtureRequest) -> Iterator[Program]:
    """In a transaction that called what anybody may, and asks for an evaluation at its end."""
    program = world.program("hostile")
    program.connection.execute("BEGIN")
    program.ok(request.param, *(["SUB"] if request.param == "deinit" else []))
    yield program
    program.close()


def test_a_transaction_that_evaluates_before_its_end_holds_up_no_stream(
    due: Stream, stranger: Program
) -> None:
    stranger.connection.execute(EARLY)
    due.publish("x")
    assert due.got() == ["x"]
    due.tend()
    assert "read" not in due.stored()


def test_a_transaction_that_does_not_come_to_its_end_holds_up_no_stream(
    due: Stream, world: World, stranger: Program
) -> None:
    world.owner.query("SELECT pg_advisory_lock(1, 1)")
    stranger.connection.execute(LATE)
    commit = threading.Thread(target=stranger.connection.execute, args=("COMMIT",))
    commit.start()
    world.wait_for("SELECT pg_blocking_pids(%s) <> '{}'", stranger.pid)
    try:
        due.publish("x")
        assert due.got() == ["x"]
        due.tend()
        assert "read" not in due.stored()
    finally:
        world.owner.query("SELECT pg_advisory_unlock(1, 1)")
        commit.join(PATIENCE_SECONDS)


def test_an_open_transaction_does_not_keep_a_node_from_coming_back(
    due: Stream, world: World
) -> None:
    node = world.node("user2", "SUB")
    world.kill(node)
    stranger = world.program("hostile")
    stranger.connection.execute("BEGIN")
    stranger.ok("evaluate")
    due.subscriber.ok("init", "SUB")
    stranger.connection.execute("ROLLBACK")


@pytest.mark.parametrize("role", ["user1", "psqlmessages"])
def test_a_role_of_a_rule_and_the_owner_do_evaluate(due: Stream, world: World, role: str) -> None:
    program = world.program(None if role == "psqlmessages" else role)
    program.ok("evaluate")
    assert due.stored() == []
