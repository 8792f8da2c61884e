"""Streams at the same moment: subscribing, ending, expiry, removal, changes of rules."""

import random
import threading
from functools import partial

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.sql.simultaneous import blocked, together
from tests.streams.conftest import Stream

# What a subscription has left before it expires: nothing, about as long as a ping takes, plenty.
LEFT_SECONDS = [0, 0.01, 0.1, 50]


def test_messages_after_a_first_call_always_arrive(stream: Stream, world: World):
    dice, is_over = random.Random(1), threading.Event()  # noqa: S311

    def publish(program: Program) -> None:
        while not is_over.is_set():
            with program.connection.transaction(force_rollback=dice.random() < 0.3):
                program.ok("publish", "PUB", "T", "noise")
                program.query("SELECT pg_sleep(%s)", dice.random() / 100)

    def subscribe() -> None:
        try:
            for _ in range(12):
                found = stream.got()
                stream.publish("mine")
                while "mine" not in found:
                    found += stream.got()
                assert stream.subscriber.ok("unsubscribe", "SUB", "T") == {"Err": "0"}
        finally:
            is_over.set()

    together(subscribe, *(partial(publish, world.program("user1")) for _ in range(3)))


def test_two_first_calls_at_once_are_one_subscription(stream: Stream, world: World):
    other = world.program("user2")
    stream.subscriber.execute("BEGIN")
    stream.got()
    with blocked(world, other, lambda: other.got("SUB", "T")) as second:
        stream.publish("x")
        stream.subscriber.execute("COMMIT")
    assert [*second.result(), *stream.got()] == ["x"]


@pytest.mark.parametrize(
    ("function", "arguments"), [
        ("subscribe", ("SUB", "T", 60)), ("subscribe_from", ("SUB", ["T"], [0], 60)),
        ("publish", ("PUB", "NEW.1", "x")), ("publish_many", ("PUB", "NEW.1", ["x"])),
        ("publish_staged", ("PUB", "NEW.1", "query", 0, [], 0)),
    ],
)  # fmt: skip
def test_a_first_call_is_refused_if_its_rule_is_removed_meanwhile(
    stream: Stream, world: World, function: str, arguments: tuple[object, ...]
):
    program = stream.subscriber if arguments[0] == "SUB" else stream.publisher
    stream.execute("BEGIN")
    stream.execute("DELETE FROM messages.auth WHERE ident || dest = ANY('{SUBT,PUBNEW.*}')")
    with blocked(world, program, lambda: program.error(function, *arguments)) as refusal:
        stream.execute("COMMIT")
    assert (refusal.result()[0], stream.topics()) == (2, ["T"])
    assert stream.query("SELECT count(*) FROM psqlmessages_subscription WHERE is_alive") == 0


def test_messages_committed_before_a_first_call_commits_are_kept(stream: Stream):
    with stream.late("late") as late, stream.subscriber.connection.transaction():
        stream.got()
        late.execute("COMMIT")
        stream.prune()
    assert stream.got() == ["late"]
    stream.subscriber.ok("unsubscribe", "SUB", "T")
    stream.publish("one")
    with stream.subscriber.connection.transaction():
        stream.subscriber.ok("subscribe_from", "SUB", ["T"], [0], 60)
        stream.prune()
    assert "one" in stream.stored()


def test_a_ping_at_expiry_keeps_all_or_tells_the_loss(stream: Stream, world: World):
    other = world.program("user2")
    outcomes = set()
    for turn in range(12):
        stream.got(timeout=60)
        stream.publish(str(turn))
        stream.age(60 - LEFT_SECONDS[turn % len(LEFT_SECONDS)])
        found, _ = together(lambda: other.got("SUB", "T"), lambda: [stream.tend(), stream.prune()])
        is_recovered = stream.state()["Recovered"]
        assert (found, is_recovered) in [([str(turn)], True), ([], False)]
        outcomes.add(is_recovered)
        stream.subscriber.ok("unsubscribe", "SUB", "T")
    assert outcomes == {True, False}


