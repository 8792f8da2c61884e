"""A role that no rule names holds up nobody, whatever transactions it leaves open."""

from collections.abc import Iterator

import pytest

from tests.sql.conftest import Program, World
from tests.sql.simultaneous import in_background, wait_until_blocked
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


@pytest.mark.parametrize("end", [EARLY, f"{LATE}; COMMIT"])
def test_an_early_or_stuck_end_holds_up_no_stream(due: Stream, stranger: Program, end: str) -> None:
    due.query("SELECT pg_advisory_lock(1, 1)")
    with in_background(lambda: stranger.execute(end)):
        if end != EARLY:
            wait_until_blocked(due.world, stranger)
        try:
            due.publish("x")
            assert due.got() == ["x"]
            due.tend()
            assert "read" not in due.stored()
        finally:
            due.query("SELECT pg_advisory_unlock(1, 1)")
