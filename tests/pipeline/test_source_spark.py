"""The source in a Spark session: batch reads, streams with checkpoints, query plans."""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from tests.pipeline.driving import Source

Fill = Callable[..., int]
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


class Reading:
    """Topics and queues read as user2, who acts as READ."""

    def __init__(self, spark: SparkSession, dsn_file: str) -> None:
        self.spark = spark
        self._given = {"client": "READ", "dsnFile": dsn_file}

    def batch(self, schema: str | None = None, **options: Any) -> DataFrame:
        reader = self.spark.read.format("psqlmessages").options(**self._given | options)
        return (reader.schema(schema) if schema else reader).load()

    def stream(self, **options: Any) -> DataFrame:
        return self.spark.readStream.format("psqlmessages").options(**self._given | options).load()

    def run(self, checkpoint: str, **options: Any) -> list[list[str]]:
        batches: list[list[str]] = []

        def note(frame: DataFrame, _: int) -> None:
            batches.append([row.body for row in frame.select("body", "id").orderBy("id").collect()])

        write = self.stream(**options).writeStream.foreachBatch(note).trigger(availableNow=True)
        query = write.option("checkpointLocation", checkpoint).start()
        assert query.awaitTermination(200)
        assert query.exception() is None
        return batches


@pytest.fixture
def reads(spark: SparkSession, source: Source) -> Iterator[Reading]:
    yield Reading(spark, source.dsn_file)
    spark.conf.set(PUSHDOWN, "true")


def shown(frame: DataFrame) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        frame.explain(True)
    return text.getvalue()


def test_a_batch_read_has_all_that_is_kept_by_the_schema_that_is_given(reads: Reading, fill: Fill):
    assert reads.batch(topic="T").count() == 0
    last = fill("T", 300)
    rows = reads.batch(topic="T", partitions=3).collect()
    assert sorted(row.id for row in rows) == list(range(last - 299, last + 1))
    assert {(row.topic, row.sender, row.headers) for row in rows} == {("T", "FILL", None)}
    assert {row.body for row in rows} == {f"message {n}" for n in range(1, 301)}
    named = {tuple(row) for row in reads.batch("body string, id string", topic="T").collect()}
    assert len(named) == 300
    assert ("message 300", f"{last}") in named


def test_filters_give_the_same_rows_pushed_down_or_not(reads: Reading, fill: Fill):
    last = fill("T", 20)
    for is_on in (True, False):
        reads.spark.conf.set(PUSHDOWN, str(is_on).lower())
        frame = reads.batch(topic="T").where(
            f"topic = 'T' AND sender <> 'O''Neil' AND id > {last - 10} AND id <= {last - 2}"
            f" AND id NOT IN ({last - 3}, {last - 4}) AND published_at > '2020-01-01'"
            " AND body <> 'message 12' AND (id % 2 = 0 OR id % 2 = 1)"
        )
        bodies = sorted(int(row.body.removeprefix("message ")) for row in frame.collect())
        assert bodies == [11, 13, 14, 15, 18]
        left_to_spark = shown(frame).rpartition("Physical Plan")[2]
        assert "body#" in left_to_spark
        assert ("NOT (sender#" not in left_to_spark) is is_on
        assert reads.batch(topic="T").where("topic = 'U'").count() == 0


def test_unknown_options_and_columns_are_refused(reads: Reading):
    with pytest.raises(AnalysisException, match="unknown option path"):
        reads.batch(topic="T", path="x").collect()
    with pytest.raises(AnalysisException, match="unknown column key"):
        reads.batch("id long, key string", topic="T").collect()


def test_a_checkpoint_has_no_password(reads: Reading, source: Source, fill: Fill, checkpoint: str):
    fill("T", 25)
    first = reads.run(checkpoint, topic="T", maxRowsPerTrigger=10)
    fill("T", 3, "later %s")
    again = reads.run(checkpoint, topic="T", maxRowsPerTrigger=10)
    assert [len(batch) for batch in first] == [10, 10, 5]
    assert {body for batch in first for body in batch} == {f"message {n}" for n in range(1, 26)}
    assert again == [["later 1", "later 2", "later 3"]]
    password = source.world.server.server.home.passwords.get("user2")
    files = [path.read_bytes() for path in Path(checkpoint).rglob("*") if path.is_file()]
    assert any(b'"positions"' in text for text in files)
    assert not any(password.encode() in text for text in files)
    for frame in (reads.batch(topic="T").where("id > 0"), reads.stream(topic="T")):
        assert password not in shown(frame)