def test_a_reader_in_a_transaction_delays_removal_and_blocks_no_call(stream: Stream):
    stream.got()
    stream.publish("one")
    stream.limit_waits()
    with stream.subscriber.connection.transaction():
        stream.got()
        meanwhile = [stream.tend(), stream.prune(), stream.publish("two") > 0]
    assert (meanwhile, sum([stream.tend() for _ in range(3)])) == ([0, 0, True], 1)
    assert stream.got() == ["two"]


def test_an_open_publisher_delays_the_removal_of_its_table_only(stream: Stream):
    stream.got()
    with stream.late("late"):
        for _ in range(6):
            stream.publish("x")
            stream.tend()
    assert stream.got() == ["late", *["x"] * 6]
    for _ in range(4):
        stream.tend()
    assert stream.stored() == []


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_readers_wait_for_an_emptying_under_way(stream: Stream, world: World, end: str):
    stream.got("SUB")
    stream.got("SUB2")
    stream.publish(*"abcdefghij")
    stream.got("SUB", max_rows=8)
    stream.got("SUB2")
    stream.execute("BEGIN")
    assert stream.prune() == 1
    with blocked(world, stream.subscriber, lambda: stream.got("SUB")) as found:
        stream.execute(end)
    assert found.result() == ["i", "j"]


def test_missed_messages_are_reported_during_their_removal(stream: Stream, world: World):
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    stream.execute("BEGIN")
    assert stream.prune() == 1
    with blocked(world, stream.subscriber, stream.state) as state:
        stream.execute("COMMIT")
    assert state.result()["Recovered"] is False


def test_a_topic_is_not_removed_under_a_publisher_in_its_transaction(stream: Stream):
    stream.publish("x", topic="NEW.1")
    stream.prune()
    stream.publish("y", topic="NEW.1")
    with stream.late("late", topic="NEW.1"):
        stream.got(topic="NEW.1")
        stream.subscriber.ok("unsubscribe", "SUB", "NEW.1")
        for _ in range(3):
            stream.prune()
        stream.got(topic="NEW.1")
    assert stream.got(topic="NEW.1") == ["late"]


def test_an_old_snapshot_publishes_to_no_removed_topic(stream: Stream, world: World):
    stream.publish("x", topic="NEW.1")
    old = world.program("user1")
    old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.query("SELECT count(*) FROM messages.topics")
    for _ in range(3):
        stream.prune()
    stream.publish("y", topic="NEW.1")
    with pytest.raises(psycopg.errors.SerializationFailure):
        old.ok("publish", "PUB", "NEW.1", "z")


@pytest.mark.parametrize(
    ("act", "arguments", "error"), [
        ("topic_listen", ["NEW.1"], "0"), ("publish", ["SUB", "NEW.1", "y"], "0"),
        ("subscribe", ["SUB", "NEW.1", 60], "9"),
    ],
)  # fmt: skip
def test_waiting_for_the_removal_of_a_topic_creates_it_again_or_fails(
    stream: Stream, world: World, act: str, arguments: list[object], error: str
):
    stream.execute("UPDATE messages.auth SET mode = 'RW' WHERE ident = 'SUB'")
    stream.publish("x", topic="NEW.1")
    program = world.node("user2", "SUB2", "SUB")
    stream.execute("BEGIN")
    stream.prune()
    with blocked(world, program, lambda: program.call(act, *arguments)) as answer:
        stream.execute("COMMIT")
    assert answer.result()["Err"] == error


@pytest.mark.parametrize("saved", ["rule first", "removal first"])
def test_a_rule_saves_a_topic_from_its_removal(stream: Stream, world: World, saved: str):
    stream.publish("x", topic="NEW.1")
    saver = world.program()
    insert = (
        "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
        " VALUES ('user3', 'X', 'Topic', 'NEW.1', 'R', 5)"
    )
    if saved == "rule first":
        with saver.connection.transaction():
            saver.execute(insert)
            stream.prune()
    else:
        stream.execute("BEGIN")
        stream.prune()
        with blocked(world, saver, lambda: saver.execute(insert)):
            stream.execute("COMMIT")
    stream.prune()
    assert "NEW.1" in stream.topics()
