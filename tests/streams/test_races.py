"""Streams at the same moment: subscribing, ending, expiry, removal, changes of rules."""

import random
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.sql.simultaneous import in_background, together, wait_until_blocked
from tests.streams.conftest import Stream

SECONDS, MOST_SECONDS = 2, 60
# So many turns each of those has who do something at once.
ENOUGH = 11
# What a subscription has left before it expires: nothing, about as long as a ping takes, plenty.
LEFT_SECONDS = [0, 0.01, 0.1, 50]


def for_a_while(*acts: Callable[[], object]) -> list[int]:
    """Repeat each act in a thread of its own, for some seconds, and until all were done enough.

    How often each was done.
    """
    begun, times, is_over = monotonic(), [0] * len(acts), threading.Event()

    def is_time() -> bool:
        seconds = monotonic() - begun
        return seconds >= MOST_SECONDS or (seconds >= SECONDS and min(times) >= ENOUGH)

    def repeat(number: int) -> None:
        try:
            while not is_over.is_set() and not is_time():
                acts[number]()
                times[number] += 1
        finally:
            is_over.set()

    together(*(partial(repeat, number) for number in range(len(acts))))
    return times


def test_what_is_published_after_a_first_call_is_got_whoever_else_is_in_flight(
    stream: Stream, world: World
) -> None:
    dice = random.Random(1)  # noqa: S311
    others = [world.program("user1") for _ in range(3)]

    def publish(program: Program) -> None:
        with program.connection.transaction(force_rollback=dice.random() < 0.3):
            program.ok("publish", "PUB", "T", "noise")
            program.query("SELECT pg_sleep(%s)", dice.random() / 100)

    def subscribe() -> None:
        stream.got()
        stream.publish("mine")
        found: list[str] = []
        while "mine" not in found:
            found += stream.got()
        assert stream.subscriber.ok("unsubscribe", "SUB", "T") == {"Err": "0"}

    done = for_a_while(subscribe, *(partial(publish, program) for program in others))
    assert min(done) >= ENOUGH


def test_subscribing_and_unsubscribing_at_once_neither_deadlock_nor_miscount(
    stream: Stream, world: World
) -> None:
    programs = [world.program("user2") for _ in range(4)]

    def come_and_go(program: Program) -> None:
        program.got("SUB", "T")
        program.got("SUB2", "T")
        program.ok("unsubscribe", "SUB", "T")

    def register(program: Program) -> None:
        program.call("connect_stream", "SUB")
        program.ok("deinit", "SUB")

    for_a_while(
        *(partial(come_and_go, program) for program in programs[:3]), lambda: register(programs[3])
    )
    counted = world.owner.query("SELECT subscriptions FROM psqlmessages_topic WHERE name = 'T'")
    alive = world.owner.query("SELECT count(*) FROM psqlmessages_subscription WHERE is_alive")
    assert counted == alive


def test_two_first_calls_at_once_are_one_subscription(stream: Stream, world: World) -> None:
    programs = [world.program("user2") for _ in range(3)]
    for turn in range(20):
        together(*(lambda p=p: p.got("SUB", "T") for p in programs))
        stream.publish(str(turn))
        assert stream.got() == [str(turn)]
        stream.subscriber.ok("unsubscribe", "SUB", "T")


def test_the_second_of_two_first_calls_does_not_begin_anew(stream: Stream, world: World) -> None:
    other = world.program("user2")
    stream.subscriber.connection.execute("BEGIN")
    stream.got()
    with in_background(lambda: other.got("SUB", "T")) as second:
        wait_until_blocked(world, other)
        stream.publish("x")
        stream.subscriber.connection.execute("COMMIT")
    assert [*second.result(), *stream.got()] == ["x"]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [("subscribe", ("SUB", "T", 60)), ("subscribe_from", ("SUB", ["T"], [0], 60))],
)
def test_a_first_call_whose_rule_goes_away_meanwhile_is_refused(
    stream: Stream, world: World, function: str, arguments: tuple[object, ...]
) -> None:
    world.owner.connection.execute("BEGIN")
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'SUB' AND dest = 'T'")
    with in_background(lambda: stream.subscriber.error(function, *arguments)) as refusal:
        wait_until_blocked(world, stream.subscriber)
        world.owner.connection.execute("COMMIT")
    assert refusal.result()[0] == 2
    assert world.owner.query("SELECT count(*) FROM psqlmessages_subscription WHERE is_alive") == 0


def test_what_is_committed_while_a_first_call_is_not_is_not_removed(
    stream: Stream, world: World
) -> None:
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "late")
    with stream.subscriber.connection.transaction():
        stream.got()
        late.connection.execute("COMMIT")
        stream.prune()
    assert stream.got() == ["late"]


