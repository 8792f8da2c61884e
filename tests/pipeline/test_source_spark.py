"""The source in a real Spark session: batch reads, streams with checkpoints, what plans show."""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from psqlmessages.pipeline import topic_ranges
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.topic_ranges import IdRange
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
        reader = self.spark.readStream.format("psqlmessages")
        return reader.options(**self._given | options).load()

    def run(self, checkpoint: str, **options: Any) -> list[list[str]]:
        """Read all that is there now; the bodies of each batch."""
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


def test_a_batch_read_has_all_that_is_kept_by_the_schema_that_is_given(
    reads: Reading, fill: Fill
) -> None:
    assert reads.batch(topic="T").count() == 0
    last = fill("T", 300)
    rows = reads.batch(topic="T", partitions=3).collect()
    assert sorted(row.id for row in rows) == list(range(last - 299, last + 1))
    assert {(row.topic, row.sender, row.headers) for row in rows} == {("T", "FILL", None)}
    assert {row.body for row in rows} == {f"message {n}" for n in range(1, 301)}
    named = {tuple(row) for row in reads.batch("body string, id string", topic="T").collect()}
    assert len(named) == 300
    assert ("message 300", f"{last}") in named


def test_filters_give_the_same_rows_pushed_down_or_not(reads: Reading, fill: Fill) -> None:
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


def test_what_is_wrong_is_told(reads: Reading, fill: Fill) -> None:
    fill("T", 1)
    wrong: tuple[tuple[dict[str, str], str | None, str], ...] = (
        ({"path": "x"}, None, "unknown option path. Known options: client, dsnFile"),
        ({"topic": "NONE"}, None, "9: Topic NONE is not existent"),
        ({}, "id long, key string", "unknown column key. Known columns: id, topic, sender"),
        ({"dsnFile": "missing"}, None, "cannot be read"),
    )
    for options, schema, said in wrong:
        with pytest.raises(AnalysisException, match=said):
            reads.batch(schema, **{"topic": "T", **options}).collect()


def test_a_stream_goes_on_from_its_checkpoint_and_no_password_is_in_it_or_in_a_plan(
    reads: Reading, source: Source, fill: Fill, checkpoint: str
) -> None:
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


def test_a_stream_of_a_queue_leaves_it_empty(
    reads: Reading, source: Source, checkpoint: str
) -> None:
    source.push(*map(str, range(30)))
    batches = reads.run(checkpoint, queue="Q", maxRowsPerTrigger=20)
    assert [len(batch) for batch in batches] == [20, 10]
    assert len({body for batch in batches for body in batch}) == 30
    assert source.owner.query("SELECT count(*) FROM psqlmessages_element") == 0


def test_a_wide_topic_is_cut_where_its_messages_are(
    source: Source, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_ranges, "_WIDE", 100)
    first, last = fill("ELSE", 5000) - 4999, fill("T", 5000)
    with contextlib.closing(Database({"dsnFile": source.dsn_file})) as database:
        weighed = topic_ranges.weighed(database, "READ", [IdRange("T", first - 1, last)])
    half = len(weighed) // 2
    assert sum(w.weight for w in weighed[:half]) == 0
    assert all(w.weight > 0 for w in weighed[half:])
    assert (weighed[0].range.low, weighed[-1].range.high) == (first - 1, last)
