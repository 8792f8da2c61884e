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
    program.connection.execute("SET lock_timeout = '5s'")
    return program


def push(program: Program) -> None:
    """Push in a session that is to evaluate."""
    program.query("SELECT set_config('messages.evaluated', '', false)")
    program.ok("push", "A", "Q", "x")


@pytest.fixture
def prepared(world: World, caller: Program) -> Iterator[Program]:
    """The program, which has prepared a transaction."""
    caller.connection.execute("BEGIN")
    push(caller)
    caller.connection.execute("PREPARE TRANSACTION 'pushed'")
    yield caller
    world.watcher.connection.execute("ROLLBACK PREPARED 'pushed'")


def test_who_prepared_a_transaction_goes_on_before_that_has_ended(prepared: Program) -> None:
    push(prepared)
    with prepared.connection.transaction():
        push(prepared)
        push(prepared)
