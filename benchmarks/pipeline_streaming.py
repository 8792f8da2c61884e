"""Streaming queries of benchmarks.pipeline: a backlog, the rate source, row to result."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from statistics import median
from time import perf_counter, time
from typing import Any

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

TIMEOUT_SECONDS = 60
WARM_UP = 3
UPSERT = """
    INSERT INTO result (topic, minute, rows) VALUES (%s, %s, %s)
    ON CONFLICT (topic, minute) DO UPDATE SET rows = excluded.rows
"""


@dataclass(frozen=True)
class Batches:
    """The micro-batches of a query that had rows, except for the first WARM_UP."""

    rows: list[int]
    seconds: list[float]
    parts: dict[str, float]

    @classmethod
    def of(cls, query: StreamingQuery) -> Batches:
        """Read the batches from the query's progress."""
        all_ = [json.loads(progress.json) for progress in query.recentProgress]
        warm = [progress for progress in all_ if progress["numInputRows"] > 0][WARM_UP:]
        names = warm[0]["durationMs"] if warm else ()
        return cls(
            [progress["numInputRows"] for progress in warm],
            [progress["durationMs"]["triggerExecution"] / 1000 for progress in warm],
            {n: median(progress["durationMs"].get(n, 0) for progress in warm) for n in names},
        )

    @property
    def rate(self) -> float:
        """Rows per second."""
        return sum(self.rows) / sum(self.seconds)


def read_topic(spark: SparkSession, topic: str, start: int | str, batch_rows: int) -> DataFrame:
    """Read a topic as a stream, with the columns that the aggregate needs."""
    reader = spark.readStream.format("psqlmessages")
    reader = reader.schema("id bigint, topic string, published_at timestamp")
    reader = reader.option("topic", topic).option("startingOffsets", start)
    return reader.option("maxRowsPerTrigger", batch_rows).load()


def read_rate(spark: SparkSession, batch_rows: int) -> DataFrame:
    """Read Spark's rate source, which generates rows."""
    reader = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", batch_rows)
    reader = reader.option("numPartitions", 2).option("advanceMillisPerBatch", 1000)
    return reader.load().selectExpr("value AS id", "'ROWS' AS topic", "timestamp AS published_at")


def aggregate(rows: DataFrame) -> DataFrame:
    """Count by topic and minute."""
    minute = f.window("published_at", "1 minute").alias("minute")
    return rows.groupBy("topic", minute).agg(f.count("*").alias("rows"), f.max("id").alias("id"))


def write_updates(rows: DataFrame, folder: str) -> DataStreamWriter:
    """Return a writer of the groups that change; ``folder`` is its checkpoint."""
    writer = aggregate(rows).writeStream.outputMode("update")
    return writer.option("checkpointLocation", folder)


def checkpoint_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for a checkpoint; tasks of a stopped query may still write to it."""
    return tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)


def drain(spark: SparkSession, start: int, batch_rows: int) -> Batches:
    """Aggregate the stored messages of ROWS from an id on."""
    rows = read_topic(spark, "ROWS", start, batch_rows)
    with checkpoint_folder() as folder:
        query = write_updates(rows, folder).format("noop").trigger(availableNow=True).start()
        query.awaitTermination()
        return Batches.of(query)


def run_rate(spark: SparkSession, batch_rows: int, batches: int) -> Batches:
    """Aggregate this number of batches of the rate source."""
    with checkpoint_folder() as folder:
        query = write_updates(read_rate(spark, batch_rows), folder).format("noop").start()
        wait_until(lambda: len(query.recentProgress) >= batches + WARM_UP, query)
        query.stop()
        return Batches.of(query)


def wait_until(condition: Any, query: StreamingQuery) -> None:
    """Check a condition every 0.1 s until it is true; raise AssertionError if the query fails."""
    pause, end = threading.Event(), perf_counter() + TIMEOUT_SECONDS
    while not condition():
        if query.exception() is not None or perf_counter() > end:
            raise AssertionError(f"the query does not continue: {query.exception()}")
        pause.wait(0.1)


def publish(url: str, rate: int, must_stop: Event, sent: multiprocessing.Queue[Any]) -> None:
    """Publish every 10 ms until stopped; then put all (id, time), and the rate, into ``sent``."""
    count, pause = rate // 100, threading.Event()
    sql = "SELECT messages.publish_many('PUB', 'LIVE', %b::text[])"
    bodies, log = ["x" * 200] * count, []
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        begun = time()
        while not must_stop.is_set():
            pause.wait(max(0.0, begun + len(log) / 100 - time()))
            now = time()
            row = connection.execute(sql, [bodies]).fetchone()
            log.append((row[0]["Id"], now))  # type: ignore[index]
        sent.put((log, len(log) * count / (time() - begun)))


class Results:
    """A table with the result. ``seen`` has the last id of each written batch, and the time."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(
            "CREATE TABLE result (topic text, minute timestamptz, rows bigint,"
            " PRIMARY KEY (topic, minute))"
        )
        self.seen: list[tuple[int, float]] = []

    def write_batch(self, frame: DataFrame, _: int) -> None:
        """Upsert the groups of a batch, in one transaction."""
        groups = frame.collect()
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(UPSERT, [(g.topic, g.minute.start, g.rows) for g in groups])
        if groups:
            self.seen.append((max(group.id for group in groups), time()))

    def delays(self, sent: list[tuple[int, float]]) -> list[float]:
        """Return the time from each call of publish to the result that includes its last row."""
        delays, seen = [], iter(self.seen)
        last, at = next(seen)
        for id_, begun in sent:
            while last < id_:
                following = next(seen, None)
                if following is None:
                    return delays
                last, at = following
            delays.append(at - begun)
        return delays


def latency(spark: SparkSession, url: str, rate: int, seconds: int) -> tuple[list[float], float]:
    """Return the delays from publish to result, without the warm-up, and the actual rate."""
    context = multiprocessing.get_context("spawn")
    must_stop, sent = context.Event(), context.Queue()
    publisher = context.Process(target=publish, args=(url, rate, must_stop, sent))
    results = Results(url)
    with checkpoint_folder() as folder:
        rows = read_topic(spark, "LIVE", "latest", 1_000_000)
        query = write_updates(rows, folder).foreachBatch(results.write_batch).start()
        publisher.start()
        try:
            wait_until(lambda: results.seen, query)
            threading.Event().wait(seconds)
        finally:
            must_stop.set()
            log, actual_rate = sent.get()
            publisher.join()
        wait_until(lambda: results.seen[-1][0] >= log[-1][0], query)
        query.stop()
    results.connection.close()
    # Leave out Spark's warm-up.
    delays = results.delays(log)
    return delays[len(delays) // 4 :], actual_rate
