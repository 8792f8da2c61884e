"""What a stream does when its positions mean nothing any more, and while the database is away."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
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
    world.rules("user1 SEND Topic T W 10", "user2 READ Topic T R 10")
    world.owner.connection.execute("UPDATE messages._stream SET tended_at = 'infinity'")
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 3600")
    queries: list[Query] = []

    def make(**options: Any) -> Query:
        query = Query(topic="T", client="READ", dsnFile=dsn_file("user2"), **options)
        queries.append(query)
        return query

    yield make
    for query in queries:
        query.stop()
    world.owner.connection.execute("UPDATE messages._stream SET tended_at = clock_timestamp()")


@pytest.fixture
def patterned(world: World, follow: Follow, dsn_file: Callable[[str], str]) -> Iterator[Follow]:
    """Make queries that read the topics P* as user2, which come and go with their messages."""
    world.rules("user1 SEND Topic P* W 10", "user2 READ Topic P* R 10")
    queries: list[Query] = []

    def make(**options: Any) -> Query:
        query = Query(topic="P*", client="READ", dsnFile=dsn_file("user2"), **options)
        queries.append(query)
        return query

    yield make
    for query in queries:
        query.stop()


def publish(world: World, *bodies: str) -> int:
    return int(world.program("user1").ok("publish_many", "SEND", "T", list(bodies))["Id"])


def lose(world: World) -> None:
    """Let the subscription end, and remove all there is."""
    world.owner.connection.execute("DELETE FROM psqlmessages_subscription")
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 0")
    world.owner.query("SELECT messages._prune_streams()")


def test_a_checkpoint_of_another_cluster_is_refused(world: World, follow: Follow) -> None:
    publish(world, "1")
    query = follow()
    query.start = {"cluster": "7000000000000000000/5", "positions": {"T": 0}}
    with pytest.raises(OtherCluster, match="written against the database 7000000000000000000/5"):
        query.plan()


def test_an_executor_that_reads_another_cluster_is_refused(world: World, follow: Follow) -> None:
    publish(world, "1")
    query = follow()
    query.begin()
    query.plan()
    query.end = {**(query.end or {}), "cluster": "7/5"}
    with pytest.raises(OtherCluster):
        query.read()


def test_messages_removed_while_a_query_was_away_end_it(world: World, follow: Follow) -> None:
    first = publish(world, "1")
    query = follow()
    query.batch()
    query.restart()
    last = publish(world, "2", "3")
    lose(world)
    with pytest.raises(MessagesGone) as lost:
        query.plan()
    assert f"topic T: this query has read up to {first}, and messages up to {last}" in str(
        lost.value
    )
    assert "failOnDataLoss=false" in str(lost.value)


def test_with_fail_on_data_loss_off_it_is_told_and_the_rest_is_read(
    world: World, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    publish(world, "1")
    query = follow(failOnDataLoss="false")
    query.batch()
    query.restart()
    publish(world, "2", "3")
    lose(world)
    publish(world, "4")
    query.plan()
    query.plan()
    assert [row["body"] for row in query.read()] == ["4"]
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
    world: World, patterned: Follow
) -> None:
    world.program("user1").ok("publish", "SEND", "P" + "1" * 99, "1")
    last = int(world.program("user1").ok("publish", "SEND", "P2", "2")["Id"])
    strict, lax = patterned(), patterned(failOnDataLoss="false")
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
    world.program("user1").ok("publish", "SEND", "P2", "3")
    assert lax.bodies() == ["3"]
    assert (lax.start or {})["positions"]["P2"] > last


def test_a_topic_of_a_pattern_that_went_does_not_end_the_others(
    world: World, patterned: Follow
) -> None:
    for topic in ("P1", "P2"):
        world.program("user1").ok("publish", "SEND", topic, "1")
    query = patterned()
    query.begin()
    assert isinstance(query.reader, TopicStreamReader)
    following = query.reader._follow()
    world.owner.connection.execute("DELETE FROM psqlmessages_streammessage")
    world.owner.connection.execute("DELETE FROM psqlmessages_topic WHERE name = 'P1'")
    pinged = "SELECT pinged_at FROM psqlmessages_subscription WHERE topic = 'P2'"
    before = world.owner.query(pinged)
    following._ping()
    assert world.owner.query(pinged) > before


def test_positions_that_are_ahead_of_the_database_are_refused(world: World, follow: Follow) -> None:
    last = publish(world, "1")
    query = follow()
    query.start = query.begin() | {"positions": {"T": last + 1}}
    query.restart()
    with pytest.raises(OtherCluster, match="put back to an earlier state"):
        query.plan()


def test_a_start_at_an_id_that_is_to_come_is_none_that_is_ahead(
    world: World, follow: Follow
) -> None:
    last = publish(world, "1")
    query = follow(startingOffsets=last + 2)
    assert query.bodies() == []
    publish(world, "2", "3")
    assert query.bodies() == ["3"]


def test_a_start_at_an_id_that_is_gone_is_refused(world: World, follow: Follow) -> None:
    first = publish(world, "1")
    publish(world, "2")
    lose(world)
    with pytest.raises(MessagesGone):
        follow(startingOffsets=first).begin()


def test_the_earliest_is_the_earliest_that_is_kept(world: World, follow: Follow) -> None:
    publish(world, "1")
    lose(world)
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 3600")
    publish(world, "2")
    assert follow().bodies() == ["2"]


def test_a_query_is_pinged_while_a_batch_takes_long(world: World, follow: Follow) -> None:
    publish(world, "1")
    query = follow(timeout=15)
    query.begin()
    before = world.owner.query("SELECT pinged_at FROM psqlmessages_subscription")
    later = "SELECT pinged_at > %s + interval '1 s' FROM psqlmessages_subscription"
    world.wait_for(later, before)


def test_a_database_that_goes_away_is_waited_for(
    world: World, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    publish(world, "1")
    query = follow()
    first = query.bodies()
    publish(world, "2")
    with ThreadPoolExecutor(1) as pool:
        with away(world, "user2"):
            rest = pool.submit(query.bodies)
            said(caplog, "the database is away, trying again")
        assert (first, rest.result(100)) == (["1"], ["2"])
    assert any("the database is back after" in record.message for record in caplog.records)


def test_an_executor_waits_too(
    world: World, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    publish(world, "1")
    query = follow()
    query.begin()
    query.plan()
    with ThreadPoolExecutor(1) as pool:
        with away(world, "user2"):
            rows = pool.submit(query.read)
            said(caplog, "the database is away, trying again")
        assert [row["body"] for row in rows.result(100)] == ["1"]


def test_a_kept_connection_that_was_ended_is_replaced(world: World, follow: Follow) -> None:
    publish(world, "1")
    query = follow()
    first = query.bodies()
    world.watcher.query(
        "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
        " WHERE usename = 'user2'"
    )
    publish(world, "2")
    assert (first, query.bodies()) == (["1"], ["2"])


def test_a_dead_kept_connection_asks_for_no_patience(
    world: World, dsn_file: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    reader = reading.Reader({"dsnFile": dsn_file("user2")})
    one = reading.Read((reading.Statement("SELECT 1 AS one"),))
    schema = pa.schema([pa.field("one", pa.int32())])
    list(reader.batches(one, schema))
    world.watcher.query(
        "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
        " WHERE usename = 'user2'"
    )
    assert [batch.num_rows for batch in reader.batches(one, schema)] == [1]
    assert not caplog.records


def end_sessions(world: World) -> None:
    world.watcher.query(
        "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
        " WHERE usename = 'user2'"
    )


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


def test_a_password_that_was_changed_is_told_at_once(world: World, follow: Follow) -> None:
    publish(world, "1")
    query = follow()
    query.begin()
    file = Path(query.options["dsnFile"])
    file.write_text(file.read_text().replace("@127.0.0.1", "x@127.0.0.1"))
    end_sessions(world)
    with pytest.raises(LoginRefused, match="password authentication failed"):
        query.plan()


def test_a_wait_ends_after_its_patience() -> None:
    with pytest.raises(ServerUnreachable, match="the database is away: refused"):
        Waiting(timedelta(0)).after("refused\nmore")


def test_a_wait_is_told_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, waiting.logger.name)
    waits = Waiting()
    waits.after("refused")
    waits.after("refused")
    waits.over()
    assert [record.message.split(" after ")[0] for record in caplog.records] == [
        "the database is away, trying again: refused",
        "the database is back",
    ]


def test_a_wrong_address_is_told_at_once(world: World, tmp_path: Any) -> None:
    file = tmp_path / "dsn"
    file.write_text(world.server.url("user2").replace("@127.0.0.1", "x@127.0.0.1"))
    query = Query(topic="T", dsnFile=str(file))
    with pytest.raises(ServerUnreachable, match="cannot connect"):
        query.begin()


def test_no_address_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSQLMESSAGES_DSN", raising=False)
    monkeypatch.delenv("PSQLMESSAGES_DSN_FILE", raising=False)
    with pytest.raises(DsnMissing, match="set PSQLMESSAGES_DSN"):
        Query(topic="T").begin()


def test_a_pickled_reader_holds_no_password(world: World, follow: Follow) -> None:
    query = follow()
    query.begin()
    password = world.server.server.home.passwords.get("user2")
    assert password is not None
    assert password in world.server.url("user2")
    assert password.encode() not in pickle.dumps(query.fresh_reader())
