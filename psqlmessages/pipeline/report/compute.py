"""Statistics of a report, computed by Spark from stored and archived messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from psqlmessages.pipeline.archive.store import Archive
from psqlmessages.pipeline.report.contents import (
    CHART_TOPICS,
    Period,
    ReportStatistics,
    TrafficStatistics,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

IDENT: Final = "pipeline.report"
_COLUMNS: Final = "id bigint, topic string, sender string, body string, published_at timestamp"
# One row for each step, each topic, each sender, and the total.
_SUMS: Final = """
    SELECT at, topic, sender, grouping_id(at, topic, sender) AS kind, count(*) AS count,
        sum(size) AS bytes, percentile(size, array(0.5, 0.95, 0.99)) AS sizes
    FROM {messages} GROUP BY GROUPING SETS ((), (at), (topic), (sender))
"""
# Values of kind: one bit each for at, topic and sender, 1 if the row does not group by it.
_TOTAL, _STEP, _TOPIC, _SENDER = 0b111, 0b011, 0b101, 0b110


def compute_statistics(
    spark: SparkSession, period: Period, *, topics: str = "*", archive: str | None = None
) -> ReportStatistics:
    """Compute the statistics of all stored messages of a period.

    ``archive`` is the root of an archive whose messages are counted too. ``topics`` are names and
    patterns, separated by commas. Latencies are missing: only the job `traffic` measures them.
    Raises ArchiveError and the source's errors.
    """
    reader = spark.read.format("psqlmessages").schema(_COLUMNS)
    rows = reader.options(topic=topics, client=IDENT).load()
    source = "all stored messages"
    if archive is not None:
        # A message that is both stored and archived counts once.
        rows = _read_archived(spark, archive, topics).unionByName(rows)
        rows = rows.dropDuplicates(["topic", "id"])
        source = "all stored and archived messages"
    step = period.step()
    published_at = sf.col("published_at")
    at = sf.unix_seconds(published_at)
    is_in_period = (published_at >= sf.lit(period.begin)) & (published_at < sf.lit(period.end))
    measured = rows.where(is_in_period).select(
        "topic",
        "sender",
        (at - sf.pmod(at, sf.lit(step))).alias("at"),
        sf.coalesce(sf.octet_length("body"), sf.lit(0)).alias("size"),
    )
    messages = measured.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        return _summarize(messages, step, f"{source}, read by Spark")
    finally:
        messages.unpersist()


def _summarize(messages: DataFrame, step: int, source: str) -> ReportStatistics:
    # If there are no messages, there is no row for the total either.
    rows = messages.sparkSession.sql(_SUMS, messages=messages).collect()
    rows.sort(key=lambda row: -row["count"])
    by_kind: dict[int, list[Any]] = {kind: [] for kind in (_TOTAL, _STEP, _TOPIC, _SENDER)}
    for row in rows:
        by_kind[row.kind].append(row)
    topics = {row.topic: _to_statistics(row) for row in by_kind[_TOPIC]}
    busiest = list(topics)[:CHART_TOPICS]
    points: dict[str, dict[int, int]] = {topic: {} for topic in busiest}
    if busiest:
        drawn = messages.where(sf.col("topic").isin(busiest)).groupBy("topic", "at").count()
        for row in drawn.collect():
            points[row.topic][row["at"]] = row["count"]
    return ReportStatistics(
        source=source,
        step=step,
        total=_to_statistics(by_kind[_TOTAL][0]) if by_kind[_TOTAL] else None,
        steps={row["at"]: _to_statistics(row) for row in by_kind[_STEP]},
        topics=topics,
        senders={row.sender: _to_statistics(row) for row in by_kind[_SENDER]},
        points=points,
    )


def _read_archived(spark: SparkSession, root: str, topics: str) -> DataFrame:
    rows = Archive.open(spark, root).rows()
    matches, topic = sf.lit(False), sf.col("topic")
    for name in map(str.strip, topics.split(",")):
        matches |= topic.startswith(name[:-1]) if name.endswith("*") else topic == name
    return rows.where(matches).select("id", "topic", "sender", "body", "published_at")


def _to_statistics(row: Row) -> TrafficStatistics:
    return TrafficStatistics(row["count"], row.bytes or 0, tuple(row.sizes or (0.0, 0.0, 0.0)))
