"""Transactions that end in two steps, or check at once: evaluation holds up nobody there."""

from collections.abc import Iterator

import pytest

from tests.sql.conftest import Program, World


@pytest.fixture
def caller(world: World) -> Program:
    """A program that may push to Q, which is there, and fails where it waits."""
    world.rules("user1 A Queue Q RW 1", "user1 A Topic T RW 5", "user2 VICTIM Topic T RW 5")
    program = world.program("user1")
    program.ok("push", "A", "Q", "x")
    program.execute("SET lock_timeout = '30s'")
    return program


def push(program: Program) -> None:
    """Push in a session that is to evaluate."""
    program.query("SELECT set_config('messages.evaluated', '', false)")
    program.ok("push", "A", "Q", "x")


@pytest.fixture
def prepared(world: World, caller: Program) -> Iterator[Program]:
    """The program, which has prepared a transaction."""
    caller.execute("BEGIN")
    push(caller)
    caller.execute("PREPARE TRANSACTION 'pushed'")
    yield caller
    world.watcher.execute("ROLLBACK PREPARED 'pushed'")


def test_who_prepared_a_transaction_goes_on_before_that_has_ended(prepared: Program) -> None:
    push(prepared)
    with prepared.connection.transaction():
        push(prepared)
        push(prepared)


CHECKED = "SET CONSTRAINTS ALL IMMEDIATE"
HIDDEN = """
    CREATE FUNCTION pg_temp.check() RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN EXECUTE 'SET CON' || 'STRAINTS ALL IMMEDIATE'; END $$
"""
DONE = """
    DO $$
    BEGIN
        PERFORM messages.push('A', 'Q', 'x');
        COMMIT;
    END
    $$
"""


@pytest.fixture
def returned(world: World, caller: Program) -> Program:
    """A new connection for VICTIM, which listened to T and died; it fails where it waits."""
    caller.query("SELECT set_config('messages.evaluated', '', false)")
    victim = world.node("user2", "VICTIM")
    victim.ok("topic_listen", "T")
    world.kill(victim)
    program = world.program("user2")
    program.execute("SET lock_timeout = '30s'")
    return program


def test_what_is_to_be_checked_at_once_is_evaluated_at_the_commit_or_never(
    caller: Program, returned: Program
) -> None:
    with caller.connection.transaction():
        caller.execute(CHECKED)
        push(caller)
        returned.ok("init", "VICTIM")
        returned.ok("topic_listen", "T")


def test_a_function_that_has_all_checked_at_once_holds_up_nobody(
    caller: Program, returned: Program
) -> None:
    caller.execute(HIDDEN)
    with caller.connection.transaction():
        push(caller)
        caller.query("SELECT pg_temp.check()::text")
        returned.ok("init", "VICTIM")
        returned.ok("topic_listen", "T")


def test_the_commit_of_a_procedure_evaluates_nothing(world: World, caller: Program) -> None:
    caller.query("SELECT set_config('messages.evaluated', '', false)")
    told, victim = world.node("user1", "A"), world.node("user2", "VICTIM")
    victim.ok("topic_listen", "T")
    told.payloads()
    world.kill(victim)
    caller.execute(DONE)
    assert told.events() == []
    # The next call of any session does.
    told.ok("evaluate")
    assert told.events() == ["topic_unlisten VICTIM T", "topic_none_listen T", "crash VICTIM"]
