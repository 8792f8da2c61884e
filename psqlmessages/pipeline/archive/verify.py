"""Verification: compares the archive with the stored messages by counts and checksums.

The checksum of a message is 60 bits of an MD5 over its fields. The checksum of a range is the sum
of the messages' checksums, so the order does not matter. PostgreSQL computes the checksums of the
stored messages, and Spark those of the archive.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from pyspark.sql import functions as sf

from psqlmessages.client.calls import is_transient, translate_error
from psqlmessages.pipeline import offsets
from psqlmessages.pipeline.archive import mark_calls
from psqlmessages.pipeline.archive.log import ArchiveError
from psqlmessages.pipeline.database import Database, add_defaults, dsn

if TYPE_CHECKING:
    from psqlmessages.pipeline.archive.store import Archive

# The ids of each topic are compared in this number of ranges.
_RANGES: Final = 64
# This statement reads no rows, but blocks removals in all topics until the transaction ends.
_LOCK_REMOVALS: Final = "SELECT FROM messages.read_stream(%s, %s, 0, 0)"

# Both sides hash the same text. The sender is preceded by its length, so the text is unambiguous.
_STORED_SUMS: Final = """
    SELECT (id - %(low)s - 1) / %(width)s, count(*),
        sum(('x' || left(md5(convert_to(concat_ws(
            ':', id, (extract(epoch FROM published_at) * 1000000)::bigint, coalesce(enc, ''),
            length(sender), sender || body
        ), 'UTF8')), 15))::bit(60)::bigint)
    FROM generate_series(%(low)s::bigint, %(high)s::bigint - 1, 20000) AS part (after_id)
    -- Each call collects its rows in memory, so read parts.
    CROSS JOIN LATERAL messages.read_stream(
        %(ident)s, %(topic)s, part.after_id, least(part.after_id + 20000, %(high)s)
    )
    GROUP BY 1
"""
_ARCHIVED_CHECKSUM: Final = """
    sum(cast(conv(left(md5(cast(concat_ws(
        ':', id, unix_micros(published_at), coalesce(enc, ''), length(sender), concat(sender, body)
    ) AS binary)), 15), 16, 10) AS decimal(20)))
"""


class Checksum(NamedTuple):
    """The number of messages, and their checksum."""

    rows: int
    checksum: int


ZERO: Final = Checksum(0, 0)
# Checksums by topic, and then by the number of the range.
RangeSums = dict[str, dict[int, Checksum]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Checksums of a topic or of a range of its ids: above ``low``, up to ``high``."""

    topic: str
    low: int
    high: int
    stored: Checksum
    archived: Checksum

    @property
    def is_equal(self) -> bool:
        """Whether both sides are equal."""
        return self.stored == self.archived


class _Range(NamedTuple):
    """The ids to compare: above ``low``, up to ``high``; in parts of ``width`` ids."""

    low: int
    high: int
    width: int


def verify(archive: Archive, topics: list[str] | None = None) -> Iterator[Comparison]:
    """Compare archived topics (default: all), from the first stored to the last archived message.

    Yields each topic that has such messages, and its ranges that differ. Raises ArchiveError if the
    archive belongs to another database, or has no messages of a topic in ``topics``.
    """
    if unknown := sorted(set(topics or ()) - archive.log.positions.keys()):
        raise ArchiveError(f"the archive has no messages of {', '.join(unknown)}")
    names = sorted(topics or archive.log.positions)
    stored, bounds = _sum_stored(archive, names)
    archived = archive.retry_reads(lambda: _sum_archived(archive, bounds))
    for topic, bound in bounds.items():
        in_table, in_files = stored[topic], archived.get(topic, {})
        yield Comparison(topic, bound.low, bound.high, _add_up(in_table), _add_up(in_files))
        for number in sorted(in_table.keys() | in_files.keys()):
            low = bound.low + number * bound.width
            high = min(low + bound.width, bound.high)
            part = Comparison(
                topic, low, high, in_table.get(number, ZERO), in_files.get(number, ZERO)
            )
            if not part.is_equal:
                yield part


def _sum_stored(archive: Archive, topics: list[str]) -> tuple[RangeSums, dict[str, _Range]]:
    """Block removals, and sum up the stored messages by topic and range; also return the ranges."""
    sums: RangeSums = {}
    try:
        with psycopg.connect(add_defaults(dsn())) as connection:
            bounds = _compared_ranges(archive, topics)
            if bounds:
                connection.execute(_LOCK_REMOVALS, (mark_calls.IDENT, next(iter(bounds))))
                # Messages may have been removed before the lock.
                bounds = _compared_ranges(archive, topics)
            for topic, bound in bounds.items():
                parameters = {"ident": mark_calls.IDENT, "topic": topic, **bound._asdict()}
                rows = connection.execute(_STORED_SUMS, parameters).fetchall()
                sums[topic] = {number: Checksum(count, int(sum_)) for number, count, sum_ in rows}
    except psycopg.Error as error:
        is_lost = isinstance(error, psycopg.OperationalError) and not is_transient(error)
        raise translate_error(error, is_broken=is_lost) from error
    return sums, bounds


def _compared_ranges(archive: Archive, topics: list[str]) -> dict[str, _Range]:
    """Return the ids to compare of each topic whose archived messages may still be stored."""
    with closing(Database({})) as database:
        watermarks = offsets.read_watermarks(database, mark_calls.IDENT, ["*"])
    if watermarks.cluster != archive.log.cluster:
        raise ArchiveError(
            f"the archive belongs to database {archive.log.cluster},"
            f" but this is {watermarks.cluster}"
        )
    bounds = {}
    for name in topics:
        if topic := watermarks.topics.get(name):
            low, high = topic.removed, archive.log.positions[name]
            if high > low:
                # The width is rounded up.
                bounds[name] = _Range(low, high, -(-(high - low) // _RANGES))
    return bounds


def _sum_archived(archive: Archive, bounds: Mapping[str, _Range]) -> RangeSums:
    files = [
        file
        for file in archive.log.files.values()
        if file.topic in bounds and file.last > bounds[file.topic].low
    ]
    by_topic = sf.from_json(sf.lit(json.dumps(bounds)), "map<string, array<bigint>>")
    known = archive.spark.range(1).select(sf.explode(by_topic).alias("topic", "bound"))
    low, high, width = (sf.col("bound")[number] for number in range(3))
    rows = (
        archive.read(files)
        .join(sf.broadcast(known), "topic")
        .where((sf.col("id") > low) & (sf.col("id") <= high))
        .groupBy("topic", sf.floor((sf.col("id") - low - 1) / width).alias("number"))
        .agg(sf.count("*").alias("rows"), sf.expr(_ARCHIVED_CHECKSUM).alias("checksum"))
        .collect()
    )
    sums: RangeSums = defaultdict(dict)
    for row in rows:
        sums[row.topic][row.number] = Checksum(row.rows, int(row.checksum))
    return sums


def _add_up(sums: Mapping[int, Checksum]) -> Checksum:
    return Checksum(
        sum(each.rows for each in sums.values()), sum(each.checksum for each in sums.values())
    )
