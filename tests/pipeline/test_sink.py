"""The sink through Spark: DataFrames and streams enter topics and queues."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline import sinks
from tests.pipeline.sinks import TOPIC, Sink
from tests.sql.conftest import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAIT_SECONDS = 600


@pytest.fixture
def sink(world: World, dsn_file: Callable[[str], str]) -> Sink:
    return sinks.made(world, dsn_file)


def write(frame: DataFrame, options: dict[str, str], mode: str = "append") -> None:
    frame.write.format("psqlmessages").options(**options).mode(mode).save()


def refusal(frame: DataFrame, options: dict[str, str], mode: str = "append") -> str:
    with pytest.raises(Exception, match="psqlmessages") as raised:
        write(frame, options, mode)
    return str(raised.value)


def stream(spark: SparkSession, options: dict[str, str], checkpoint: str, **reading: Any) -> None:
    """Write all that the topic IN holds to the sink, and end."""
    source = {"topic": "IN", "timeout": 60, "dsnFile": options["dsnFile"], **reading}
    query = (
        spark.readStream.format("psqlmessages").options(**source).load().select("body")
        .writeStream.format("psqlmessages").options(**options)
        .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    )  # fmt: skip
    try:
        assert query.awaitTermination(WAIT_SECONDS), "the stream does not end"
    finally:
        query.stop()


def test_rows_are_published_in_the_order_of_partitions_and_rows(
    spark: SparkSession, sink: Sink
) -> None:
    write(spark.range(0, 25_000, 1, 2).selectExpr("CAST(id AS string) AS body"), sink.topic)
    assert sink.bodies() == [str(number) for number in range(25_000)]
    assert sink.staged() == 0


def test_bodies_keep_their_encoding(spark: SparkSession, sink: Sink) -> None:
    frame = spark.createDataFrame(
        [("a", None), ('{"b":1}', "json"), ("Yw==", "b64"), (None, None)],
        "body string, enc string",
    )
    write(frame.coalesce(1), sink.topic)
    assert sink.rows() == [("a", None), ('{"b":1}', "json"), ("Yw==", "b64"), ("", None)]


def test_binary_bodies_are_stored_as_base64(spark: SparkSession, sink: Sink) -> None:
    write(spark.createDataFrame([(b"\0\xff",), (None,)], "body binary").coalesce(1), sink.topic)
    assert sink.rows() == [("AP8=", "b64"), ("", "b64")]


def test_elements_have_headers_and_keys(spark: SparkSession, sink: Sink) -> None:
    frame = spark.createDataFrame(
        [("a", '{"n":1}', "1"), ("b", None, "2"), ("again", None, "1"), ("c", "", None)],
        "body string, headers string, key string",
    )
    write(frame.coalesce(1), sink.queue)
    assert sink.pushed() == ["a", "b", "c"]
    assert sink.world.owner.query("SELECT headers FROM psqlmessages_element WHERE body = 'a'") == {
        "n": 1
    }


def test_keys_that_were_pushed_before_add_nothing(spark: SparkSession, sink: Sink) -> None:
    frame = spark.createDataFrame([("a", "1"), ("b", "2")], "body string, key string")
    write(frame, sink.queue)
    write(frame, sink.queue)
    assert sorted(sink.pushed()) == ["a", "b"]


def test_an_empty_frame_commits_nothing(spark: SparkSession, sink: Sink) -> None:
    write(spark.range(0).selectExpr("CAST(id AS string) AS body"), {**sink.topic, "query": "none"})
    assert sink.bodies() == []
    assert not sink.world.watcher.query("SELECT count(*) FROM messages._batch WHERE query = 'none'")


def test_a_named_write_is_done_once(spark: SparkSession, sink: Sink) -> None:
    frame = spark.createDataFrame([("a",)], "body string")
    options = {**sink.topic, "query": f"import {sink.dsn_file}"[-200:]}
    write(frame, options)
    write(frame, options)
    assert sink.bodies() == ["a"]
    assert sink.staged() == 0


def test_writes_without_a_name_are_done_each_time(spark: SparkSession, sink: Sink) -> None:
    frame = spark.createDataFrame([("a",)], "body string")
    write(frame, sink.topic)
    write(frame, sink.topic)
    assert sink.bodies() == ["a", "a"]


def test_what_no_rule_allows_is_refused_before_anything_is_staged(
    spark: SparkSession, sink: Sink, dsn_file: Callable[[str], str]
) -> None:
    frame = spark.createDataFrame([("a",)], "body string")
    text = refusal(frame, {"topic": TOPIC, "dsnFile": dsn_file("user2")})
    assert f"cannot use Topic to {TOPIC}" in text
    assert sink.staged() == 0


def test_overwriting_is_refused(spark: SparkSession, sink: Sink) -> None:
    text = refusal(spark.createDataFrame([("a",)], "body string"), sink.topic, "overwrite")
    assert "what was published cannot be overwritten" in text


def test_headers_that_are_no_object_are_refused_and_nothing_stays_staged(
    spark: SparkSession, sink: Sink
) -> None:
    frame = spark.createDataFrame([("a", "[]"), ("b", "{}")], "body string, headers string")
    assert "a JSON object of at most 64 KiB is needed" in refusal(frame, sink.queue)
    assert sink.pushed() == []
    assert sink.staged() == 0


def test_a_stream_writes_each_batch_and_wakes_a_waiting_subscriber_once_for_each(
    spark: SparkSession, sink: Sink, fill: Callable[..., int], checkpoint: str
) -> None:
    reader = sink.reader()
    fill("IN", 30)
    stream(spark, sink.topic, checkpoint, maxRowsPerTrigger=20)
    assert reader.events() == [f"published {TOPIC}"] * 2
    assert [row.payload for row in reader.read("READER", TOPIC)] == [
        f"message {number}" for number in range(1, 31)
    ]


def test_a_stream_goes_on_from_its_checkpoint_into_a_queue(
    spark: SparkSession, sink: Sink, fill: Callable[..., int], checkpoint: str
) -> None:
    fill("IN", 3, "first %s")
    stream(spark, sink.queue, checkpoint)
    fill("IN", 2, "second %s")
    stream(spark, sink.queue, checkpoint)
    assert sink.pushed() == ["first 1", "first 2", "first 3", "second 1", "second 2"]
    assert sink.staged() == 0


def test_a_named_write_in_foreach_batch_is_done_once_for_each_batch(
    spark: SparkSession, sink: Sink, fill: Callable[..., int], checkpoint: str
) -> None:
    def twice(frame: DataFrame, _: int) -> None:
        for _again in range(2):
            write(frame.select("body"), {**sink.topic, "query": "each"})

    fill("IN", 30)
    query = (
        spark.readStream.format("psqlmessages")
        .options(topic="IN", maxRowsPerTrigger=20, dsnFile=sink.dsn_file).load()
        .writeStream.foreachBatch(twice).option("checkpointLocation", checkpoint)
        .trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(WAIT_SECONDS)
    assert sorted(sink.bodies()) == sorted(f"message {number}" for number in range(1, 31))


def test_what_is_written_can_be_read_back(
    spark: SparkSession, sink: Sink, dsn_file: Callable[[str], str]
) -> None:
    sink.world.rules(f"user2 READER Topic {TOPIC} R 10")
    write(spark.sql("SELECT to_json(struct(1 AS a)) AS body, 'json' AS enc"), sink.topic)
    (row,) = (
        spark.read.format("psqlmessages")
        .options(topic=TOPIC, client="READER", dsnFile=dsn_file("user2")).load().collect()
    )  # fmt: skip
    assert (row.sender, json.loads(row.body), row.enc) == ("pipeline", {"a": 1}, "json")
