"""Queues: a look that takes nothing, and streams that take each element once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from psqlmessages.exceptions import DestinationNotAuthorized
from psqlmessages.pipeline import reading
from psqlmessages.pipeline.source import MessagesSource
from tests.pipeline.driving import Query
from tests.sql.conftest import Program, World

Follow = Callable[..., Query]


@pytest.fixture
def pusher(world: World) -> Program:
    """A program that may push to all queues; user2 may take from them as READ."""
    world.rules("user1 PUSH Queue * W 10", "user2 READ Queue * R 10")
    return world.program("user1")


@pytest.fixture
def follow(pusher: Program, dsn_file: Callable[[str], str]) -> Iterator[Follow]:
    """Make queries that take from Q as user2, ended with the test."""
    queries: list[Query] = []

    def make(queue: str = "Q", **options: Any) -> Query:
        query = Query(queue=queue, client="READ", dsnFile=dsn_file("user2"), **options)
        queries.append(query)
        return query

    yield make
    for query in queries:
        query.stop()


def push(program: Program, *bodies: str, queue: str = "Q") -> None:
    program.ok("push_many", "PUSH", queue, list(bodies))


def sizes(pusher: Program, world: World) -> tuple[int, int]:
    """How many elements are available, and how many reserved."""
    answer = world.program("user2").ok("sizes", "READ", "Q")
    return answer["Available"], answer["Reserved"]


def look(dsn_file: str, queue: str = "Q") -> list[dict[str, Any]]:
    """Read a queue as a batch."""
    source = MessagesSource({"queue": queue, "client": "READ", "dsnFile": dsn_file})
    reader = source.reader(source.schema())
    rows = [
        row
        for partition in reader.partitions()
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]
    reading.disconnect()
    return rows


def test_a_look_takes_nothing(
    world: World, pusher: Program, dsn_file: Callable[[str], str]
) -> None:
    pusher.ok("push", "PUSH", "Q", "1", None, '{"a": [1]}')
    (row,) = look(dsn_file("user2"))
    assert (row["queue"], row["body"], row["headers"], row["state"], row["tries"]) == (
        "Q", "1", '{"a": [1]}', "available", 0
    )  # fmt: skip
    assert sizes(pusher, world) == (1, 0)


def test_neither_a_look_nor_a_stream_is_allowed_without_a_rule(
    world: World, dsn_file: Callable[[str], str]
) -> None:
    world.rules("user1 PUSH Queue Q W 10", "user2 READ Queue ELSE R 10")
    push(world.program("user1"), "1")
    with pytest.raises(DestinationNotAuthorized):
        look(dsn_file("user2"))
    query = Query(queue="Q", client="READ", dsnFile=dsn_file("user2"))
    query.begin()
    with pytest.raises(DestinationNotAuthorized):
        query.plan()
    query.stop()


def test_a_stream_takes_each_element_once_and_only_what_was_there(
    world: World, pusher: Program, follow: Follow
) -> None:
    bodies = [str(number) for number in range(10)]
    push(pusher, *bodies)
    query = follow(maxRowsPerTrigger=4)
    batches = query.available_now()
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(chain.from_iterable(batches)) == bodies
    assert sizes(pusher, world) == (0, 0)
    push(pusher, "before")
    query.reader.prepareForTriggerAvailableNow()  # type: ignore[attr-defined]
    push(pusher, "later")
    assert [query.bodies(), query.bodies()] == [["before"], []]
    assert sizes(pusher, world) == (1, 0)
    # Many are taken in several calls.
    push(pusher, *map(str, range(4000)))
    assert len(set(follow(maxRowsPerTrigger=3500).bodies())) == 3500


def test_a_streamed_element_has_all_columns_and_any_name(
    pusher: Program, follow: Follow, dsn_file: Callable[[str], str]
) -> None:
    name = "Q'\\\" $1 %s ü"
    pusher.ok("push", "PUSH", name, "it's \\ \n", "json", '{"x-hop-count": 3}')
    looked = look(dsn_file("user2"), name)
    (row,) = follow(name).batch()
    assert {name: row[name] for name in row if name not in ("id", "mature", "pushed_at")} == {
        "queue": name, "body": "it's \\ \n", "enc": "json", "headers": '{"x-hop-count": 3}',
        "tries": 0, "hops": 3, "state": "reserved",
    }  # fmt: skip
    assert looked[0]["queue"] == name


def test_a_batch_is_committed_once_it_is_done_and_read_again_after_a_crash(
    world: World, pusher: Program, follow: Follow
) -> None:
    push(pusher, "1", "2")
    query = follow()
    query.begin()
    query.plan()
    first = query.read()
    query.restart()
    # The leases of both stand in the offset.
    assert len((query.end or {})["leases"]) == 2 * 32
    push(pusher, "3")
    assert sizes(pusher, world) == (1, 2)
    assert first == query.read()
    query.done()
    # Spark asks for the next batch, and tells commit() of this one only when there is one.
    query.plan()
    assert sizes(pusher, world) == (0, 1)
    assert [row["body"] for row in query.read()] == ["3"]
    query.done()
    query.plan()
    assert sizes(pusher, world) == (0, 0)


def test_an_element_whose_lease_was_lost_is_left_out_and_told(
    world: World, pusher: Program, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    push(pusher, "1", "2", "3")
    query = follow(partitions=1)
    query.begin()
    query.plan()
    query.restart()
    world.owner.connection.execute(
        "UPDATE psqlmessages_element SET available_at = now() WHERE body = '2'"
    )
    (other,) = world.program("user2").elements("reserve", "READ", "Q", 1, 60.0)
    assert sorted(row["body"] for row in query.read()) == ["1", "3"]
    assert "1 of 3 elements of queue Q are left out" in caplog.text
    world.program("user2").ok("release", "READ", [other.lease])
    query.done()
    assert query.bodies() == ["2"]


def test_an_element_lost_before_its_commit_is_told(
    world: World, pusher: Program, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    query = follow()
    push(pusher, "0")
    query.batch()
    push(pusher, "1")
    query.plan()
    query.read()
    world.owner.connection.execute("UPDATE psqlmessages_element SET available_at = now()")
    world.program("user2").elements("reserve", "READ", "Q", 1, 60.0)
    query.done()
    query.plan()
    assert "1 of 1 elements of batch 2 were lost" in caplog.text


def test_leases_are_renewed_while_a_batch_takes_long(
    world: World, pusher: Program, follow: Follow
) -> None:
    push(pusher, "1")
    query = follow(timeout=15)
    query.begin()
    query.plan()
    before = world.owner.query("SELECT available_at FROM psqlmessages_element")
    later = "SELECT available_at > %s + interval '1 s' FROM psqlmessages_element"
    world.wait_for(later, before)
