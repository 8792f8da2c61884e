"""Streams of topics, driven as Spark does: every message once, whatever comes in between."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from psycopg.errors import DeadlockDetected
from pyspark.sql.types import StructType

from psqlmessages import exceptions
from psqlmessages.pipeline import columns, errors, topic_ranges
from psqlmessages.pipeline import reader as reader_module
from psqlmessages.pipeline.arrow_connections import MAX_CONNECTIONS, ArrowConnections
from psqlmessages.pipeline.database import Database, OutageRetry
from psqlmessages.pipeline.reader import ReadStatement
from psqlmessages.pipeline.topic_ranges import IdRange, StreamStatements
from tests.pipeline.driving import Query, Source, away, said

POSITION = "SELECT position FROM psqlmessages_subscription WHERE ident = 'READ' AND topic = %s"
PINGED = "SELECT pinged_at FROM psqlmessages_subscription WHERE topic = 'P2'"
CONFLICT = """
    CREATE SEQUENCE conflicts;
    CREATE FUNCTION conflict() RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
        CASE nextval('conflicts') % 3
            WHEN 1 THEN RAISE SQLSTATE '40P01' USING MESSAGE = 'conflict';
            WHEN 2 THEN RAISE SQLSTATE '40001';
            ELSE RETURN currval('conflicts');
        END CASE;
    END $$
