"""Evaluation and care while somebody holds what they need: the rest is done, and nobody waits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.sql.conftest import Program, World
from tests.sql.simultaneous import wait_until_blocked

pytestmark = pytest.mark.versions
RULES = (
    "user1 A Topic T RW 10", "user2 B Topic T RW 10", "user2 C Topic T RW 10",
    "user1 A Topic PARCELS.* W 10", "user1 A Queue Q RW 1", "user2 B Queue Q R 1",
    "user2 VICTIM Topic T RW 5",
)  # fmt: skip
PUSH = "push", "A", "Q", "x"
DUE = "UPDATE messages._{} SET maintained_at = 'epoch'"
IS_TENDED = "SELECT maintained_at > 'epoch' FROM messages._{}"


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


@pytest.mark.parametrize("call", [("evaluate",), PUSH])
@pytest.mark.parametrize(
    ("act", "later"), [
        ("UPDATE messages.auth SET timeout = 20 WHERE ident = 'B'", "B"),
        ("UPDATE psqlmessages_queue SET key_timeout = 60", ""),
        ("LOCK TABLE psqlmessages_observation IN ACCESS EXCLUSIVE MODE", "BC"),
        ("SELECT FROM psqlmessages_topic WHERE name = 'T' FOR UPDATE", "BC"),
    ],
)  # fmt: skip
def test_crashes_with_locks_come_later(world: World, call: tuple[str, ...], act: str, later: str):
    roles = {"A": "user1", "B": "user2", "C": "user2"}
    told, *dying = [world.node(role, ident, listen="T") for ident, role in roles.items()]
    world.forget()
    caller(world).ok(*PUSH)
    with held(world, act):
        for node in dying:
            world.kill(node)
        caller(world).ok(*call)
        assert sorted(told.events()) == sorted(ends_of("".join({*"BC"} - {*later})))
    caller(world).ok(*call)
    assert sorted(told.events()) == sorted(ends_of(later))


def ends_of(idents: str) -> list[str]:
    return [event for ident in idents for event in (f"topic_unlisten {ident} T", f"crash {ident}")]


def test_a_name_returns_while_a_topic_of_its_dead_session_is_held(world: World):
    world.rules("user1 D Topic T RW 10")
    a = world.node("user1", "A", "D", listen="T")
    with held(world, "SELECT FROM psqlmessages_topic WHERE name = 'T' FOR UPDATE"):
        world.kill(a)
        back = caller(world)
        back.ok("init", "A")
        idents = "SELECT array_agg(ident ORDER BY ident) FROM psqlmessages_client"
        assert world.owner.query(idents) == ["A", "D"]
    back.ok("init", "D")
    assert world.owner.query("SELECT count(*) FROM psqlmessages_membership") == 0


def test_the_end_of_a_topic_holds_up_no_commit_while_memberships_are_locked(world: World):
    # Else the commit that publishes may remove what nobody needs, and the topic.
    world.execute("UPDATE messages._stream SET maintained_at = 'infinity'")
    caller(world).ok("publish", "A", "PARCELS.1", "x")
    world.execute("TRUNCATE psqlmessages_streammessage")
    for table in "stream", "queues":
        world.execute(DUE.format(table))
    world.execute("UPDATE messages._stream SET garbage_removed_at = 'epoch'")
    is_there = "SELECT EXISTS (SELECT FROM psqlmessages_topic WHERE name = 'PARCELS.1')"
    with held(world, "LOCK TABLE psqlmessages_membership IN EXCLUSIVE MODE"):
        caller(world).ok(*PUSH)
        assert world.owner.query(is_there)
    world.execute(DUE.format("stream") + ", garbage_removed_at = 'epoch'")
    caller(world).ok(*PUSH)
    assert not world.owner.query(is_there)


def test_a_locked_row_delays_no_other_housekeeping(world: World):
    caller(world).ok(*PUSH)
    for locked, put_off, tended in (
        ("elementkey", "queues", "stream"), ("streammessage", "stream", "queues"),
    ):  # fmt: skip
        for table in put_off, tended:
            world.execute(DUE.format(table))
        with held(world, f"LOCK TABLE psqlmessages_{locked} IN ACCESS EXCLUSIVE MODE"):
            caller(world).ok(*PUSH)
            assert not world.owner.query(IS_TENDED.format(put_off))
            assert world.owner.query(IS_TENDED.format(tended))


@pytest.mark.parametrize("mode", ["", "ISOLATION LEVEL REPEATABLE READ", "READ ONLY"])
def test_calls_in_an_open_transaction_neither_hide_work_nor_hold_locks(world: World, mode: str):
    caller(world).ok(*PUSH, None, None, None, None, 0, "key")
    world.execute("UPDATE messages._queues SET maintained_at = now() - interval '5 s'")
    holder = world.program("user2")
    holder.execute(f"BEGIN {mode}")
    # Its snapshot.
    assert holder.query("SELECT count(*) FROM messages.list_queues()") == 1
    world.execute("UPDATE psqlmessages_elementkey SET expires_at = now()")
    holder.ok("evaluate")
    locks = "SELECT count(*) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation"
    tables = "c.relname ~ '^psqlmessages_(streammessage|body|session)'"
    assert world.owner.query(f"{locks} WHERE l.pid = %s AND {tables}", holder.pid) == 0
    caller(world).ok("evaluate")
    assert world.owner.query("SELECT count(*) FROM psqlmessages_elementkey") == 0


def test_the_channel_of_a_queue_that_is_being_paused_moves_when_that_is_over(world: World):
    caller(world).ok(*PUSH)
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
    pausing.ok(*PUSH)
    assert waiting.payloads() == []


def test_a_node_without_rights_cannot_block_the_saving_of_rules(world: World):
    caller(world).ok(*PUSH)
    hostile = world.program("hostile")
    hostile.execute("BEGIN")
    for function in "queue_listen", "pause", "resume":
        hostile.error(function, "A", "Q")
    for function in "init", "deinit":
        hostile.call(function, "A")
    for kind in "listen", "unlisten", "observe", "unobserve", "status":
        hostile.error(f"topic_{kind}", "T")
    world.rules("user1 A Topic NEW R 5")


def test_a_deadlock_in_housekeeping_does_not_fail_the_commit(world: World):
    caller(world).ok(*PUSH)
    committing, holder = world.superuser(), world.program()
    committing.execute("SET deadlock_timeout = '1ms'")
    world.execute(DUE.format("queues"))
    with committing.connection.transaction():
        committing.execute("UPDATE psqlmessages_queue SET is_paused = true")
        committing.ok("push", "A", "Q", "y")
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE psqlmessages_elementkey IN ACCESS EXCLUSIVE MODE")
        holder.connection.pgconn.send_query(b"UPDATE psqlmessages_queue SET is_paused = false")
        wait_until_blocked(world, holder)
    holder.connection.close()
    assert world.owner.query("SELECT count(*) FROM psqlmessages_element") == 2


# Transactions that end in two steps, or have their constraints checked before they end.
CHECKED = "SET CONSTRAINTS ALL IMMEDIATE"
HIDDEN = """
    CREATE FUNCTION pg_temp.check() RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN EXECUTE 'SET CON' || 'STRAINTS ALL IMMEDIATE'; END $$
