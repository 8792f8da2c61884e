"""Positions of a reader's own: horizons, subscriptions put there, the view of what is kept."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import Stream

READ = "SELECT array_agg(body ORDER BY id) FROM messages.stored WHERE topic = %s AND id > %s"


def horizons(program: Program, *topics: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Call stream_horizons as SUB: for each topic what it says."""
    after = json.dumps(options["after"]) if "after" in options else None
    arguments = "SUB", list(topics), after, options.get("max_rows")
    told = program.ok("stream_horizons", *arguments)["Topics"]
    return {each["Topic"]: each for each in told}


def horizon(program: Program, **options: Any) -> int:
    """The horizon of T."""
    return int(horizons(program, "T", **options)["T"]["Horizon"])


def test_the_horizon_is_the_last_message_that_is_safe_to_read(stream: Stream) -> None:
    assert horizon(stream.subscriber) == 0
    last = stream.publish("one", "two")
    assert horizons(stream.subscriber, "T")["T"] == {
        "Topic": "T", "Removed": 0, "Horizon": last, "Newest": last,
    }  # fmt: skip


def test_a_publisher_that_has_not_committed_holds_the_horizon_of_its_topic_alone(
    stream: Stream,
) -> None:
    stream.world.rules("user1 PUB Topic U W 10", "user2 SUB Topic U R 10")
    first = stream.publish("first")
    with stream.publisher.connection.transaction():
        late = stream.publish("late")
        second = stream.world.program("user1")
        newest = second.ok("publish", "PUB", "T", "second")["Id"]
        other = second.ok("publish", "PUB", "U", "other")["Id"]
        told = horizons(stream.subscriber, "T", "U")
        assert (told["T"]["Horizon"], told["T"]["Newest"]) == (first, newest)
        assert told["U"]["Horizon"] == other
    assert first < late < newest == horizon(stream.subscriber)


def test_what_is_published_elsewhere_does_not_move_a_horizon(stream: Stream) -> None:
    stream.world.rules("user1 PUB Topic U W 10")
    last = stream.publish("one")
    stream.publish("other", topic="U")
    assert horizon(stream.subscriber, after={"T": last}) == last


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 5])
def test_at_most_so_many_messages_lie_after_the_positions(stream: Stream, max_rows: int) -> None:
    stream.world.rules("user1 PUB Topic U W 10", "user2 SUB Topic U R 10")
    ids = [
        stream.publish(str(number), topic=topic) for number, topic in enumerate(["T", "U"] * 3, 1)
    ]
    after = {"T": ids[0]}
    told = horizons(stream.subscriber, "T", "U", after=after, max_rows=max_rows)
    between = [
        each for topic, told_of in told.items() for each in ids[topic == "U" :: 2]
        if after.get(topic, 0) < each <= told_of["Horizon"]
    ]  # fmt: skip
    assert sorted(between) == ids[1 : 1 + max_rows]


@pytest.mark.parametrize("max_rows", [1, 2, 4, 5, 9])
def test_of_one_topic_so_many_lie_after_its_position(stream: Stream, max_rows: int) -> None:
    stream.world.rules("user1 PUB Topic U W 10")
    ids = [stream.publish(str(number), topic=topic) for number, topic in enumerate("TUTUUTTT")]
    of_topic = [each for each, topic in zip(ids, "TUTUUTTT", strict=True) if topic == "T"]
    reached = horizon(stream.subscriber, after={"T": of_topic[0]}, max_rows=max_rows)
    assert reached == of_topic[min(max_rows, 4)]


def test_a_pattern_means_what_the_node_may_read(stream: Stream) -> None:
    stream.world.rules(
        "user1 PUB Topic TT W 10", "user1 PUB Topic TU W 10", "user2 SUB Topic TU R 10",
        "user2 SUB2 Topic TT R 10",
    )  # fmt: skip
    assert list(horizons(stream.subscriber, "T*")) == ["T", "TU"]
    assert list(horizons(stream.subscriber, "X*")) == []


@pytest.mark.parametrize(
    "rule", ["user3 SUB Topic TT R 10", "user2 SUB Topic TT W 10", "user2 SUB Queue TT R 10"]
)
def test_a_pattern_means_nothing_that_another_rule_names(stream: Stream, rule: str) -> None:
    stream.world.rules("user1 PUB Topic TT W 10", rule)
    assert list(horizons(stream.subscriber, "T*", "*")) == ["T"]


def test_a_subscription_at_a_position_keeps_what_comes_after_it(stream: Stream) -> None:
    first = stream.publish("first")
    stream.subscriber.ok("subscribe_from", "SUB", ["T"], [first], 60)
    stream.publish("second", "third")
    stream.prune()
    assert stream.got() == ["second", "third"]
    stream.prune()
    assert stream.stored() == []