def test_a_ping_and_the_expiry_at_once_keep_all_or_tell_that_it_was_missed(
    stream: Stream, world: World
) -> None:
    other = world.program("user2")
    outcomes = set()
    for turn in range(40):
        stream.got(timeout=60)
        stream.publish(str(turn))
        stream.age(60 - LEFT_SECONDS[turn % len(LEFT_SECONDS)])
        found, _ = together(
            lambda: other.got("SUB", "T", 60), lambda: [stream.tend(), stream.prune()]
        )
        is_recovered = stream.state()["Recovered"]
        assert (found, is_recovered) in [([str(turn)], True), ([], False)]
        outcomes.add(is_recovered)
        stream.subscriber.ok("unsubscribe", "SUB", "T")
    assert outcomes == {True, False}


def test_rules_are_saved_while_readers_and_publishers_are_busy(
    stream: Stream, world: World
) -> None:
    saver = world.program()
    stream.got()
    received: list[str] = []

    def save() -> None:
        saver.connection.execute(
            "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
            " VALUES ('user2', 'SUB', 'Topic', 'T*', 'R', 5)"
        )
        saver.connection.execute("DELETE FROM messages.auth WHERE dest = 'T*'")

    saves, reads, publishes = for_a_while(
        save, lambda: received.extend(stream.got()), lambda: stream.publish("x")
    )
    received += stream.got()
    print(f"\n{saves} saves, {reads} reads, {publishes} publishes")
    assert (len(received), min(saves, reads, publishes) >= ENOUGH) == (publishes, True)


def test_a_reader_in_its_transaction_delays_removal_and_blocks_nobody(
    stream: Stream, world: World
) -> None:
    stream.got()
    stream.publish("one")
    with stream.subscriber.connection.transaction():
        stream.got()
        stream.publisher.connection.execute("SET statement_timeout = '30s'")
        world.owner.connection.execute("SET statement_timeout = '30s'")
        meanwhile = [stream.tend(), stream.prune(), stream.publish("two") > 0]
    emptied = [stream.tend() for _ in range(3)]
    assert (meanwhile, sum(emptied)) == ([0, 0, True], 1)
    assert stream.got() == ["two"]


def test_a_publisher_in_its_transaction_delays_the_removal_of_its_table_only(
    stream: Stream, world: World
) -> None:
    stream.got()
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "late")
    for _ in range(6):
        stream.publish("x")
        stream.tend()
    late.connection.execute("COMMIT")
    assert stream.got() == ["late", *["x"] * 6]
    for _ in range(4):
        stream.tend()
    assert stream.stored() == []


def test_readers_wait_for_an_emptying_under_way_and_miss_nothing(
    stream: Stream, world: World
) -> None:
    stream.got("SUB")
    stream.got("SUB2")
    stream.publish(*"abcdefghij")
    stream.got("SUB", max_rows=8)
    stream.got("SUB2")
    world.owner.connection.execute("BEGIN")
    assert stream.prune() == 1
    with in_background(lambda: stream.got("SUB")) as found:
        wait_until_blocked(world, stream.subscriber)
        world.owner.connection.execute("COMMIT")
    assert found.result() == ["i", "j"]


def test_what_was_missed_is_told_while_it_is_being_removed(stream: Stream, world: World) -> None:
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    world.owner.connection.execute("BEGIN")
    assert stream.prune() == 1
    with in_background(stream.state) as state:
        wait_until_blocked(world, stream.subscriber)
        world.owner.connection.execute("COMMIT")
    assert state.result()["Recovered"] is False


def test_an_emptying_that_is_rolled_back_takes_nothing(stream: Stream, world: World) -> None:
    stream.got("SUB")
    stream.publish(*"abcdefghij")
    stream.got("SUB", max_rows=8)
    with world.owner.connection.transaction(force_rollback=True):
        assert stream.prune() == 1
    assert stream.got("SUB") == ["i", "j"]


def test_who_reads_and_publishes_in_one_transaction_may_empty_at_its_end(
    stream: Stream, world: World
) -> None:
    world.owner.connection.execute("UPDATE messages.auth SET mode = 'RW' WHERE ident = 'SUB'")
    stream.got()
    stream.publish("one")
    for _ in range(4):
        world.owner.connection.execute(
            "UPDATE messages._stream SET tended_at = 'epoch', switched_at = 'epoch'"
        )
        with stream.subscriber.connection.transaction():
            stream.subscriber.query("SELECT set_config('messages.evaluated', '', false)")
            [payload] = stream.got()
            stream.subscriber.ok("publish", "SUB", "T", payload)
    assert len(stream.stored()) < 3
    assert stream.got() == ["one"]