"""
PUSH_TO_EVALUATE = """
    SELECT messages.push('A', 'Q', 'x') FROM set_config('messages.housekeeping_at', '', false)
"""


def test_a_session_continues_before_its_prepared_transaction_ends(world: World):
    program = caller(world)
    program.ok(*PUSH)
    program.execute("BEGIN")
    program.execute(PUSH_TO_EVALUATE)
    program.execute("PREPARE TRANSACTION 'pushed'")
    try:
        program.execute(PUSH_TO_EVALUATE)
        with program.connection.transaction():
            for _ in range(2):
                program.execute(PUSH_TO_EVALUATE)
    finally:
        world.watcher.execute("ROLLBACK PREPARED 'pushed'")


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_check_before_the_transaction_ends_delays_nobody(world: World, is_hidden: bool):
    program = caller(world)
    program.ok(*PUSH)
    program.query("SELECT set_config('messages.housekeeping_at', '', false)")
    world.kill(world.node("user2", "VICTIM", listen="T"))
    returned = world.program("user2")
    returned.execute("SET lock_timeout = '30s'")
    program.execute(HIDDEN)
    with program.connection.transaction():
        if not is_hidden:
            program.execute(CHECKED)
        program.execute(PUSH_TO_EVALUATE)
        if is_hidden:
            program.query("SELECT pg_temp.check()::text")
        returned.ok("init", "VICTIM")
        returned.ok("topic_listen", "T")


def test_the_commit_of_a_procedure_evaluates_nothing(world: World):
    told, victim = world.node("user1", "A"), world.node("user2", "VICTIM", listen="T")
    told.payloads()
    world.kill(victim)
    caller(world).execute("DO $$ BEGIN PERFORM messages.push('A', 'Q', 'x'); COMMIT; END $$")
    assert told.events() == []
    # The next call of any session does.
    told.ok("evaluate")
    assert told.events() == ["topic_unlisten VICTIM T", "topic_none_listen T", "crash VICTIM"]
