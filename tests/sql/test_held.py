"""Evaluation and care while somebody holds what they need: the rest is done, and nobody waits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from psqlmessages.scripts import SCRIPTS
from tests.sql.conftest import Program, World

pytestmark = pytest.mark.versions
RULES = (
    "user1 A Topic T RW 10",
    "user2 B Topic T RW 10",
    "user2 C Topic T RW 10",
    "user1 A Topic PARCELS.* W 10",
    "user1 A Queue Q RW 1",
    "user2 B Queue Q R 1",
    "user2 VICTIM Topic T RW 5",
)
DUE = "UPDATE messages._{} SET tended_at = 'epoch'"
IS_TENDED = "SELECT tended_at > 'epoch' FROM messages._{}"


@pytest.fixture
def world(world: World) -> World:
    """A world with rules, whose owner does not wait."""
    world.rules(*RULES)
    world.execute("SET lock_timeout = '30s'")
    return world


@contextmanager
def held(world: World, statement: str) -> Iterator[None]:
    """Within, the owner sits in a transaction that has done something."""
    holder = world.program()
    with holder.connection.transaction(force_rollback=True):
        holder.execute(statement)
        yield


def caller(world: World) -> Program:
    """A program that has not evaluated yet, and fails where it waits."""
    program = world.program("user1")
    program.execute("SET lock_timeout = '30s'")
    return program


def listeners(world: World) -> list[Program]:
    """A, B and C, which listen to T; what they were told is read."""
    nodes = [
        world.node(role, ident) for role, ident in (("user1", "A"), ("user2", "B"), ("user2", "C"))
    ]
    for node in nodes:
        node.ok("topic_listen", "T")
    for node in nodes:
        node.payloads()
    return nodes


@pytest.mark.parametrize(
    "call", [("evaluate",), ("push", "A", "Q", "x")], ids=["evaluate", "at a commit"]
)
def test_crashes_are_told_while_a_rule_of_another_dead_node_is_being_changed(
    world: World, call: tuple[str, ...]
) -> None:
    told, changed, other = listeners(world)
    with held(world, "UPDATE messages.auth SET timeout = 20 WHERE ident = 'B'"):
        world.kill(changed)
        world.kill(other)
        caller(world).ok(*call)
        assert told.events() == ["topic_unlisten C T", "crash C"]
    caller(world).ok(*call)
    assert told.events() == ["topic_unlisten B T", "crash B"]


def test_a_name_returns_while_a_topic_of_another_node_of_its_dead_session_is_held(
    world: World,
) -> None:
    a = world.node("user1", "A")
    world.rules("user1 D Topic T RW 10")
    a.ok("init", "D")
    a.ok("topic_listen", "T")
    with held(world, "SELECT FROM psqlmessages_topic WHERE name = 'T' FOR UPDATE"):
        world.kill(a)
        back = caller(world)
        back.ok("init", "A")
        idents = "SELECT array_agg(ident ORDER BY ident) FROM psqlmessages_client"
        assert world.owner.query(idents) == ["A", "D"]
    back.ok("init", "D")
    assert world.owner.query("SELECT count(*) FROM psqlmessages_membership") == 0


def test_evaluate_leaves_for_later_what_a_locked_table_is_needed_for(world: World) -> None:
    told, dying, _ = listeners(world)
    with held(world, "LOCK TABLE psqlmessages_observation IN ACCESS EXCLUSIVE MODE"):
        world.kill(dying)
        assert caller(world).ok("evaluate")["Events"] == 0
    assert caller(world).ok("evaluate")["Events"] == 2
    assert told.events() == ["topic_unlisten B T", "crash B"]


@pytest.mark.parametrize(
    "call", [("evaluate",), ("push", "A", "Q", "x")], ids=["evaluate", "at a commit"]
)
def test_crashes_are_told_while_a_queue_is_held_and_role_memberships_changed(
    world: World, call: tuple[str, ...]
) -> None:
    told, dying, waiting = listeners(world)
    waiting.ok("queue_listen", "B", "Q")
    caller(world).ok("evaluate")
    world.superuser().execute("GRANT team TO user2")
    try:
        with held(world, "UPDATE psqlmessages_queue SET key_timeout = 60"):
            world.kill(dying)
            caller(world).ok(*call)
            assert told.events() == ["topic_unlisten B T", "crash B"]
        caller(world).ok("evaluate")
        assert '"Evt":"moved"' in "".join(waiting.payloads())
    finally:
        world.superuser().execute("REVOKE team FROM user2")


def test_the_end_of_a_topic_holds_up_no_commit_while_memberships_are_locked(world: World) -> None:
    # Else the commit that publishes may remove what nobody needs, and the topic.
    world.execute("UPDATE messages._stream SET tended_at = 'infinity'")
    caller(world).ok("publish", "A", "PARCELS.1", "x")
    world.execute("TRUNCATE psqlmessages_streammessage")
    for table in "stream", "queues":
        world.execute(DUE.format(table))
    world.execute("UPDATE messages._stream SET cleared_at = 'epoch'")
    is_there = "SELECT EXISTS (SELECT FROM psqlmessages_topic WHERE name = 'PARCELS.1')"
    with held(world, "LOCK TABLE psqlmessages_membership IN EXCLUSIVE MODE"):
        caller(world).ok("push", "A", "Q", "x")
        assert world.owner.query(is_there)
    world.execute("UPDATE messages._stream SET cleared_at = 'epoch', tended_at = 'epoch'")
    caller(world).ok("push", "A", "Q", "x")
    assert not world.owner.query(is_there)


def test_what_is_locked_holds_up_the_care_of_nothing_else(world: World) -> None:
    caller(world).ok("push", "A", "Q", "x")
    for locked, put_off, tended in (
        ("elementkey", "queues", "stream"), ("streammessage", "stream", "queues"),
    ):  # fmt: skip
        for table in put_off, tended:
            world.execute(DUE.format(table))
        with held(world, f"LOCK TABLE psqlmessages_{locked} IN ACCESS EXCLUSIVE MODE"):
            caller(world).ok("push", "A", "Q", "x")
            assert not world.owner.query(IS_TENDED.format(put_off))
            assert world.owner.query(IS_TENDED.format(tended))


def test_an_upgrade_that_waits_lets_calls_go_on_however_late_deadlocks_are_looked_for(
    world: World,
) -> None:
    upgrade = world.superuser()
    upgrade.execute("SET deadlock_timeout = '1min'")
    locks = (SCRIPTS / "lock_tables.sql").read_text()
    with held(world, "LOCK TABLE messages._evaluation IN ACCESS SHARE MODE"):
        pid = upgrade.pid
        upgrade.connection.pgconn.send_query(locks.encode())
        world.wait_for("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", pid)
        caller(world).ok("push", "A", "Q", "x")
        world.watcher.query("SELECT pg_terminate_backend(%s, 60000)", pid)


def test_the_channel_of_a_queue_that_is_being_paused_moves_when_that_is_over(world: World) -> None:
    caller(world).ok("push", "A", "Q", "x")
    waiting, pausing = world.program("user2"), world.program("user1")
    waiting.ok("queue_listen", "B", "Q")
    pausing.execute("BEGIN")
    pausing.ok("pause", "A", "Q")
    world.execute("DELETE FROM messages.auth WHERE ident = 'B' AND type = 'Queue'")
    assert waiting.payloads() == []
    pausing.execute("COMMIT")
    waiting.payloads()
    # Once for the row that was held, once as older transactions have ended.
    for _ in range(2):
        caller(world).ok("evaluate")
    assert '"Evt":"moved"' in "".join(waiting.payloads())
    pausing.ok("resume", "A", "Q")
    pausing.ok("push", "A", "Q", "x")
    assert waiting.payloads() == []


def test_who_may_not_use_a_queue_cannot_hold_up_the_saving_of_rules(world: World) -> None:
    caller(world).ok("push", "A", "Q", "x")
    hostile = world.program("hostile")
    hostile.execute("BEGIN")
    for function in "queue_listen", "pause", "resume":
        hostile.error(function, "A", "Q")
    world.rules("user1 A Topic NEW R 5")


def test_a_deadlock_of_what_a_commit_looks_after_does_not_fail_it(world: World) -> None:
    caller(world).ok("push", "A", "Q", "x")
    committing, holder = world.superuser(), world.program()
    committing.execute("SET deadlock_timeout = '1ms'")
    world.execute(DUE.format("queues"))
    with committing.connection.transaction():
        committing.execute("UPDATE psqlmessages_queue SET is_paused = true")
        committing.ok("push", "A", "Q", "y")
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE psqlmessages_elementkey IN ACCESS EXCLUSIVE MODE")
        holder.connection.pgconn.send_query(b"UPDATE psqlmessages_queue SET is_paused = false")
        world.wait_for(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", holder.pid
        )
    holder.connection.close()
    assert world.owner.query("SELECT count(*) FROM psqlmessages_element") == 2


# Transactions that end in two steps, or have their constraints checked before they end.
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


def push(program: Program) -> None:
    """Push in a session that is to evaluate."""
    program.query("SELECT set_config('messages.evaluated', '', false)")
    program.ok("push", "A", "Q", "x")


def test_who_prepared_a_transaction_goes_on_before_that_has_ended(world: World) -> None:
    program = caller(world)
    program.ok("push", "A", "Q", "x")
    program.execute("BEGIN")
    push(program)
    program.execute("PREPARE TRANSACTION 'pushed'")
    try:
        push(program)
        with program.connection.transaction():
            push(program)
            push(program)
    finally:
        world.watcher.execute("ROLLBACK PREPARED 'pushed'")


@pytest.mark.parametrize("is_hidden", [False, True])
def test_what_is_to_be_checked_before_the_end_of_a_transaction_holds_up_nobody(
    world: World, is_hidden: bool
) -> None:
    program = caller(world)
    program.ok("push", "A", "Q", "x")
    program.query("SELECT set_config('messages.evaluated', '', false)")
    victim = world.node("user2", "VICTIM")
    victim.ok("topic_listen", "T")
    world.kill(victim)
    returned = world.program("user2")
    returned.execute("SET lock_timeout = '30s'")
    program.execute(HIDDEN)
    with program.connection.transaction():
        if not is_hidden:
            program.execute(CHECKED)
        push(program)
        if is_hidden:
            program.query("SELECT pg_temp.check()::text")
        returned.ok("init", "VICTIM")
        returned.ok("topic_listen", "T")


def test_the_commit_of_a_procedure_evaluates_nothing(world: World) -> None:
    program = caller(world)
    told, victim = world.node("user1", "A"), world.node("user2", "VICTIM")
    victim.ok("topic_listen", "T")
    told.payloads()
    world.kill(victim)
    program.execute(DONE)
    assert told.events() == []
    # The next call of any session does.
    told.ok("evaluate")
    assert told.events() == ["topic_unlisten VICTIM T", "topic_none_listen T", "crash VICTIM"]