"""
LARGE = [digit * 600_000 for digit in "1234"]


def test_readers_wait_for_late_commits_and_skip_rolled_back_messages(source: Source):
    late, never = source.world.program("user1"), source.world.program("user1")
    query = source.follow()
    source.publish("1", "2")
    assert query.bodies() == ["1", "2"]
    for program, body in ((late, "early id"), (never, "never")):
        program.execute("BEGIN")
        program.ok("publish", "SEND", "T", body)
    source.publish("later id")
    assert query.bodies() == []
    late.execute("COMMIT")
    never.execute("ROLLBACK")
    assert [query.bodies(), query.bodies()] == [["early id", "later id"], []]


def test_all_columns_of_any_topic_are_returned(source: Source):
    name = "T'\\\" $1 %s ü"
    source.keep(name)
    source.sender.ok("publish", "SEND", name, "it's \\ \n", "json")
    row = source.owner.execute("SELECT id, published_at FROM messages.stored").fetchone()
    found = tuple(source.follow(name).batch()[0].values())
    assert found == (row[0], name, "SEND", "it's \\ \n", "json", None, row[1])


def test_each_batch_has_the_requested_rows_up_to_the_available_ones(source: Source):
    source.keep("T2")
    for number in range(10):
        source.publish(f"{number}", topic="T" if number % 3 else "T2")
    query = source.follow("T,T2", maxRowsPerTrigger=4)
    assert query.available_now() == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]
    newest = source.publish("a", "b", "c", "d", "e")
    query.reader.prepareForTriggerAvailableNow()
    first = query.bodies()
    source.publish("f")
    assert query.reader.reportLatestOffset()["positions"]["T"] == newest
    assert [first, query.bodies(), query.bodies()] == [["a", "b", "c", "d"], ["e"], []]


def test_a_batch_is_read_again_after_a_crash_and_its_messages_go_once_it_is_done(source: Source):
    query = source.follow()
    start = query.begin()["positions"]["T"]
    source.publish("1", "2")
    query.plan()
    first = query.read()
    query.restart()
    source.publish("3")
    source.prune()
    assert first == query.read()
    assert source.owner.query(POSITION, "T") == start
    query.done()
    # Spark calls commit() for a batch only after the next one is planned.
    query.plan()
    assert source.owner.query(POSITION, "T") == query.start["positions"]["T"]
    assert [row["body"] for row in query.read()] == ["3"]
    query.done()
    query.plan()
    source.prune()
    assert source.owner.query("SELECT count(*) FROM messages.stored") == 0


def test_a_topic_that_a_pattern_matches_later_is_read_from_its_beginning(source: Source):
    query = source.follow("P*")
    assert query.bodies() == []
    source.keep("P1")
    source.publish("1", topic="P1")
    assert query.bodies() == ["1"]
    source.keep("P2")
    assert query.bodies() == []
    assert source.owner.query(POSITION, "P2") == 0
    source.publish("2", "3", topic="P2")
    assert query.bodies() == ["2", "3"]


def test_a_query_starts_at_the_given_position(source: Source):
    for body in "123":
        source.publish(body)
    of_second = "SELECT published_at, id FROM messages.stored WHERE body = '2'"
    at, second = source.owner.execute(of_second).fetchone()
    begun = []
    for starting, bodies in (
        ("earliest", "1234"), ("latest", "4"), (second, "234"), (at.isoformat(), "234"),
    ):  # fmt: skip
        source.world.rules(f"user2 READ{len(begun)} Topic T R 10")
        query = source.follow(client=f"READ{len(begun)}", startingOffsets=starting)
        query.begin()
        begun.append((query, list(bodies)))
    assert source.follow(startingOffsets="2999-01-01T00:00:00Z").bodies() == []
    source.publish("4")
    for query, bodies in begun:
        # The first batch from the latest position is empty.
        assert query.bodies() + query.bodies() == bodies, query.options


def test_a_query_from_the_latest_keeps_its_first_position(source: Source):
    query = source.follow(startingOffsets="latest")
    begun = query.begin()
    source.publish("1")
    # Spark calls this twice before its first batch.
    again = query.begin()
    source.prune()
    assert again == begun
    query.plan()
    planned = query.end
    query.restart()
    # After a kill in the first batch, Spark starts at the planned offset of its log.
    query.begin()
    query.start = planned
    assert query.bodies() == ["1"]


def test_a_future_start_id_is_awaited_and_a_removed_one_refused(source: Source):
    last = source.publish("1")
    query = source.follow(startingOffsets=last + 2)
    assert query.bodies() == []
    source.publish("2", "3")
    assert query.bodies() == ["3"]
    source.lose()
    with pytest.raises(errors.MessagesGone):
        source.follow(startingOffsets=last).begin()
    source.keep("T")
    source.publish("4")
    assert source.follow().bodies() == ["4"]


def test_a_topic_without_a_right_is_refused(source: Source):
    for rule, topic, refused in (
        ("ELSE R", "T", exceptions.DestinationNotAuthorized),
        ("T W", "T", exceptions.ModeNotAuthorized),
        ("T* R", "T7", exceptions.TopicNotExistent),
    ):
        source.world.rules(f"user2 OTHER Topic {rule} 10")
        with pytest.raises(refused, match=topic):
            source.follow(topic, client="OTHER").begin()
    source.publish("1")
    query = source.follow()
    query.begin(planned=True)
    source.owner.execute("DELETE FROM messages.auth WHERE ident = 'READ'")
    with pytest.raises(exceptions.IdentNotExistent, match="Client READ don't exist"):
        query.read()


def test_gaps_are_read_once(source: Source, fill: Callable[..., int], monkeypatch):
    for name, size in (("_MAX_ROWS", 10), ("_MAX_IDS", 100), ("_CALLS_PER_STATEMENT", 3)):
        monkeypatch.setattr(topic_ranges, name, size)
    monkeypatch.setattr(topic_ranges, "_ROWS_PER_TOPIC", 5)
    fills = [("T", 57), ("ELSE", 1500), ("T", 3), ("U", 120), ("ELSE", 40), ("T", 200), ("V", 5)]
    for topic, count in fills:
        fill(topic, count, f"{topic} %s")
    source.owner.execute("SELECT setval('messages._stream_id', (10 ^ 15)::bigint)")
    last = max(fill(topic, count, f"late {topic} %s") for topic, count in fills)

    def read(names: tuple[str, ...], topics: list[str], *conditions: str) -> list[Any]:
        schema = StructType([columns.TOPIC_SCHEMA[name] for name in names])
        ranges = [IdRange(topic, 0, last) for topic in topics]
        calls = StreamStatements("READ", ranges, names, conditions)
        batches = reader_module.read_batches({"dsnFile": source.dsn_file}, calls, schema)
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    for names in (("id", "body"), ("body",), ("topic", "sender", "published_at")):
        for topics in (["T"], ["U", "T", "V"]):
            found = read(names, topics)
            assert sorted(found) == sorted(read(names, topics, "r.id > 0"))
            stored = source.owner.execute(
                f"SELECT {', '.join(names)} FROM messages.stored WHERE topic = ANY (%s)"
                " ORDER BY id", [topics]
            ).fetchall()  # fmt: skip
            assert sorted(found) == sorted(stored), (names, topics)
            assert len(topics) > 1 or found == stored
    reader_module._connections.close()


def test_positions_of_another_database_or_an_earlier_state_are_refused(source: Source):
    last = source.publish("1")
    query = source.follow()
    begun = query.begin()
    query.start = {"cluster": "7000000000000000000/5", "positions": {"T": 0}}
    with pytest.raises(errors.CheckpointRefused, match="to the database 7000000000000000000/5"):
        query.plan()
    query.start = begun
    query.plan()
    query.end = query.end | {"cluster": "7/5"}
    with pytest.raises(errors.CheckpointRefused):
        query.read()
    query.start = begun | {"positions": {"T": last + 1}}
    query.restart()
    with pytest.raises(errors.CheckpointRefused, match="restored to an earlier state"):
        query.plan()


def test_messages_removed_while_a_query_was_stopped_end_it_or_are_reported(source: Source, caplog):
    first = source.publish("1")
    query, lax = source.follow(), source.follow(failOnDataLoss="false")
    query.batch()
    query.restart()
    lax.start = query.start
    last = source.publish("2", "3")
    source.lose()
    with pytest.raises(errors.MessagesGone, match="failOnDataLoss=false") as lost:
        query.plan()
    told = f"topic T: this query has read up to {first}, but messages up to {last}"
    assert told in str(lost.value)
    source.publish("4")
    caplog.clear()
    lax.plan()
    lax.plan()
    assert [row["body"] for row in lax.read()] == ["4"]
    # The driver logs it once, and each task once.
    assert sum("loses at most 2 messages" in record.message for record in caplog.records) == 2
    amid = source.follow()
    amid.begin()
    source.publish("5")
    amid.plan()
    source.lose()
    with pytest.raises(errors.MessagesGone):
        amid.read()


def test_a_topic_of_a_pattern_that_went_is_lost_as_its_messages_are(source: Source):
    source.publish("1", topic="P" + "1" * 99)
    last = source.publish("2", topic="P2")
    strict, lax = source.follow("P*"), source.follow("P*", failOnDataLoss="false")
    strict.begin(planned=True)
    source.owner.execute("DELETE FROM psqlmessages_subscription")
    source.owner.query("SELECT messages._rebuild_topics(array_agg(id)) FROM psqlmessages_topic")
    source.owner.query("SELECT messages._prune_streams()")
    with pytest.raises(errors.MessagesGone, match="was removed, or no rule"):
        strict.read()
    lax.start, lax.end = strict.start, strict.end
    assert lax.read() == []
    lax.done()
    source.publish("3", topic="P2")
    assert lax.bodies() == ["3"]
    assert lax.start["positions"]["P2"] > last


def test_a_query_is_pinged_while_a_batch_takes_long(source: Source):
    for topic in ("P1", "P2"):
        source.publish("1", topic=topic)
    source.follow("P*", timeout=3).begin()
    # A removed topic of a pattern does not affect the others.
    source.owner.execute("DELETE FROM psqlmessages_streammessage")
    source.owner.execute("DELETE FROM psqlmessages_topic WHERE name = 'P1'")
    before = source.owner.query(PINGED)
    source.world.wait_for(f"SELECT ({PINGED}) > %s + interval '0.5 s'", before)


def test_driver_and_executors_await_their_database(source: Source, caplog):
    source.publish("1")
    query = source.follow()
    assert query.bodies() == ["1"]
    # A closed connection is replaced without a log entry.
    source.end_sessions()
    source.publish("2")
    assert query.bodies() == ["2"]
    assert not caplog.records
    source.publish("3")
    with ThreadPoolExecutor(1) as pool:
        for step in (query.plan, query.read):
            caplog.clear()
            with away(source.world, "user2"):
                waiting_ = pool.submit(step)
                said(caplog, "the database is unreachable, retrying")
            found = waiting_.result(100)
            said(caplog, "the database is back after")
            assert len([r for r in caplog.records if "the database is" in r.message]) == 2
    assert [row["body"] for row in found] == ["3"]
    with pytest.raises(exceptions.ServerUnreachable, match="the database is unreachable: refused"):
        OutageRetry(timedelta(0)).wait_after("refused\nmore")


def test_deadlocks_and_serialization_failures_are_retried_and_logged_as_such(source, caplog):
    source.owner.execute(CONFLICT)
    sql, schema = "SELECT conflict() AS id", StructType([columns.TOPIC_SCHEMA["id"]])
    dsn_options = {"dsnFile": source.dsn_file}
    try:
        (batch,) = reader_module.read_batches(dsn_options, [ReadStatement(sql)], schema)
        with closing(Database(dsn_options)) as database:
            rows = database.fetch_rows(sql)
    finally:
        source.owner.execute("DROP FUNCTION conflict; DROP SEQUENCE conflicts")
        reader_module._connections.close()
    assert (batch["id"].to_pylist(), rows) == ([3], [(6,)])
    assert "PostgreSQL rolled back a transaction, retrying: conflict" in caplog.text
    assert "the database is" not in caplog.text
    with pytest.raises(DeadlockDetected):
        OutageRetry(timedelta(0)).wait_after(DeadlockDetected("conflict"))


def test_a_forked_process_fills_the_cache_with_its_own_connections_only(source: Source):
    cache, address = ArrowConnections(), source.world.server.url("user2")
    addresses = [f"{address}?application_name=fork{number}" for number in range(MAX_CONNECTIONS)]

    def check() -> None:
        assert [cache.get(each) for each in addresses] == [cache.get(each) for each in addresses]

    check()
    process = get_context("fork").Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0
    cache.close()


def test_a_broken_read_goes_on_unless_messages_went(source: Source, monkeypatch):
    monkeypatch.setattr(reader_module, "_BUFFER_BYTES", 0)
    source.publish(*LARGE)
    query = source.follow(partitions=1, failOnDataLoss=False)
    query.begin(planned=True)
    (partition,) = query.reader.partitions(query.start or {}, query.end or {})
    batches = iter(query.reader.read(partition))
    first = next(batches)
    source.end_sessions()
    assert first.num_rows < 4
    assert [body for batch in (first, *batches) for body in batch["body"].to_pylist()] == LARGE
    batches = iter(query.reader.read(partition))
    next(batches)
    source.end_sessions()
    source.lose()
    with pytest.raises(errors.ReadBroken, match="removed before it was repeated"):
        list(batches)


def test_a_wrong_address_is_reported_immediately(source: Source):
    query = source.follow()
    query.begin()
    password = source.world.server.server.home.passwords.get("user2")
    assert password in source.world.server.url("user2")
    assert password.encode() not in pickle.dumps(query.fresh_reader())
    file = Path(source.dsn_file)
    file.write_text(file.read_text().replace("@127.0.0.1", "x@127.0.0.1"))
    source.end_sessions()
    with pytest.raises(errors.LoginRefused, match="password authentication failed"):
        query.plan()
    with pytest.raises(exceptions.ServerUnreachable, match="cannot connect"):
        Query(topic="T", dsnFile=str(file)).begin()