def test_a_subscription_goes_back_and_forward(stream: Stream) -> None:
    stream.world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 1000")
    ids = [stream.publish(str(number)) for number in range(4)]
    for position in (0, *ids, ids[1]):
        stream.subscriber.ok("subscribe_from", "SUB", ["T"], [position], 60)
        kept = [str(number) for number, each in enumerate(ids) if each > position]
        assert stream.state()["Backlog"] == len(kept)
    assert stream.got() == ["2", "3"]


def test_who_stands_before_what_was_removed_is_told(stream: Stream) -> None:
    stream.publish("gone")
    removed = stream.publish("gone too")
    stream.prune()
    assert stream.stored() == []
    answer = stream.subscriber.ok("subscribe_from", "SUB", ["T"], [removed - 1], 60)
    assert answer["Missed"] == [{"Topic": "T", "Removed": removed}]
    assert stream.subscriber.ok("subscribe_from", "SUB", ["T"], [removed], 60)["Missed"] == []
    assert horizons(stream.subscriber, "T")["T"]["Removed"] == removed


def test_a_topic_that_went_and_came_back_tells_what_was_missed(stream: Stream) -> None:
    first = stream.publish("read", topic="NEW.1")
    stream.subscriber.ok("subscribe_from", "SUB", ["NEW.1"], [first], 60)
    stream.age(60)
    missed = stream.publish("missed", topic="NEW.1")
    stream.prune()
    gone = "SELECT NOT EXISTS (SELECT FROM psqlmessages_topic WHERE name = 'NEW.1')"
    assert stream.world.owner.query(gone)
    stream.publish("new", topic="NEW.1")
    answer = stream.subscriber.ok("subscribe_from", "SUB", ["NEW.1"], [first], 60)
    assert answer["Missed"] == [{"Topic": "NEW.1", "Removed": missed}]
    assert horizons(stream.subscriber, "NEW.*")["NEW.1"]["Removed"] == missed
    assert stream.subscriber.ok("subscribe_from", "SUB", ["NEW.1"], [missed], 60)["Missed"] == []
    assert stream.got(topic="NEW.1") == ["new"]


def test_a_subscription_that_died_comes_alive_again_and_is_woken(stream: Stream) -> None:
    stream.subscriber.ok("connect_stream", "SUB")
    stream.subscriber.ok("subscribe_from", "SUB", ["T"], [0], 60)
    stream.age(60)
    stream.tend()
    stream.subscriber.ok("subscribe_from", "SUB", ["T"], [0], 60)
    stream.subscriber.payloads()
    stream.publish("x")
    assert [json.loads(told)["Evt"] for told in stream.subscriber.payloads()] == ["published"]
    assert stream.got() == ["x"]


def test_a_truncation_waits_for_no_position_and_loses_none(stream: Stream) -> None:
    stream.publish("one")
    with stream.subscriber.connection.transaction():
        stream.subscriber.ok("subscribe_from", "SUB", ["T"], [0], 60)
        stream.prune()
    assert stream.stored() == ["one"]


def test_several_jobs_place_the_same_topics_at_once_without_deadlock(stream: Stream) -> None:
    stream.world.rules("user2 SUB Topic U R 10", "user1 PUB Topic U W 10")
    second = stream.world.program("user2")
    with stream.subscriber.connection.transaction():
        stream.subscriber.ok("subscribe_from", "SUB", ["U", "T"], [0, 0], 60)
        second.connection.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.call("subscribe_from", "SUB", ["T", "U"], [0, 0], 60)
    second.ok("subscribe_from", "SUB", ["T", "U"], [0, 0], 60)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize(
    "call", ["stream_horizons('SUB', '{T}')", "subscribe_from('SUB', '{T}', '{0}', 5)"]
)
def test_an_older_snapshot_is_refused(stream: Stream, level: str, call: str) -> None:
    connection = stream.subscriber.connection
    connection.execute(f"SET default_transaction_isolation = '{level}'")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        connection.execute(f"SELECT messages.{call}")


def test_the_cluster_tells_databases_apart(stream: Stream, world: World) -> None:
    cluster = stream.subscriber.ok("stream_horizons", "SUB", ["T"])["Cluster"]
    system = world.owner.query("SELECT system_identifier::text FROM pg_control_system()")
    database = world.owner.query(
        "SELECT oid::text FROM pg_database WHERE datname = current_database()"
    )
    assert cluster == f"{system}/{database}"


def test_the_view_holds_what_a_rule_lets_the_role_read(stream: Stream) -> None:
    stream.world.rules("user1 PUB Topic U W 10")
    stream.publish("mine")
    stream.publish("of others", topic="U")
    read = "SELECT array_agg(body) FROM messages.stored"
    assert stream.subscriber.query(read) == ["mine"]
    # W alone lets nobody read.
    assert stream.publisher.query(read) is None
    assert sorted(stream.world.owner.query(read)) == ["mine", "of others"]
    stream.world.owner.connection.execute("DELETE FROM messages.auth WHERE role = 'user2'")
    assert stream.subscriber.query(read) is None


