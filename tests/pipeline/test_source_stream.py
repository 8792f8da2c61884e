"""Streams of topics, driven as Spark does: every message once, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
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


@pytest.fixture
def follow(world: World, dsn_file: Callable[[str], str]) -> Iterator[Follow]:
    """Make queries that read as user2, ended with the test."""
    queries: list[Query] = []

    def make(topic: str = "T", schema: StructType | None = None, **options: Any) -> Query:
        given = {"client": "READ", **options}
        queries.append(Query(schema, topic=topic, dsnFile=dsn_file("user2"), **given))
        return queries[-1]

    yield make
    for query in queries:
        query.stop()


@pytest.fixture
def sender(world: World) -> Program:
    """A program that may publish to all topics; T keeps its messages, and READ may read all."""
    world.rules("user1 SEND Topic * W 10", "user2 READ Topic * R 10")
    kept(world, "T")
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


def test_a_late_commit_is_waited_for_and_what_was_rolled_back_is_passed_over(
    world: World, sender: Program, follow: Follow
) -> None:
    late, never, query = world.program("user1"), world.program("user1"), follow()
    publish(sender, "1", "2")
    assert query.bodies() == ["1", "2"]
    late.connection.execute("BEGIN")
    never.connection.execute("BEGIN")
    publish(late, "early id")
    publish(never, "never")
    publish(sender, "later id")
    assert query.bodies() == []
    late.connection.execute("COMMIT")
    never.connection.execute("ROLLBACK")
    assert [query.bodies(), query.bodies()] == [["early id", "later id"], []]


def test_all_columns_are_there_whatever_the_name_and_fewer_if_asked_for(
    world: World, sender: Program, follow: Follow
) -> None:
    name = "T'\\\" $1 %s ü"
    kept(world, name)
    sender.ok("publish", "SEND", name, "it's \\ \n", "json")
    (row,) = follow(name).batch()
    stored = world.owner.connection.execute("SELECT id, published_at FROM messages.stored")
    id_, published_at = stored.fetchone() or (None, None)
    assert row == {
        "id": id_, "topic": name, "sender": "SEND", "body": "it's \\ \n", "enc": "json",
        "headers": None, "published_at": published_at,
    }  # fmt: skip
    (row,) = follow(name, StructType([columns.TOPIC["body"], columns.TOPIC["id"]])).batch()
    assert list(row) == ["body", "id"]


def test_each_batch_has_as_many_rows_as_asked_for_until_what_was_there(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T2")
    for number in range(10):
        publish(sender, f"{number}", topic="T" if number % 3 else "T2")
    query = follow("T,T2", maxRowsPerTrigger=4)
    assert query.available_now() == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]
    publish(sender, "a", "b", "c", "d", "e")
    query.reader.prepareForTriggerAvailableNow()  # type: ignore[attr-defined]
    first = query.bodies()
    newest = world.owner.query("SELECT max(id) FROM messages.stored")
    publish(sender, "f")
    assert (query.reader.reportLatestOffset() or {})["positions"]["T"] == newest
    assert [first, query.bodies(), query.bodies()] == [["a", "b", "c", "d"], ["e"], []]


def test_a_batch_is_read_again_after_a_crash_and_its_messages_go_once_it_is_done(
    world: World, sender: Program, follow: Follow
) -> None:
    query = follow()
    start = query.begin()["positions"]["T"]
    publish(sender, "1", "2")
    query.plan()
    first = query.read()
    query.restart()
    publish(sender, "3")
    prune(world)
    assert first == query.read()
    assert position(world) == start
    query.done()
    # Spark tells commit() of a batch only with the next one; the call for that is enough.
    query.plan()
    assert position(world) == (query.start or {})["positions"]["T"]
    assert [row["body"] for row in query.read()] == ["3"]
    query.done()
    query.plan()
    prune(world)
    assert world.owner.query("SELECT count(*) FROM messages.stored") == 0


def test_a_topic_that_a_pattern_matches_later_is_read_from_its_beginning(
    world: World, sender: Program, follow: Follow
) -> None:
    query = follow("P*")
    assert query.bodies() == []
    kept(world, "P1")
    publish(sender, "1", topic="P1")
    assert query.bodies() == ["1"]
    kept(world, "P2")
    assert query.bodies() == []
    # It is subscribed to before it has a message.
    assert position(world, "P2") == 0
    publish(sender, "2", "3", topic="P2")
    assert query.bodies() == ["2", "3"]


def test_a_stream_begins_where_it_is_told(world: World, sender: Program, follow: Follow) -> None:
    for body in "123":
        publish(sender, body)
    at, second = world.owner.connection.execute(
        "SELECT published_at, id FROM messages.stored WHERE body = '2'"
    ).fetchone() or (None, None)
    assert at is not None
    all_ = ["1", "2", "3", "4"]
    begun = []
    starts = (
        ("earliest", all_),
        ("latest", all_[3:]),
        (second, all_[1:]),
        (at.isoformat(), all_[1:]),
    )
    for number, (starting, bodies) in enumerate(starts):
        world.rules(f"user2 READ{number} Topic T R 10")
        query = follow(client=f"READ{number}", startingOffsets=starting)
        query.begin()
        begun.append((query, bodies))
    assert follow(startingOffsets="2999-01-01T00:00:00Z").bodies() == []
    publish(sender, "4")
    for query, bodies in begun:
        # From the latest on, the first batch is empty.
        assert query.bodies() + query.bodies() == bodies, query.options


def test_a_stream_from_the_latest_begins_where_it_said_at_first(
    world: World, sender: Program, follow: Follow
) -> None:
    query = follow(startingOffsets="latest")
    begun = query.begin()
    publish(sender, "1")
    # As Spark does before its first batch, with what comes in between.
    again = query.begin()
    prune(world)
    assert again == begun
    query.plan()
    planned = query.end
    query.restart()
    # Killed in its first batch, it goes on from Spark's log, from where it is told to begin.
    query.begin()
    query.start = planned
    assert query.bodies() == ["1"]


def test_clients_and_topics_have_places_of_their_own(
    world: World, sender: Program, follow: Follow
) -> None:
    kept(world, "T2")
    world.rules("user2 OTHER Topic T R 10")
    first, other = follow(), follow(client="OTHER")
    first.begin()
    at = position(world)
    publish(sender, "of another", topic="T2")
    # What is busy elsewhere plans no batch.
    assert first.plan() is False
    publish(sender, "1")
    assert other.bodies() == ["1"]
    assert position(world) == at
    assert first.bodies() == ["1"]


def test_a_topic_without_a_right_is_refused(world: World, follow: Follow) -> None:
    world.rules("user1 SEND Topic T W 10", "user2 READ Topic ELSE R 10")
    with pytest.raises(DestinationNotAuthorized, match="T"):
        follow().begin()
    world.rules("user2 READ Topic T W 10")
    with pytest.raises(ModeNotAuthorized, match="T"):
        follow().begin()
    world.rules("user2 READ Topic T* R 10")
    with pytest.raises(TopicNotExistent, match="T7"):
        follow("T7").begin()


def test_messages_that_lie_far_apart_or_close_are_read_once(
    world: World,
    fill: Callable[..., int],
    dsn_file: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_calls, "_ROWS", 10)
    monkeypatch.setattr(stream_calls, "_MOST_IDS", 100)
    monkeypatch.setattr(stream_calls, "_CALLS_A_STATEMENT", 3)
    monkeypatch.setattr(stream_calls, "_ROWS_OF_EACH", 5)
    for topic in ("T", "U", "V", "ELSE"):
        keep(world, topic, "READ", "user2")
    fills = [("T", 57), ("ELSE", 1500), ("T", 3), ("U", 120), ("ELSE", 40), ("T", 200), ("V", 5)]
    for topic, count in fills:
        fill(topic, count, f"{topic} %s")
    # Ids jump: a look at each of these would take years.
    world.owner.execute("SELECT setval('messages._stream_id', (10 ^ 15)::bigint)")
    last = max(fill(topic, count, f"late {topic} %s") for topic, count in fills)
    for names in (("id", "body"), ("body",), ("topic", "sender", "published_at")):
        schema = StructType([columns.TOPIC[name] for name in names])
        for topics in (["T"], ["U", "T", "V"]):
            wholes = [Range(topic, 0, last) for topic in topics]
            reader = reading.Reader({"dsnFile": dsn_file("user2")})
            found, filtered = (
                [
                    tuple(row.values())
                    for batch in reader.batches(
                        reading.Read(StreamCalls("READ", wholes, names, conditions)),
                        columns.arrow_schema(schema),
                    )
                    for row in batch.to_pylist()
                ]
                for conditions in ((), ("r.id > 0",))
            )
            assert sorted(found) == sorted(filtered)
            stored = world.owner.connection.execute(
                f"SELECT {', '.join(names)} FROM messages.stored WHERE topic = ANY (%s)"
                " ORDER BY id",
                [topics],
            ).fetchall()
            assert sorted(found) == sorted(stored), (names, topics)
            assert len(topics) > 1 or found == stored
    reading.disconnect()
