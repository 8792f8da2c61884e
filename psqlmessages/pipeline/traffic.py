"""Traffic: counts, sizes and latencies of messages by topic, sender and time window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as sf

from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.spark_session import temporary_settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


IDENT: Final = "pipeline.traffic"
WINDOW_SECONDS: Final = (10, 60, 3600)
LATENESS: Final = timedelta(minutes=10)
PERCENTILES: Final = (0.5, 0.95, 0.99)

_COLUMNS: Final = "topic string, sender string, body string, published_at timestamp"
# Metadata key of the column by which Spark expires state rows.
_WATERMARK: Final = "spark.watermarkDelayMs"
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Statistics of the messages from one sender to one topic in one window, as read so far.

    ``size_…`` are in bytes; ``latency_…`` are milliseconds from publishing to the start of the
    batch that reads the message.
    """

    topic: str
    sender: str
    window_seconds: int
    starts_at: datetime
    count: int
    bytes: int
    size_p50: float
    size_p95: float
    size_p99: float
    latency_p50: float
    latency_p95: float
    latency_p99: float


def start(
    spark: SparkSession,
    write: Callable[[Sequence[TrafficWindow]], object],
    *,
    topics: str = "*",
    checkpoint: str,
    trigger: Mapping[str, Any],
    lateness: timedelta = LATENESS,
    options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Start the query; ``write`` gets the windows that a batch has changed, with new totals.

    After a crash, ``write`` may get the last batch again. ``topics`` are names and patterns,
    separated by commas; ``options`` are more options of the source. A window that ended more than
    ``lateness`` before the newest message no longer changes.
    """

    def on_batch(batch: DataFrame, _: int) -> None:
        write(collect_windows(batch))

    messages = (
        spark.readStream.format("psqlmessages")
        .schema(_COLUMNS)
        .options(**{"topic": topics, "client": IDENT, **(options or {})})
        .load()
    )
    with temporary_settings(spark, STATE_SETTINGS):
        return (
            group_by_window(messages, lateness)
            .writeStream.queryName("traffic")
            .outputMode("update")
            .option("checkpointLocation", checkpoint)
            .trigger(**trigger)
            .foreachBatch(on_batch)
            .start()
        )


def group_by_window(messages: DataFrame, lateness: timedelta = LATENESS) -> DataFrame:
    """Compute the values of `TrafficWindow` for a stream of topic, sender, body, published_at."""
    read_at = sf.current_timestamp()
    sized = messages.select(
        "topic",
        "sender",
        "published_at",
        sf.coalesce(sf.octet_length("body"), sf.lit(0)).alias("size"),
        _round_milliseconds(sf.unix_micros(read_at) - sf.unix_micros("published_at")).alias(
            "latency"
        ),
        # A message with a time in the future must not close the windows of other messages.
        sf.least("published_at", read_at).alias("seen_at"),
    ).withWatermark("seen_at", f"{lateness.total_seconds():.0f} seconds")
    by_window = sized.withColumn(
        "window_seconds", sf.explode(sf.array(*map(sf.lit, WINDOW_SECONDS)))
    ).withColumn("ends_at", _window_end(lateness))
    return by_window.groupBy("topic", "sender", "window_seconds", "ends_at").agg(
        sf.count(sf.lit(1)).alias("count"),
        sf.sum("size").alias("bytes"),
        sf.percentile("size", list(PERCENTILES)).alias("sizes"),
        sf.percentile("latency", list(PERCENTILES)).alias("latencies"),
    )


def collect_windows(batch: DataFrame) -> list[TrafficWindow]:
    """Collect the windows of a batch."""
    return [
        TrafficWindow(
            row.topic,
            row.sender,
            row.window_seconds,
            # Spark would return a datetime in the time zone of this machine.
            datetime.fromtimestamp(row.ends - row.window_seconds, UTC),
            row["count"],
            row.bytes,
            *row.sizes,
            *row.latencies,
        )
        for row in batch.selectExpr("*", "unix_seconds(ends_at) AS ends").drop("ends_at").collect()
    ]


def _window_end(lateness: timedelta) -> Column:
    """Compute the end of a window; when Spark's watermark passes it, Spark drops the state.

    That watermark is a time: the newest ``seen_at`` minus ``lateness``. ``sf.window`` supports one
    length only. If windows expired by their start, the longest window would need a lateness of over
    an hour. Then Spark would also store the short windows for over an hour, and scan them in each
    batch.
    """
    at, length = sf.unix_micros("published_at"), sf.col("window_seconds").cast("long") * 1_000_000
    return sf.timestamp_micros(at - sf.pmod(at, length) + length).alias(
        "ends_at", metadata={_WATERMARK: int(lateness.total_seconds() * 1000)}
    )


def _round_milliseconds(microseconds: Column) -> Column:
    """Round to whole milliseconds, and above a second to three significant digits.

    Spark's state stores each distinct value, so fewer distinct values are cheaper. Values that are
    negative because clocks differ become 0.
    """
    whole = sf.greatest(sf.round(microseconds / 1000), sf.lit(0))
    digits = sf.floor(sf.log10(sf.greatest(whole, sf.lit(1)))) + 1
    step = sf.pow(sf.lit(10), sf.greatest(digits - 3, sf.lit(0)))
    return (sf.round(whole / step) * step).cast("long")


STATE_SETTINGS: Final = {
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    # A batch without rows changes no window, so it has nothing to report.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "10",
    # With more windows in a batch, Spark would sort rows instead of hashing them.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "20000",
}


_TABLE_COLUMNS: Final = tuple(field.name for field in fields(TrafficWindow))
_KEY: Final = ("window_seconds", "starts_at", "topic", "sender")
_TYPES: Final = ("text", "text", "int", "timestamptz", "bigint", "bigint", *["float8"] * 6)
# The count of a window only grows. A smaller count comes from a job that restarted without its
# checkpoint after some messages of the window had been removed.
_UPSERT: Final = f"""
    WITH written AS (
        INSERT INTO psqlmessages_traffic AS t ({", ".join(_TABLE_COLUMNS)})
        SELECT * FROM unnest({", ".join(f"%s::{type_}[]" for type_ in _TYPES)})
        ON CONFLICT ({", ".join(_KEY)}) DO UPDATE
        SET {", ".join(f"{name} = excluded.{name}" for name in _TABLE_COLUMNS if name not in _KEY)}
        WHERE t.count <= excluded.count
        RETURNING 1
    )
    SELECT count(*) FROM written
"""  # noqa: S608 - only names defined here


class TrafficTable:
    """Writes windows to psqlmessages_traffic; the role of the DSN must own this table."""

    def __init__(self) -> None:
        self._database = Database({})

    def write(self, windows: Sequence[TrafficWindow]) -> int:
        """Insert or update the rows of windows; return the number of rows written."""
        if not windows:
            return 0
        columns = [list(map(attrgetter(name), windows)) for name in _TABLE_COLUMNS]
        ((changed,),) = self._database.fetch_rows(_UPSERT, columns)
        return int(changed)

    def close(self) -> None:
        """Close the connection."""
        self._database.close()