def test_an_owners_cursor_on_the_table_only_delays_its_removal(
    stream: Stream, world: World
) -> None:
    stream.publish("x")
    stream.prune()
    stream.publish("y")
    with world.owner.connection.transaction():
        world.owner.connection.execute(
            "DECLARE rows CURSOR FOR SELECT * FROM psqlmessages_streammessage"
        )
        world.owner.connection.execute("FETCH 1 FROM rows")
        assert stream.prune() == 0
    assert stream.prune() == 1


def test_messages_of_a_topic_that_comes_and_goes_are_never_lost(
    stream: Stream, world: World
) -> None:
    owner = world.program()
    others = [world.program("user1") for _ in range(2)]

    def follow() -> None:
        stream.publish("makes the topic", topic="NEW.1")
        try:
            stream.got(topic="NEW.1")
        except psycopg.Error as error:
            # It has gone again meanwhile.
            assert error.sqlstate == "PM009"  # noqa: PT017
            return
        stream.publish("mine", topic="NEW.1")
        found: list[str] = []
        while "mine" not in found:
            found += stream.got(topic="NEW.1")
        stream.subscriber.ok("unsubscribe", "SUB", "NEW.1")

    def publish(program: Program) -> None:
        program.ok("publish", "PUB", "NEW.1", "x")

    def join(program: Program) -> None:
        program.ok("init", "PUB")
        program.ok("topic_notify", "NEW.1")
        program.ok("deinit", "PUB")

    done = for_a_while(
        follow,
        lambda: owner.query("SELECT messages._prune_streams()"),
        lambda: publish(others[0]),
        lambda: join(others[1]),
    )
    assert min(done) >= ENOUGH


def test_a_topic_is_not_removed_under_a_publisher_in_its_transaction(
    stream: Stream, world: World
) -> None:
    stream.publish("x", topic="NEW.1")
    stream.prune()
    stream.publish("y", topic="NEW.1")
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "NEW.1", "late")
    stream.got(topic="NEW.1")
    stream.subscriber.ok("unsubscribe", "SUB", "NEW.1")
    for _ in range(3):
        stream.prune()
    stream.got(topic="NEW.1")
    late.connection.execute("COMMIT")
    assert stream.got(topic="NEW.1") == ["late"]


def test_an_old_snapshot_does_not_publish_to_a_topic_that_went(
    stream: Stream, world: World
) -> None:
    stream.publish("x", topic="NEW.1")
    old = world.program("user1")
    old.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.query("SELECT count(*) FROM messages.topics")
    for _ in range(3):
        stream.prune()
    stream.publish("y", topic="NEW.1")
    with pytest.raises(psycopg.errors.SerializationFailure):
        old.ok("publish", "PUB", "NEW.1", "z")


@pytest.mark.parametrize("act", ["topic_listen", "publish", "subscribe"])
def test_who_waits_for_the_removal_of_a_topic_makes_it_anew_or_is_told(
    stream: Stream, world: World, act: str
) -> None:
    world.owner.connection.execute("UPDATE messages.auth SET mode = 'RW' WHERE ident = 'SUB'")
    stream.publish("x", topic="NEW.1")
    program = world.node("user2", "SUB2")
    program.ok("init", "SUB")
    arguments = {"topic_listen": ["NEW.1"], "publish": ["SUB", "NEW.1", "y"]}.get(
        act, ["SUB", "NEW.1", 60]
    )
    world.owner.connection.execute("BEGIN")
    stream.prune()
    with in_background(lambda: program.call(act, *arguments)) as answer:
        wait_until_blocked(world, program)
        world.owner.connection.execute("COMMIT")
    assert answer.result()["Err"] == ("9" if act == "subscribe" else "0")


@pytest.mark.parametrize("saved", ["rule first", "removal first"])
def test_a_rule_that_names_a_topic_and_its_removal_at_once_leave_the_topic(
    stream: Stream, world: World, saved: str
) -> None:
    stream.publish("x", topic="NEW.1")
    saver = world.program()
    insert = (
        "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
        " VALUES ('user3', 'X', 'Topic', 'NEW.1', 'R', 5)"
    )
    if saved == "rule first":
        with saver.connection.transaction():
            saver.connection.execute(insert)
            stream.prune()
    else:
        world.owner.connection.execute("BEGIN")
        stream.prune()
        with in_background(lambda: saver.connection.execute(insert)):
            wait_until_blocked(world, saver)
            world.owner.connection.execute("COMMIT")
    stream.prune()
    assert world.owner.query("SELECT count(*) FROM psqlmessages_topic WHERE name = 'NEW.1'") == 1
