"""The sink's writers, without a session: columns, staging, commits that are replayed or aborted."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql import types

from psqlmessages.exceptions import ConnectionLost, DestinationNotAuthorized, MessagesError
from psqlmessages.pipeline import staging
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.errors import ColumnRefused, OptionRefused
from psqlmessages.pipeline.sink import MessagesStreamWriter
from tests.pipeline.driving import away, said
from tests.pipeline.sinks import TOPIC, Sink

STRING, BINARY = types.StringType(), types.BinaryType()
PAIR = types.StructType().add("a", STRING)
EITHER = "either the option topic or the option queue"
COLUMNS: tuple[tuple[list[tuple[str, types.DataType]], str], ...] = (
    ([("enc", STRING)], "the column body is missing"),
    ([("body", STRING), ("id", STRING)], "cannot write column id. Known columns: body, enc"),
    ([("body", STRING), ("key", STRING)], "cannot write column key"),
    ([("body", STRING), ("body", STRING)], "twice"),
    ([("body", PAIR)], "to_json(body) AS body, 'json' AS enc"),
    ([("body", types.ArrayType(STRING))], "to_json(body) AS body"),
    ([("body", types.MapType(STRING, STRING))], "to_json(body) AS body"),
    ([("body", types.LongType())], "of type bigint, not a string or binary"),
    ([("body", types.NullType())], "CAST(body AS string)"),
    ([("body", STRING), ("enc", BINARY)], "the column enc is of type binary, not a string"),
    ([("body", BINARY), ("enc", STRING)], "a binary body is stored as b64"),
)
OPTIONS: tuple[tuple[dict[str, str], str], ...] = (
    ({"topic": "A", "topics": "B"}, "Known options: client, dsnFile, query, queue, topic"),
    ({"topic": "A", "startingOffsets": "latest"}, "unknown option startingoffsets"),
    ({"topic": "A", "path": "/x"}, "unknown option path"),
    ({"topic": "A", "queue": "B"}, EITHER),
    ({}, EITHER),
)
SCHEMA = types.StructType().add("body", STRING)
KEPT = "application_name = 'psqlmessages pipeline' AND datname = current_database()"


def writer(options: dict[str, str]) -> MessagesStreamWriter:
    return MessagesStreamWriter({**options, "query": uuid4().hex}, SCHEMA, overwrite=False)


def batches(*bodies: str) -> Iterator[Any]:
    for body in bodies:
        yield pa.record_batch({"body": pa.array([body])})


def failing(*bodies: str) -> Iterator[Any]:
    yield from batches(*bodies)
    raise ArithmeticError("the task fails")


def test_attempts_that_fail_or_are_outrun_or_aborted_publish_nothing(sink: Sink):
    stream = writer(sink.topic)
    with pytest.raises(ArithmeticError, match="the task fails"):
        stream.write(failing("a", "b"))
    assert sink.staged() == 0
    stream.abort([None, stream.write(batches("a"))], 0)
    assert (sink.staged(), sink.bodies()) == (0, [])
    outrun, chosen = stream.write(batches("a")), stream.write(batches("a"))
    stream.commit([chosen], 0)
    assert (sink.bodies(), sink.staged()) == (["a"], outrun.rows)


def refusal(options: dict[str, str], columns: list[tuple[str, types.DataType]]) -> str:
    """Return why no writer can be created; "" if it can."""
    schema = types.StructType()
    for name, kind in columns:
        schema = schema.add(name, kind)
    try:
        MessagesStreamWriter(options, schema, overwrite=False)
    except (ColumnRefused, OptionRefused) as error:
        return str(error)
    return ""


def test_unknown_columns_and_options_of_the_sink_are_refused(monkeypatch):
    # The refusal must come before the connection: this address fails.
    monkeypatch.setenv("PSQLMESSAGES_DSN", "host=127.0.0.1 port=1")
    found = [(refusal({"topic": "A"}, columns), told) for columns, told in COLUMNS]
    found += [(refusal(options, [("body", STRING)]), told) for options, told in OPTIONS]
    headers: list[tuple[str, types.DataType]] = [("body", STRING), ("headers", PAIR)]
    found.append((refusal({"queue": "A"}, headers), "to_json(headers) AS headers"))
    assert [pair for pair in found if pair[1] not in pair[0]] == []


def test_a_failed_commit_is_reported_and_publishes_nothing(sink: Sink):
    stream = writer(sink.topic)
    with pytest.raises(MessagesError, match="cannot be staged: invalid byte sequence"):
        stream.write(batches("a\0b"))
    assert sink.staged() == 0
    message = stream.write(batches("a", "b"))
    sink.world.watcher.connection.execute("TRUNCATE messages.staged")
    with pytest.raises(MessagesError, match="0 of 2 staged rows exist"):
        stream.commit([message], 0)
    unnamed = MessagesStreamWriter(sink.topic, SCHEMA, overwrite=False)
    with pytest.raises(MessagesError, match="name the query by the option query"):
        unnamed.commit([unnamed.write(batches("a"))], 0)
    # A rule that is removed before the commit counts.
    message = stream.write(batches("a"))
    sink.world.owner.connection.execute("DELETE FROM messages.auth WHERE type = 'Topic'")
    with pytest.raises(DestinationNotAuthorized):
        stream.commit([message], 0)
    assert sink.bodies() == []


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_cut_at_the_commit_is_no_loss(sink: Sink, monkeypatch, *, is_done: bool):
    stream = writer(sink.topic)
    message = stream.write(batches("a"))
    run, breaks = Database._run, iter([True])

    def broken(database: Database, statement: str, arguments: Any) -> Any:
        is_broken = next(breaks, False)
        answer = run(database, statement, arguments) if is_done or not is_broken else None
        if is_broken:
            database._drop()
            raise ConnectionLost("the answer did not come")
        return answer

    monkeypatch.setattr(Database, "_run", broken)
    stream.commit([message], 0)
    assert sink.bodies() == ["a"]
    assert sink.staged() == 0


@pytest.mark.parametrize("limit", [1, staging._BUFFER_BYTES], ids=["between parts", "in a copy"])
def test_a_lost_connection_loses_no_row(sink: Sink, monkeypatch, limit: int):
    monkeypatch.setattr(staging, "_BUFFER_BYTES", limit)
    stream = writer(sink.topic)

    def breaking() -> Iterator[Any]:
        yield from batches("a", "b")
        sink.world.end_backends(KEPT)
        yield from batches("c")

    stream.commit([stream.write(breaking())], 0)
    assert (sink.bodies(), sink.staged()) == (["a", "b", "c"], 0)


def test_a_process_of_spark_that_is_new_waits_for_a_database_that_was_there(sink: Sink, caplog):
    """Spark starts processes at any time: a new one does not know the state of others."""
    writer(sink.topic)
    staging.close()
    with ThreadPoolExecutor(1) as pool:
        with away(sink.world, "user1"):
            stream = pool.submit(writer, sink.topic)
            said(caplog, "the database is unreachable, retrying")
            assert not stream.done()
        assert stream.result(100).destination.name == TOPIC
