"""Verify: what is archived and still kept must be the same, by counts and checksums of id ranges.

The checksum of a message is 60 bits of an MD5 over its fields, that of a range the sum of them:
no order counts. PostgreSQL computes one side, Spark the other, each from its own data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg

from psqlmessages.client.calls import error_of
from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.pipeline import archive_marks, horizons
from psqlmessages.pipeline.archive_layout import ArchiveFault
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.extra import needs_extra

with needs_extra():
    from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from psqlmessages.pipeline.archive import Archive

# Into so many ranges is told apart where a topic differs.
_RANGES: Final = 64
_HEX_DIGITS: Final = 15
# No rows; what is stored is locked until the transaction ends, and no table of it is emptied.
_LOCK: Final = "SELECT FROM messages.read_stream(%s, %s, 0, 0)"
_ROWS_A_CALL: Final = 100_000

# The same text on both sides: names are led by their length, so nothing can pass for another.
_IN_TABLE: Final = """
    SELECT (id - %(low)s - 1) / %(width)s, count(*),
        sum(('x' || left(md5(convert_to(concat_ws(
            ':', id, (extract(epoch FROM published_at) * 1000000)::bigint, coalesce(enc, ''),
            length(sender), sender || body
        ), 'UTF8')), 15))::bit(60)::bigint), max(id)
    FROM messages.read_stream(%(client)s, %(topic)s, %(after)s, %(high)s, %(rows)s)
    GROUP BY 1
"""


class Sum(NamedTuple):
    """How many messages there are, and their checksum."""

    rows: int
    checksum: int


NOTHING: Final = Sum(0, 0)


@dataclass(frozen=True, slots=True)
class Compared:
    """A topic, or a range of its ids (above ``low``, up to ``high``), on both sides."""

    topic: str
    low: int
    high: int
    kept: Sum
    archived: Sum

    @property
    def is_equal(self) -> bool:
        """Whether both sides hold the same."""
        return self.kept == self.archived


@dataclass(frozen=True, slots=True)
class _Range:
    low: int
    high: int

    @property
    def width(self) -> int:
        return -(-(self.high - self.low) // _RANGES)


def verify(archive: Archive, topics: list[str] | None = None) -> Iterator[Compared]:
    """Compare each archived topic (or these), from what is kept up to what is archived.

    One that differs is followed by its ranges that do. Raises ArchiveFault where the database is
    another one than the archive's, or nothing is archived of a topic that is named.
    """
    if unknown := sorted(set(topics or ()) - archive.log.positions.keys()):
        raise ArchiveFault(f"nothing is archived of {', '.join(unknown)}")
    names = sorted(topics or archive.log.positions)
    kept, bounds = _kept(archive, names)
    archived = archive.looked_at(lambda: _archived(archive, bounds))
    for topic, bound in bounds.items():
        ours, theirs = kept[topic], archived.get(topic, {})
        yield Compared(topic, bound.low, bound.high, _total(ours), _total(theirs))
        for place in sorted(ours.keys() | theirs.keys()):
            low = bound.low + place * bound.width
            high = min(low + bound.width, bound.high)
            part = Compared(topic, low, high, ours.get(place, NOTHING), theirs.get(place, NOTHING))
            if not part.is_equal:
                yield part


def _kept(
    archive: Archive, topics: list[str]
) -> tuple[dict[str, dict[int, Sum]], dict[str, _Range]]:
    """Sum up what is kept, while nothing can be removed: by topic, then by place of the range."""
    sums: dict[str, dict[int, Sum]] = {}
    try:
        with psycopg.connect(connectable(dsn())) as connection:
            for topic in list(_bounds(archive, topics))[:1]:
                connection.execute(_LOCK, (archive_marks.IDENT, topic))
            bounds = _bounds(archive, topics)
            for topic, bound in bounds.items():
                sums[topic] = _read(connection, topic, bound)
    except psycopg.OperationalError as error:
        raise ServerUnreachable(f"cannot compare: {str(error).strip()}") from error
    except psycopg.Error as error:
        raise error_of(error, is_broken=False) from error
    return sums, bounds


def _read(connection: psycopg.Connection[Any], topic: str, bound: _Range) -> dict[int, Sum]:
    sums: dict[int, Sum] = {}
    parameters = {
        "client": archive_marks.IDENT, "topic": topic, "rows": _ROWS_A_CALL,
        "low": bound.low, "high": bound.high, "width": bound.width, "after": bound.low,
    }  # fmt: skip
    while True:
        found = connection.execute(_IN_TABLE, parameters).fetchall()
        for place, count, checksum, _ in found:
            before = sums.get(place, NOTHING)
            sums[place] = Sum(before.rows + count, before.checksum + int(checksum))
        if sum(count for _, count, *_ in found) < _ROWS_A_CALL:
            return sums
        parameters["after"] = max(last for *_, last in found)


def _bounds(archive: Archive, topics: list[str]) -> dict[str, _Range]:
    """Ask what is kept, and leave out what is not archived, or kept no more."""
    database = Database({})
    try:
        found = horizons.ask(database, archive_marks.IDENT, ["*"])
    finally:
        database.close()
    if found.cluster != archive.log.cluster:
        raise ArchiveFault(
            f"the archive is of the database {archive.log.cluster}, and this is {found.cluster}"
        )
    bounds = {
        name: _Range(found.topics[name].removed, archive.log.positions[name])
        for name in topics
        if name in found.topics
    }
    return {name: bound for name, bound in bounds.items() if bound.high > bound.low}


def _archived(archive: Archive, bounds: Mapping[str, _Range]) -> dict[str, dict[int, Sum]]:
    files = [
        file
        for file in archive.log.files.values()
        if file.topic in bounds and file.last > bounds[file.topic].low
    ]
    wanted = {name: [bound.low, bound.high, bound.width] for name, bound in bounds.items()}
    known = archive.spark.range(1).select(
        sf.explode(sf.from_json(sf.lit(json.dumps(wanted)), "map<string, array<bigint>>")).alias(
            "topic", "bound"
        )
    )
    low, high, width = (sf.col("bound")[number] for number in range(3))
    rows = (
        archive.read(files)
        .join(sf.broadcast(known), "topic")
        .where((sf.col("id") > low) & (sf.col("id") <= high))
        .groupBy("topic", sf.floor((sf.col("id") - low - 1) / width).alias("place"))
        .agg(sf.count("*").alias("rows"), sf.expr(_in_files()).alias("checksum"))
        .collect()
    )
    sums: dict[str, dict[int, Sum]] = {}
    for row in rows:
        sums.setdefault(row["topic"], {})[row["place"]] = Sum(row["rows"], int(row["checksum"]))
    return sums


def _in_files() -> str:
    """Return the checksum of a group as an expression of Spark's: see _IN_TABLE."""
    text = (
        "concat_ws(':', id, unix_micros(published_at), coalesce(enc, ''), length(sender),"
        " concat(sender, body))"
    )
    return (
        f"sum(cast(conv(left(md5(cast({text} AS binary)), {_HEX_DIGITS}), 16, 10) AS decimal(20)))"
    )


def _total(sums: Mapping[int, Sum]) -> Sum:
    return Sum(
        sum(each.rows for each in sums.values()), sum(each.checksum for each in sums.values())
    )
