"""A role that no rule names holds up nobody, whatever transactions it leaves open."""

from collections.abc import Iterator

import pytest

from tests.sql.conftest import Program, World
from tests.sql.simultaneous import in_background
from tests.streams.conftest import Stream

# What else than a commit runs what is put off until then, and says so nowhere.
EARLY = "DO $$ BEGIN EXECUTE 'SET CON' || 'STRAINTS ALL IMMEDIATE'; END $$"
LATE = "DECLARE late CURSOR WITH HOLD FOR SELECT pg_advisory_xact_lock(1, 1)"


@pytest.fixture
def due(stream: Stream) -> Stream:
    """A table is to be emptied, by whoever evaluates next; nobody else waits for long."""
    stream.got()
    stream.publish("read")
    stream.got()
    stream.let_be_due()
    stream.wait_for_nobody_for_long()
    return stream


@pytest.fixture(params=["evaluate", "deinit"])
def stranger(world: World, request: pytest.FixtureRequest) -> Iterator[Program]:
    """In a transaction that called what anybody may, and asks for an evaluation at its end."""
    program = world.program("hostile")
    program.connection.execute("BEGIN")
    program.ok(request.param, *(["SUB"] if request.param == "deinit" else []))
    yield program
    program.close()


def assert_works(due: Stream) -> None:
    """What is published is read, and what was read is removed."""
    due.publish("x")
    assert due.got() == ["x"]
    due.tend()
    assert "read" not in due.stored()


def test_an_early_evaluation_holds_up_no_stream(due: Stream, stranger: Program) -> None:
    stranger.connection.execute(EARLY)
    assert_works(due)


def test_a_stuck_commit_holds_up_no_stream(due: Stream, world: World, stranger: Program) -> None:
    due.query("SELECT pg_advisory_lock(1, 1)")
    stranger.connection.execute(LATE)
    with in_background(lambda: stranger.connection.execute("COMMIT")):
        world.wait_for("SELECT pg_blocking_pids(%s) <> '{}'", stranger.pid)
        try:
            assert_works(due)
        finally:
            due.query("SELECT pg_advisory_unlock(1, 1)")


def test_an_open_transaction_keeps_no_node_from_returning(due: Stream, world: World) -> None:
    world.kill(world.node("user2", "SUB"))
    stranger = world.program("hostile")
    stranger.connection.execute("BEGIN")
    stranger.ok("evaluate")
    due.subscriber.ok("init", "SUB")
    stranger.connection.execute("ROLLBACK")
