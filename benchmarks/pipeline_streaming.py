"""What benchmarks.pipeline measures of streams: a backlog, the rate source, row to result."""

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

LATE_SECONDS = 60
WARM_UP = 3
UPSERT = """
    INSERT INTO result (topic, minute, rows) VALUES (%s, %s, %s)
    ON CONFLICT (topic, minute) DO UPDATE SET rows = excluded.rows
"""


@dataclass(frozen=True)
class Batches:
    """The micro-batches of a query that had rows, without the first ones."""

    rows: list[int]
    seconds: list[float]
    parts: dict[str, float]

    @classmethod
    def of(cls, query: StreamingQuery) -> Batches:
        """Take them from the query's progress."""
        found = [json.loads(progress.json) for progress in query.recentProgress]
        warm = [progress for progress in found if progress["numInputRows"] > 0][WARM_UP:]
        names = warm[0]["durationMs"] if warm else ()
        return cls(
            [progress["numInputRows"] for progress in warm],
            [progress["durationMs"]["triggerExecution"] / 1000 for progress in warm],
            {n: median(progress["durationMs"].get(n, 0) for progress in warm) for n in names},
        )

    @property
    def rate(self) -> float:
        """Rows a second."""
        return sum(self.rows) / sum(self.seconds)


def of_messages(spark: SparkSession, topic: str, start: int | str, at_once: int) -> DataFrame:
    """Read a topic as a stream: what the aggregate needs of it."""
    reader = spark.readStream.format("psqlmessages")
    reader = reader.schema("id bigint, topic string, published_at timestamp")
    reader = reader.option("topic", topic).option("startingOffsets", start)
    return reader.option("maxRowsPerTrigger", at_once).load()


def of_rate(spark: SparkSession, at_once: int) -> DataFrame:
    """Make rows from nothing: so many in each batch."""
    reader = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", at_once)
    reader = reader.option("numPartitions", 2).option("advanceMillisPerBatch", 1000)
    return reader.load().selectExpr("value AS id", "'ROWS' AS topic", "timestamp AS published_at")


def aggregate(rows: DataFrame) -> DataFrame:
    """Count by topic and minute."""
    minute = f.window("published_at", "1 minute").alias("minute")
    return rows.groupBy("topic", minute).agg(f.count("*").alias("rows"), f.max("id").alias("id"))


def updates(rows: DataFrame, folder: str) -> DataStreamWriter:
    """Write the groups that change, wherever it is told to."""
    writer = aggregate(rows).writeStream.outputMode("update")
    return writer.option("checkpointLocation", folder)


def checkpoint_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for a checkpoint; tasks of a stopped query may still write to it."""
    return tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)


def drain(spark: SparkSession, start: int, at_once: int) -> Batches:
    """Aggregate what is kept of ROWS from an id on, then end."""
    rows = of_messages(spark, "ROWS", start, at_once)
    with checkpoint_folder() as folder:
        query = updates(rows, folder).format("noop").trigger(availableNow=True).start()
        query.awaitTermination()
        return Batches.of(query)


def run_rate(spark: SparkSession, at_once: int, batches: int) -> Batches:
    """Aggregate so many batches of the rate source."""
    with checkpoint_folder() as folder:
        query = updates(of_rate(spark, at_once), folder).format("noop").start()
        until(lambda: len(query.recentProgress) >= batches + WARM_UP, query)
        query.stop()
        return Batches.of(query)


def until(condition: Any, query: StreamingQuery) -> None:
    """Look every tenth of a second; a query's own error ends the waiting."""
    pause, end = threading.Event(), perf_counter() + LATE_SECONDS
    while not condition():
        if query.exception() is not None or perf_counter() > end:
            raise AssertionError(f"the query does not go on: {query.exception()}")
        pause.wait(0.1)


def publish(url: str, rate: int, over: Event, sent: multiprocessing.Queue[Any]) -> None:
    """Publish a hundredth of the rate every 10 ms until it is over; tell when which id was sent."""
    count, pause = rate // 100, threading.Event()
    sql = "SELECT messages.publish_many('PUB', 'LIVE', %b::text[])"
    bodies, log = ["x" * 200] * count, []
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        begun = time()
        while not over.is_set():
            pause.wait(max(0.0, begun + len(log) / 100 - time()))
            now = time()
            row = connection.execute(sql, [bodies]).fetchone()
            log.append((row[0]["Id"], now))  # type: ignore[index]
        sent.put((log, len(log) * count / (time() - begun)))


class Results:
    """A table with the result, and when what was in it."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(
            "CREATE TABLE result (topic text, minute timestamptz, rows bigint,"
            " PRIMARY KEY (topic, minute))"
        )
        self.seen: list[tuple[int, float]] = []

    def keep(self, frame: DataFrame, _: int) -> None:
        """Upsert the groups of a batch, in one transaction."""
        groups = frame.collect()
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(UPSERT, [(g.topic, g.minute.start, g.rows) for g in groups])
        if groups:
            self.seen.append((max(group.id for group in groups), time()))

    def delays(self, sent: list[tuple[int, float]]) -> list[float]:
        """Tell how long it took from each call of publish to the result that has its last row."""
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
    """Measure from publish to result; the delays of all calls in order, and the rate that was."""
    context = multiprocessing.get_context("spawn")
    over, sent = context.Event(), context.Queue()
    publisher = context.Process(target=publish, args=(url, rate, over, sent))
    results = Results(url)
    with checkpoint_folder() as folder:
        rows = of_messages(spark, "LIVE", "latest", 1_000_000)
        query = updates(rows, folder).foreachBatch(results.keep).start()
        publisher.start()
        try:
            until(lambda: results.seen, query)
            threading.Event().wait(seconds)
        finally:
            over.set()
            log, reached = sent.get()
            publisher.join()
        until(lambda: results.seen[-1][0] >= log[-1][0], query)
        query.stop()
    results.connection.close()
    # The first seconds are Spark's own warming up.
    delays = results.delays(log)
    return delays[len(delays) // 4 :], reached
