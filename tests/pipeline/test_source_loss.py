"""What a stream does when its positions mean nothing any more, and while the database is away."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.pipeline import reading, waiting
from psqlmessages.pipeline.errors import (
    DsnMissing,
    LoginRefused,
    MessagesGone,
    OtherCluster,
    ReadBroken,
)
from psqlmessages.pipeline.topic_stream import TopicStreamReader
from psqlmessages.pipeline.waiting import Waiting
from tests.pipeline.driving import Query, away, said
from tests.sql.conftest import World

Follow = Callable[..., Query]


@pytest.fixture
def follow(world: World, dsn_file: Callable[[str], str]) -> Iterator[Follow]:
    """Make queries that read T as user2, ended with the test; nothing is removed by itself."""
    for topic in ("T", "P*"):
        world.rules(f"user1 SEND Topic {topic} W 10", f"user2 READ Topic {topic} R 10")
    world.owner.connection.execute("UPDATE messages._stream SET tended_at = 'infinity'")
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 3600")
    queries: list[Query] = []

    def make(topic: str = "T", **options: Any) -> Query:
        query = Query(topic=topic, client="READ", dsnFile=dsn_file("user2"), **options)
        queries.append(query)
        return query

    yield make
    for query in queries:
        query.stop()
    world.owner.connection.execute("UPDATE messages._stream SET tended_at = clock_timestamp()")


def publish(world: World, *bodies: str, topic: str = "T") -> int:
    return int(world.program("user1").ok("publish_many", "SEND", topic, list(bodies))["Id"])


def lose(world: World) -> None:
    """Let the subscription end, and remove all there is."""
    world.owner.connection.execute("DELETE FROM psqlmessages_subscription")
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 0")
    world.owner.query("SELECT messages._prune_streams()")


def end_sessions(world: World) -> None:
    world.watcher.query(
        "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
        " WHERE usename = 'user2'"
    )


def test_positions_of_another_database_or_an_earlier_state_are_refused(
    world: World, follow: Follow
) -> None:
    last = publish(world, "1")
    query = follow()
    begun = query.begin()
    query.start = {"cluster": "7000000000000000000/5", "positions": {"T": 0}}
    with pytest.raises(OtherCluster, match="written against the database 7000000000000000000/5"):
        query.plan()
    query.start = begun
    query.plan()
    query.end = {**(query.end or {}), "cluster": "7/5"}
    with pytest.raises(OtherCluster):
        query.read()
    query.start = begun | {"positions": {"T": last + 1}}
    query.restart()
    with pytest.raises(OtherCluster, match="put back to an earlier state"):
        query.plan()


def test_messages_removed_while_a_query_was_away_end_it_or_are_told(
    world: World, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    first = publish(world, "1")
    query, lax = follow(), follow(failOnDataLoss="false")
    query.batch()
    query.restart()
    lax.start = query.start
    last = publish(world, "2", "3")
    lose(world)
    with pytest.raises(MessagesGone) as lost:
        query.plan()
    assert f"topic T: this query has read up to {first}, and messages up to {last}" in str(
        lost.value
    )
    assert "failOnDataLoss=false" in str(lost.value)
    publish(world, "4")
    caplog.clear()
    lax.plan()
    lax.plan()
    assert [row["body"] for row in lax.read()] == ["4"]
    told = [record for record in caplog.records if "2 at most are lost" in record.message]
    # Once by the driver, however often it looks, and once by each task.
    assert len(told) == 2


def test_messages_removed_amid_a_batch_end_it(world: World, follow: Follow) -> None:
    publish(world, "1", "2")
    query = follow()
    query.begin()
    query.plan()
    lose(world)
    with pytest.raises(MessagesGone):
        query.read()


def test_a_topic_of_a_pattern_that_went_is_lost_as_its_messages_are(
    world: World, follow: Follow
) -> None:
    publish(world, "1", topic="P" + "1" * 99)
    last = publish(world, "2", topic="P2")
    strict, lax = follow("P*"), follow("P*", failOnDataLoss="false")
    strict.begin()
    strict.plan()
    world.owner.connection.execute("DELETE FROM psqlmessages_subscription")
    world.owner.query("SELECT messages._rebuild_topics(array_agg(id)) FROM psqlmessages_topic")
    world.owner.query("SELECT messages._prune_streams()")
    with pytest.raises(MessagesGone, match="it is there no more"):
        strict.read()
    lax.start, lax.end = strict.start, strict.end
    assert lax.read() == []
    lax.done()
    publish(world, "3", topic="P2")
    assert lax.bodies() == ["3"]
    assert (lax.start or {})["positions"]["P2"] > last


def test_a_topic_of_a_pattern_that_went_does_not_end_the_others(
    world: World, follow: Follow
) -> None:
    for topic in ("P1", "P2"):
        publish(world, "1", topic=topic)
    query = follow("P*")
    query.begin()
    assert isinstance(query.reader, TopicStreamReader)
    following = query.reader._follow()
    world.owner.connection.execute("DELETE FROM psqlmessages_streammessage")
    world.owner.connection.execute("DELETE FROM psqlmessages_topic WHERE name = 'P1'")
    pinged = "SELECT pinged_at FROM psqlmessages_subscription WHERE topic = 'P2'"
    before = world.owner.query(pinged)
    following._ping()
    assert world.owner.query(pinged) > before


def test_a_start_at_an_id_that_is_to_come_is_waited_for_and_one_that_is_gone_refused(
    world: World, follow: Follow
) -> None:
    last = publish(world, "1")
    query = follow(startingOffsets=last + 2)
    assert query.bodies() == []
    publish(world, "2", "3")
    assert query.bodies() == ["3"]
    lose(world)
    with pytest.raises(MessagesGone):
        follow(startingOffsets=last).begin()
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 3600")
    publish(world, "4")
    # The earliest is the earliest that is kept.
    assert follow().bodies() == ["4"]


def test_a_query_is_pinged_while_a_batch_takes_long(world: World, follow: Follow) -> None:
    publish(world, "1")
    query = follow(timeout=15)
    query.begin()
    before = world.owner.query("SELECT pinged_at FROM psqlmessages_subscription")
    later = "SELECT pinged_at > %s + interval '1 s' FROM psqlmessages_subscription"
    world.wait_for(later, before)


def test_a_database_that_goes_away_is_waited_for_by_the_driver_and_by_executors(
    world: World, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    publish(world, "1")
    query = follow()
    assert query.bodies() == ["1"]
    # A kept connection that was ended is replaced without a word.
    end_sessions(world)
    publish(world, "2")
    assert query.bodies() == ["2"]
    assert not caplog.records
    publish(world, "3")
    with ThreadPoolExecutor(1) as pool:
        for step in (query.plan, query.read):
            caplog.clear()
            with away(world, "user2"):
                waiting_ = pool.submit(step)
                said(caplog, "the database is away, trying again")
            found = waiting_.result(100)
            said(caplog, "the database is back after")
            assert len([r for r in caplog.records if "the database is" in r.message]) == 2
    assert isinstance(found, list)
    assert [row["body"] for row in found] == ["3"]


def test_a_wait_ends_after_its_patience() -> None:
    with pytest.raises(ServerUnreachable, match="the database is away: refused"):
        Waiting(timedelta(0)).after("refused\nmore")


def part_read(follow: Follow, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Any]:
    """Plan one partition, and hand on each batch of it as it comes."""
    monkeypatch.setattr(reading, "_HELD_BYTES", 0)
    query = follow(partitions=1, **options)
    query.begin()
    query.plan()
    (partition,) = query.reader.partitions(query.start or {}, query.end or {})
    return iter(query.reader.read(partition))


def test_what_was_handed_on_is_not_read_again(
    world: World, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [digit * 600_000 for digit in "1234"]
    publish(world, *bodies)
    batches = part_read(follow, monkeypatch)
    first = next(batches)
    end_sessions(world)
    read = [first, *batches]
    assert first.num_rows < 4
    assert [body for batch in read for body in batch["body"].to_pylist()] == bodies


def test_a_read_that_had_new_rows_since_waits_again(
    world: World, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than the buffers of the connection hold.
    bodies = [f"{number:02}" * 400_000 for number in range(40)]
    publish(world, *bodies)
    reading.disconnect()
    batches = part_read(follow, monkeypatch)
    read = [next(batches)]
    end_sessions(world)
    while sum(batch.num_rows for batch in read) < 20:
        read.append(next(batches))
    later = waiting.monotonic() + waiting.PATIENCE.total_seconds()
    monkeypatch.setattr(waiting, "monotonic", lambda: later)
    end_sessions(world)
    read += batches
    assert [body for batch in read for body in batch["body"].to_pylist()] == bodies


def test_what_is_removed_before_the_rest_is_read_ends_the_read(
    world: World, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(world, *(digit * 600_000 for digit in "1234"))
    batches = part_read(follow, monkeypatch, failOnDataLoss=False)
    next(batches)
    end_sessions(world)
    lose(world)
    with pytest.raises(ReadBroken, match="broke in a read"):
        list(batches)


def test_an_address_that_is_wrong_or_missing_is_told_at_once(
    world: World, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(world, "1")
    query = follow()
    query.begin()
    password = world.server.server.home.passwords.get("user2")
    assert password is not None
    assert password in world.server.url("user2")
    assert password.encode() not in pickle.dumps(query.fresh_reader())
    file = Path(query.options["dsnFile"])
    file.write_text(file.read_text().replace("@127.0.0.1", "x@127.0.0.1"))
    end_sessions(world)
    with pytest.raises(LoginRefused, match="password authentication failed"):
        query.plan()
    other = Query(topic="T", dsnFile=str(file))
    with pytest.raises(ServerUnreachable, match="cannot connect"):
        other.begin()
    monkeypatch.delenv("PSQLMESSAGES_DSN", raising=False)
    monkeypatch.delenv("PSQLMESSAGES_DSN_FILE", raising=False)
    with pytest.raises(DsnMissing, match="set PSQLMESSAGES_DSN"):
        Query(topic="T").begin()