@pytest.mark.parametrize(("view", "column"), [("stored", "body"), ("queued", "body")])
def test_the_views_leak_no_row_to_a_function_in_the_query(
    stream: Stream, view: str, column: str
) -> None:
    stream.world.rules(
        "user1 PUB Topic U W 10", "user1 PUB Queue Q W 1", "user1 PUB Queue QQ W 1",
        "user2 SUB Queue QQ R 1",
    )  # fmt: skip
    for place, body in (("T", "open"), ("U", "secret")):
        stream.publish(body, topic=place)
    for queue, body in (("QQ", "open"), ("Q", "secret")):
        stream.publisher.ok("push", "PUB", queue, body)
    program = stream.subscriber
    program.connection.execute(
        "CREATE FUNCTION pg_temp.leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001"
        " AS $$ BEGIN RAISE NOTICE '%', $1; RETURN true; END $$"
    )
    program.connection.execute(f"SELECT FROM messages.{view} WHERE pg_temp.leak({column})")
    assert program.warnings == ["NOTICE: open"]


def read(program: Program, *arguments: Any) -> list[str | None]:
    """Call read_stream as SUB for T: the bodies."""
    return [row.body for row in program.elements("read_stream", "SUB", "T", *arguments)]


def test_a_range_of_ids_is_read_in_order_up_to_what_is_settled(stream: Stream) -> None:
    first = stream.publish("1")
    with stream.publisher.connection.transaction():
        stream.publish("open")
        second = stream.world.program("user1").ok("publish", "PUB", "T", "2")["Id"]
        # Without an end it stops before what an open transaction may still add.
        assert read(stream.subscriber) == ["1"]
        assert read(stream.subscriber, 0, second) == ["1", "2"]
    assert read(stream.subscriber, first) == ["open", "2"]
    assert read(stream.subscriber, 0, None, 1) == ["1"]
    assert read(stream.subscriber, 0, second, None, False) == [None] * 3
    assert read(stream.subscriber, second) == []


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (1, ("SUB", "")), (9, ("SUB", "UNKNOWN")), (9, ("SUB", "T*")), (15, (None, "T")),
        (16, ("NOBODY", "T")), (3, ("SUB", "T")), (60, ("SUB", "T", 0, None, 0)),
    ],
)  # fmt: skip
def test_a_range_is_read_only_as_rules_allow(
    stream: Stream, number: int, arguments: tuple[Any, ...]
) -> None:
    stream.publish("one")
    if number == 3:
        stream.world.owner.connection.execute("UPDATE messages.auth SET mode = 'W'")
    assert stream.subscriber.error("read_stream", *arguments)[0] == number


def test_what_is_read_stays_until_the_transaction_ends(stream: Stream) -> None:
    stream.publish("one")
    with stream.subscriber.connection.transaction():
        assert read(stream.subscriber) == ["one"]
        stream.prune()
        assert read(stream.subscriber) == ["one"]
    stream.prune()
    assert read(stream.subscriber) == []


def test_of_a_range_only_its_rows_are_looked_at(stream: Stream) -> None:
    fill = "SELECT messages.publish_many('PUB', 'T', array_fill(repeat('x', 1900), ARRAY[20000]))"
    stream.publisher.query(fill)
    middle = stream.world.owner.query("SELECT last_value FROM messages._stream_id") - 10_000
    call = f"SELECT * FROM messages.read_stream('SUB', 'T', {middle}, {middle + 100})"
    looks = [
        stream.subscriber.connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}"
        ).fetchone()
        for _ in range(2)
    ]
    # The first look also reads the catalogue.
    plan = looks[1][0][0]["Plan"]  # type: ignore[index]
    assert plan["Actual Rows"] == 100
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 200


def test_of_a_backlog_only_what_one_batch_takes_is_looked_at(stream: Stream) -> None:
    # 5,000 pages, of a table that nothing analyzes: what PostgreSQL guesses of it is wrong.
    fill = "SELECT messages.publish_many('PUB', 'T', array_fill(repeat('x', 1900), ARRAY[20000]))"
    stream.publisher.query(fill)
    call = """SELECT messages.stream_horizons('SUB', '{T}', '{"T": 0}', 1000)"""
    looks = [
        stream.subscriber.connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}"
        ).fetchone()
        for _ in range(2)
    ]
    # The first look also reads the catalogue.
    plan = looks[1][0][0]["Plan"]  # type: ignore[index]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 600
    assert plan["Temp Written Blocks"] == 0
