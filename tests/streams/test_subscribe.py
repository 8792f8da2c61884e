"""Subscribing: the position moves in the caller's transaction, on any connection, in time."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.sql.conftest import World
from tests.sql.simultaneous import blocked
from tests.streams.conftest import Stream, moment


def test_each_call_returns_messages_since_the_last_one_oldest_first(stream: Stream):
    stream.publish("before the first call")
    stream.publish("of another topic", topic="NEW.1")
    assert (stream.got("SUB"), stream.got("SUB2")) == ([], [])
    stream.publish("one", "two")
    stream.publish("of another topic", topic="NEW.1")
    first = stream.got()
    stream.publish("three")
    assert (first, stream.got(), stream.got()) == (["one", "two"], ["three"], [])
    assert stream.got("SUB2") == ["one", "two", "three"]


def test_max_rows_bounds_what_one_call_returns(stream: Stream):
    stream.got()
    stream.publish(*"abcde")
    assert [stream.got(max_rows=2) for _ in range(4)] == [["a", "b"], ["c", "d"], ["e"], []]
    for max_rows in (1, 2**31 - 1):
        stream.publish("x")
        assert stream.got(max_rows=max_rows) == ["x"]
    stream.publisher.ok("publish_many", "PUB", "T", ["x"] * 1001)
    subscribe = "SELECT count(*) FROM messages.subscribe('SUB', 'T', 60)"
    assert [stream.subscriber.query(subscribe) for _ in range(3)] == [1000, 1, 0]


def test_after_a_rollback_the_same_rows_come_again(stream: Stream):
    connection = stream.subscriber.connection
    stream.got()
    stream.publish("one", "two", "three")
    with connection.transaction(force_rollback=True):
        first = stream.subscriber.read("SUB", "T")
    with connection.transaction():
        stream.got(max_rows=1)
        with connection.transaction(force_rollback=True):
            second = stream.subscriber.read("SUB", "T")
        again = stream.subscriber.read("SUB", "T")
    assert [row.payload for row in first] == ["one", "two", "three"]
    assert (first[1:], stream.got()) == (second, [])
    assert second == again


def test_a_rolled_back_first_call_subscribes_to_nothing(stream: Stream):
    with stream.subscriber.connection.transaction(force_rollback=True):
        stream.got()
    stream.publish("x")
    assert stream.subscriber.error("subscription", "SUB", "T")[0] == 61
    assert stream.got() == []


def test_any_connection_of_the_role_goes_on_where_another_stopped(stream: Stream):
    stream.got()
    stream.publish(*"abc")
    programs = [stream.world.program("user2") for _ in range(4)]
    assert [program.got("SUB", "T", 60, 1) for program in programs] == [["a"], ["b"], ["c"], []]


@pytest.mark.parametrize(("end", "second"), [("COMMIT", "cd"), ("ROLLBACK", "abcd")])
def test_two_readers_double_nothing(stream: Stream, world: World, end: str, second: str):
    stream.got()
    stream.publish(*"abcd")
    other = world.program("user2")
    stream.subscriber.execute("BEGIN")
    assert stream.got(max_rows=2) == ["a", "b"]
    with blocked(world, other, lambda: other.got("SUB", "T")) as found:
        stream.subscriber.execute(end)
    assert found.result() == list(second)


def test_messages_come_within_a_transaction_that_began_before_them(stream: Stream):
    for isolation in ("read committed", "read uncommitted"):
        stream.subscriber.execute(f"SET default_transaction_isolation = '{isolation}'")
        with stream.subscriber.connection.transaction():
            stream.got()
            stream.subscriber.query("SELECT count(*) FROM messages.stream_topics")
            stream.publish("x")
            assert stream.got() == ["x"]


def test_a_timeout_of_a_second_is_over_after_a_second(stream: Stream):
    stream.got(timeout=1)
    began, expires = (moment(stream.state()[name]) for name in ("Since", "Expires"))
    assert expires - began == timedelta(seconds=1)
    stream.publish("too late")
    stream.world.wait_for("SELECT NOT EXISTS (SELECT FROM messages.stream_subscriptions)")
    assert datetime.now(UTC) >= expires
    assert (stream.got(timeout=60), stream.got(timeout=60)) == ([], [])


def test_each_call_of_subscribe_is_a_ping_and_none_of_subscription(stream: Stream):
    stream.got(timeout=100)
    for _ in range(5):
        stream.age(60)
        stream.publish("x")
        assert stream.got(timeout=100) == ["x"]
    stream.age(60)
    assert stream.state()["Expires"] == stream.state()["Expires"]


@pytest.mark.parametrize(("former", "later", "lives"), [(10, 1000, True), (1000, 10, False)])
def test_the_last_timeout_counts(stream: Stream, former: int, later: int, lives: bool):
    stream.got(timeout=former)
    stream.got(timeout=later)
    stream.age(100)
    stream.publish("x")
    assert stream.got(timeout=60) == (["x"] if lives else [])


def test_dead_sessions_stay_dead_when_the_clock_is_set_back(stream: Stream):
    stream.got(timeout=10)
    stream.age(10)
    stream.tend()
    stream.age(-1000)
    stream.publish("x")
    assert (stream.state()["Backlog"], stream.got(timeout=100)) == (0, [])
    stream.publish("y")
    assert stream.got(timeout=100) == ["y"]


def test_unsubscribe_ends_it_and_says_so_once_by_any_rule(stream: Stream):
    stream.got()
    stream.execute("UPDATE messages.auth SET mode = 'W' WHERE ident = 'SUB'")
    assert stream.subscriber.error("subscribe", "SUB", "T", 60)[0] == 3
    assert stream.subscriber.ok("unsubscribe", "SUB", "T") == {"Err": "0"}
    assert stream.subscriber.ok("unsubscribe", "SUB", "T") == {"Err": "0", "Already": 1}
    stream.execute("UPDATE messages.auth SET mode = 'R' WHERE ident = 'SUB'")
    stream.publish("x")
    assert stream.got() == []


def test_a_right_that_returns_finds_the_position_as_it_was(stream: Stream):
    stream.got()
    stream.publish("x")
    stream.execute("DELETE FROM messages.auth WHERE ident = 'SUB' AND dest = 'T'")
    assert stream.subscriber.error("subscribe", "SUB", "T", 60)[0] == 2
    stream.world.rules("user2 SUB Topic T R 10")
    assert stream.got() == ["x"]
