"""The sink through Spark: DataFrames and streams enter topics and queues."""

from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

from tests.pipeline.sinks import TOPIC, Sink


def write(frame: DataFrame, options: dict[str, str], mode: str = "append") -> None:
    frame.write.format("psqlmessages").options(**options).mode(mode).save()


@pytest.fixture
def stream(
    spark: SparkSession, sink: Sink, checkpoint: str
) -> Callable[[Callable[[DataStreamWriter], DataStreamWriter]], None]:
    """Write all of the topic IN in batches of 20 rows."""

    def run(to: Callable[[DataStreamWriter], DataStreamWriter]) -> None:
        source = {**sink.topic, "topic": "IN", "timeout": 60, "maxRowsPerTrigger": 20}
        read = spark.readStream.format("psqlmessages").options(**source).load().select("body")
        write = to(read.writeStream).option("checkpointLocation", checkpoint)
        query = write.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(600), "the stream does not end"
        finally:
            query.stop()

    return run


def test_rows_keep_their_order(spark: SparkSession, sink: Sink):
    write(spark.range(0, 5_000, 1, 2).selectExpr("CAST(id AS string) AS body"), sink.topic)
    assert sink.bodies() == [str(number) for number in range(5_000)]
    encoded: list[tuple[str | None, str | None]] = [
        ("a", None), ('{"b":1}', "json"), ("Yw==", "b64"), (None, None)
    ]  # fmt: skip
    write(spark.createDataFrame(encoded, "body string, enc string").coalesce(1), sink.topic)
    write(spark.createDataFrame([(b"\0\xff",), (None,)], "body binary").coalesce(1), sink.topic)
    assert sink.rows()[5_000:] == [*encoded[:3], ("", None), ("AP8=", "b64"), ("", "b64")]
    write(spark.sql("SELECT to_json(struct(1 AS a)) AS body, 'json' AS enc"), sink.topic)
    assert sink.rows()[-1] == ('{"a":1}', "json")
    assert sink.staged() == 0


def test_a_write_with_a_name_is_done_once_and_others_each_time(spark: SparkSession, sink: Sink):
    frame = spark.createDataFrame([("a",)], "body string")
    named = {**sink.topic, "query": f"import {sink.topic['dsnFile']}"[-200:]}
    for options in (named, named, sink.topic, sink.topic):
        write(frame, options)
    assert sink.bodies() == ["a"] * 3
    write(frame.where("false"), {**sink.topic, "query": "none"})
    assert sink.bodies() == ["a"] * 3
    assert not sink.world.watcher.query("SELECT count(*) FROM messages._batch WHERE query = 'none'")


def test_elements_have_headers_and_keys(spark: SparkSession, sink: Sink):
    rows = [("a", '{"n":1}', "1"), ("b", None, "2"), ("again", None, "1"), ("c", "", None)]
    frame = spark.createDataFrame(rows, "body string, headers string, key string")
    write(frame.coalesce(1), sink.queue)
    write(frame.where("key IS NOT NULL"), sink.queue)
    assert sink.pushed() == ["a", "b", "c"]
    headers = "SELECT headers FROM psqlmessages_element WHERE body = 'a'"
    assert sink.world.owner.query(headers) == {"n": 1}


def test_a_refusal_leaves_no_rows(spark: SparkSession, sink: Sink, dsn_file: Callable[[str], str]):
    plain = spark.createDataFrame([("a",)], "body string")
    headers = spark.createDataFrame([("a", "[]"), ("b", "{}")], "body string, headers string")
    stranger = {"topic": TOPIC, "dsnFile": dsn_file("user2")}
    for frame, options, mode, told in (
        (plain, stranger, "append", f"cannot use Topic to {TOPIC}"),
        (plain, sink.topic, "overwrite", "published messages cannot be overwritten"),
        (headers, sink.queue, "append", "a JSON object of at most 64 KiB is needed"),
    ):
        with pytest.raises(Exception, match="psqlmessages") as raised:
            write(frame, options, mode)
        assert told in str(raised.value)
    assert (sink.staged(), sink.bodies(), sink.pushed()) == (0, [], [])


def test_a_stream_wakes_a_subscriber_once_for_each_batch_and_goes_on_from_its_checkpoint(
    sink: Sink, fill: Callable[..., int], stream: Callable[..., None]
):
    sink.world.rules(f"user2 READER Topic {TOPIC} R 10")
    reader = sink.world.program("user2")
    reader.read("READER", TOPIC)
    reader.ok("connect_stream", "READER")
    fill("IN", 30)
    stream(lambda write: write.format("psqlmessages").options(**sink.topic))
    assert reader.events() == [f"published {TOPIC}"] * 2
    fill("IN", 3, "later %s")
    stream(lambda write: write.format("psqlmessages").options(**sink.topic))
    bodies = [f"message {number}" for number in range(1, 31)] + [f"later {n}" for n in (1, 2, 3)]
    assert reader.got("READER", TOPIC) == bodies
    assert sink.staged() == 0


def test_a_named_write_in_foreach_batch_is_done_once_for_each_batch(
    sink: Sink, fill: Callable[..., int], stream: Callable[..., None]
):
    def twice(frame: DataFrame, _: int) -> None:
        for _again in range(2):
            write(frame, {**sink.topic, "query": "each"})

    fill("IN", 30)
    stream(lambda write: write.foreachBatch(twice))
    assert sorted(sink.bodies()) == sorted(f"message {number}" for number in range(1, 31))
