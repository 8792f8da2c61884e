"""Streams of topics, driven as Spark does: every message once, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import sql
from pyspark.sql.types import StructType

from psqlmessages.exceptions import (
    DestinationNotAuthorized,
    ModeNotAuthorized,
    TopicNotExistent,
)
from psqlmessages.pipeline import columns, reading, stream_calls
from psqlmessages.pipeline.ranges import Range
from psqlmessages.pipeline.stream_calls import StreamCalls
from tests.pipeline.driving import Query, keep
from tests.sql.conftest import Program, World

Follow = Callable[..., Query]
Fill = Callable[..., int]


@pytest.fixture
def follow(world: World, dsn_file: Callable[[str], str]) -> Iterator[Follow]:
    """Make queries that read as user2, ended with the test."""
    queries: list[Query] = []

    def make(topic: str = "T", **options: Any) -> Query:
        given = {"client": "READ", **options}
        query = Query(topic=topic, dsnFile=dsn_file("user2"), **given)
        queries.append(query)
        return query

    yield make
    for query in queries:
        query.stop()


@pytest.fixture
def sender(world: World) -> Program:
    """A program that may publish to all topics; user2 may read them as READ."""
    world.rules("user1 SEND Topic * W 10", "user2 READ Topic * R 10")
    keep(world, "T*", "READ", "user2")
    return publisher(world)


def publisher(world: World) -> Program:
    return world.program("user1")


def publish(program: Program, *bodies: str, topic: str = "T") -> None:
    program.ok("publish_many", "SEND", topic, list(bodies))


def prune(world: World) -> None:
    """Remove all that no subscription needs."""
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 0")
    world.owner.query("SELECT messages._prune_streams()")


def kept(world: World, *topics: str) -> None:
    """Make topics that keep their messages."""
    world.owner.connection.cursor().executemany(
        "INSERT INTO psqlmessages_topic (name, retention) VALUES (%s, 3600)"
        " ON CONFLICT (name) DO UPDATE SET retention = 3600",
        [(topic,) for topic in topics],
    )


def position(world: World, topic: str = "T") -> int | None:
    """Where the subscription of READ is."""
    found = world.owner.query(
        "SELECT position FROM psqlmessages_subscription WHERE ident = 'READ' AND topic = %s", topic
    )
    return None if found is None else int(found)


def test_a_stream_reads_what_is_kept_and_what_comes(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    publish(sender, "1", "2")
    query = follow()
    first = query.bodies()
    publish(sender, "3")
    assert [first, query.bodies(), query.bodies()] == [["1", "2"], ["3"], []]


def test_all_columns_are_there(world: World, sender: Program, follow: Follow) -> None:
    kept(world, "T")
    sender.ok("publish", "SEND", "T", "{}", "json")
    (row,) = follow().batch()
    stored = world.owner.connection.execute("SELECT id, published_at FROM messages.stored")
    id_, published_at = stored.fetchone() or (None, None)
    assert row == {
        "id": id_, "topic": "T", "sender": "SEND", "body": "{}", "enc": "json", "headers": None,
        "published_at": published_at,
    }  # fmt: skip


def test_a_late_commit_is_waited_for_and_nothing_is_lost(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    late, query = publisher(world), follow()
    with late.connection.transaction():
        publish(late, "early id")
        publish(sender, "later id")
        before = query.bodies()
    assert (before, query.bodies()) == ([], ["early id", "later id"])


def test_what_was_rolled_back_is_passed_over(world: World, sender: Program, follow: Follow) -> None:
    kept(world, "T")
    query = follow()
    late = publisher(world)
    late.connection.execute("BEGIN")
    publish(late, "never")
    publish(sender, "1")
    late.connection.execute("ROLLBACK")
    assert query.bodies() == ["1"]


def test_each_batch_has_as_many_rows_as_asked_for(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T", "T2")
    for number in range(10):
        publish(sender, f"{number}", topic="T" if number % 3 else "T2")
    query = follow("T,T2", maxRowsPerTrigger=4)
    assert query.available_now() == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_available_now_ends_at_what_was_there_when_it_began(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    publish(sender, "1", "2", "3")
    query = follow(maxRowsPerTrigger=2)
    query.begin()
    query.reader.prepareForTriggerAvailableNow()  # type: ignore[attr-defined]
    first = query.bodies()
    publish(sender, "4", "5")
    assert [first, query.bodies(), query.bodies()] == [["1", "2"], ["3"], []]


def test_a_batch_that_was_under_way_is_read_again_after_a_crash(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    publish(sender, "1", "2")
    query = follow()
    query.begin()
    query.plan()
    first = query.read()
    query.restart()
    publish(sender, "3")
    assert first == query.read()
    query.done()
    assert query.bodies() == ["3"]


def test_a_topic_that_a_pattern_matches_later_is_read_from_its_beginning(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T1")
    query = follow("T*")
    publish(sender, "1", topic="T1")
    first = query.bodies()
    kept(world, "T2")
    publish(sender, "2", "3", topic="T2")
    assert (first, query.bodies()) == (["1"], ["2", "3"])


def test_a_new_topic_is_subscribed_to_before_it_has_a_message(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T1")
    query = follow("T*")
    query.batch()
    kept(world, "T2")
    assert query.bodies() == []
    assert position(world, "T2") == 0


def test_a_pattern_that_matches_nothing_waits(
    world: World, sender: Program, follow: Follow
) -> None:
    query = follow("T*")
    before = query.bodies()
    kept(world, "T1")
    publish(sender, "1", topic="T1")
    assert (before, query.bodies()) == ([], ["1"])


def test_names_with_quotes_are_read(world: World, sender: Program, follow: Follow) -> None:
    name = "T'\\\" $1 %s ü"
    kept(world, name)
    publish(sender, "it's \\ \n", topic=name)
    (row,) = follow(name).batch()
    assert (row["topic"], row["body"]) == (name, "it's \\ \n")


@pytest.mark.parametrize(
    ("starting", "bodies"),
    [("earliest", ["1", "2", "3", "4"]), ("latest", ["4"]), ("id", ["2", "3", "4"])],
)
def test_a_stream_begins_where_it_is_told(
    world: World, sender: Program, follow: Follow, starting: str, bodies: list[str]
) -> None:
    kept(world, "T")
    publish(sender, "1", "2", "3")
    second = world.owner.query("SELECT id FROM messages.stored WHERE body = '2'")
    query = follow(startingOffsets=second if starting == "id" else starting)
    query.begin()
    publish(sender, "4")
    # From the latest on, the first batch is empty.
    assert query.bodies() + query.bodies() == bodies


def test_a_stream_that_is_asked_again_begins_where_it_said_at_first(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    query = follow(startingOffsets="latest")
    begun = query.begin()
    publish(sender, "1")
    # As Spark does before its first batch, with what comes in between.
    again = query.begin()
    prune(world)
    assert (again, query.bodies() + query.bodies()) == (begun, ["1"])


def test_a_stream_killed_in_its_first_batch_begins_where_it_did_then(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    query = follow(startingOffsets="latest")
    query.begin()
    publish(sender, "1")
    query.plan()
    planned = query.end
    query.restart()
    # As Spark goes on from its log: with the first batch, from where it is told to begin.
    query.begin()
    query.start = planned
    assert query.bodies() == ["1"]


def test_a_stream_begins_at_a_time(world: World, sender: Program, follow: Follow) -> None:
    kept(world, "T")
    for body in "123":
        publish(sender, body)
    at = world.owner.query("SELECT published_at FROM messages.stored WHERE body = '2'")
    future = follow(startingOffsets="2999-01-01T00:00:00Z")
    future.begin()
    assert follow(startingOffsets=at.isoformat()).bodies() == ["2", "3"]
    assert future.bodies() == []


def test_the_subscription_moves_with_what_spark_has_committed(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    publish(sender, "1")
    query = follow()
    start = query.begin()["positions"]["T"]
    query.plan()
    query.read()
    under_way = position(world)
    query.done()
    # Spark tells commit() of a batch only with the next one; the call for that is enough.
    query.plan()
    assert (under_way, position(world)) == (start, (query.end or {})["positions"]["T"])


def test_nothing_is_removed_before_it_is_read(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    query = follow()
    query.begin()
    publish(sender, "1", "2")
    prune(world)
    assert query.bodies() == ["1", "2"]


def test_what_was_read_is_removed(world: World, sender: Program, follow: Follow) -> None:
    kept(world, "T")
    query = follow()
    query.begin()
    publish(sender, "1", "2")
    query.batch()
    prune(world)
    assert world.owner.query("SELECT count(*) FROM messages.stored") == 0


def test_a_client_of_another_name_has_a_place_of_its_own(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T")
    world.rules("user2 OTHER Topic T R 10")
    publish(sender, "1")
    first, other = follow(), follow(client="OTHER")
    first.begin()
    at = position(world)
    assert other.bodies() == ["1"]
    assert position(world) == at


def test_an_idle_query_plans_no_batch_while_other_topics_are_busy(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T", "T2")
    query = follow()
    query.begin()
    publish(sender, "1", topic="T2")
    assert query.plan() is False


def test_fewer_columns_read_fewer(
    world: World, sender: Program, dsn_file: Callable[[str], str]
) -> None:
    kept(world, "T")
    publish(sender, "1")
    schema = StructType([columns.TOPIC["body"], columns.TOPIC["id"]])
    query = Query(schema, topic="T", client="READ", dsnFile=dsn_file("user2"))
    (row,) = query.batch()
    query.stop()
    assert list(row) == ["body", "id"]


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (None, DestinationNotAuthorized),
        ("user2 READ Topic T W 10", ModeNotAuthorized),
    ],
)
def test_a_topic_without_a_right_is_refused(
    world: World, follow: Follow, rule: str | None, error: type[Exception]
) -> None:
    world.rules("user1 SEND Topic T W 10", "user2 READ Topic ELSE R 10", *([rule] if rule else []))
    with pytest.raises(error, match="T"):
        follow().begin()


def test_a_topic_that_is_not_there_is_refused(world: World, follow: Follow) -> None:
    world.rules("user2 READ Topic T* R 10")
    with pytest.raises(TopicNotExistent, match="T7"):
        follow("T7").begin()


def test_the_newest_messages_are_reported(world: World, sender: Program, follow: Follow) -> None:
    kept(world, "T")
    publish(sender, "1", "2", "3")
    query = follow(maxRowsPerTrigger=1)
    query.batch()
    newest = world.owner.query("SELECT max(id) FROM messages.stored")
    assert (query.reader.reportLatestOffset() or {})["positions"] == {"T": newest}


@pytest.mark.parametrize("names", [("id", "body"), ("body",), ("topic", "sender", "published_at")])
def test_messages_that_lie_far_apart_or_close_are_read_once(
    world: World,
    fill: Fill,
    dsn_file: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
) -> None:
    monkeypatch.setattr(stream_calls, "_ROWS", 10)
    monkeypatch.setattr(stream_calls, "_MOST_IDS", 100)
    monkeypatch.setattr(stream_calls, "_CALLS_A_STATEMENT", 3)
    monkeypatch.setattr(stream_calls, "_ROWS_OF_EACH", 5)
    for topic in ("T", "U", "V", "ELSE"):
        keep(world, topic, "READ", "user2")
    fills = [("T", 57), ("ELSE", 1500), ("T", 3), ("U", 120), ("ELSE", 40), ("T", 200), ("V", 5)]
    last = max(fill(topic, count, f"{topic} %s") for topic, count in fills)
    schema = StructType([columns.TOPIC[name] for name in names])
    for topics in (["T"], ["U", "T", "V"]):
        calls = StreamCalls("READ", [Range(topic, 0, last) for topic in topics], names)
        reader = reading.Reader({"dsnFile": dsn_file("user2")})
        batches = reader.batches(reading.Read(calls), columns.arrow_schema(schema))
        found = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        stored = [
            row
            for topic in topics
            for row in world.owner.connection.execute(
                sql.SQL("SELECT {} FROM messages.stored WHERE topic = %s ORDER BY id").format(
                    sql.SQL(", ").join(map(sql.Identifier, names))
                ),
                [topic],
            )
        ]
        assert sorted(found) == sorted(stored)
        assert len(topics) > 1 or found == stored
    reading.disconnect()
