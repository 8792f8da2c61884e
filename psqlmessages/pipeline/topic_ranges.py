"""Ranges of message ids: splits them into partitions, and builds the SQL that reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pyarrow as pa

from psqlmessages.pipeline import literals
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.reader import ReadStatement


@dataclass(frozen=True)
class IdRange:
    """The messages of a topic with ids above ``low``, up to ``high``.

    ``must_be_complete``: it is an error if one of these messages was removed.
    """

    topic: str
    low: int
    high: int
    must_be_complete: bool = False

    @property
    def width(self) -> int:
        """The number of ids. The range has at most as many messages."""
        return self.high - self.low


@dataclass(frozen=True)
class WeightedRange:
    """A range, and its estimated number of messages."""

    range: IdRange
    weight: int


def split_evenly(weighted: Iterable[WeightedRange], max_parts: int) -> list[list[IdRange]]:
    """Split ranges into at most ``max_parts`` parts with about equal numbers of messages."""
    # Also read ranges that are estimated to be empty.
    ranges = [WeightedRange(w.range, max(1, w.weight)) for w in weighted if w.range.width > 0]
    # Rounded up.
    size = -(-sum(w.weight for w in ranges) // max(1, max_parts))
    return [_merge_adjacent(part) for part in _fill_parts(ranges, size)]


def _merge_adjacent(ranges: Iterable[IdRange]) -> list[IdRange]:
    """Merge consecutive ranges of the same topic if the end of one is the start of the next."""
    merged: list[IdRange] = []
    for range_ in ranges:
        if merged and (merged[-1].topic, merged[-1].high) == (range_.topic, range_.low):
            merged[-1] = replace(merged[-1], high=range_.high)
        else:
            merged.append(range_)
    return merged


def _fill_parts(weighted: Iterable[WeightedRange], size: int) -> Iterator[list[IdRange]]:
    """Yield lists of ranges with a total weight of ``size``; the last list may have less."""
    part: list[IdRange] = []
    room = size
    for whole in weighted:
        for piece in _split(whole, room, size):
            part.append(piece.range)
            room -= piece.weight
            if room <= 0:
                yield part
                part, room = [], size
    if part:
        yield part


def _split(whole: WeightedRange, first_weight: int, next_weight: int) -> Iterator[WeightedRange]:
    """Split a range into pieces: one of ``first_weight``, more of ``next_weight``, and the rest."""
    low, weight, taken = whole.range.low, first_weight, 0
    while taken + weight < whole.weight:
        taken += weight
        end = whole.range.low + whole.range.width * taken // whole.weight
        yield WeightedRange(replace(whole.range, low=low, high=end), weight)
        low, weight = end, next_weight
    yield WeightedRange(replace(whole.range, low=low), whole.weight - taken)


# The target number of rows of a call of messages.read_stream. PostgreSQL collects the rows of a
# call in memory, which stays in the CPU cache if calls are small: 300,000 bodies of 1 kB took
# 0.35 s with calls of 2,000 rows, and 0.55 s with calls of 10,000.
_MAX_ROWS: Final = 2_000
# If rows are large, the target is the number of rows that have _MAX_BYTES, but at least _MIN_ROWS.
_MIN_ROWS: Final = 200
_MAX_BYTES: Final = 512 * 1024
# A call covers more ids than rows, because topics share one sequence of ids. Limit the ids, because
# all of them may belong to this topic.
_MAX_IDS: Final = 100 * _MAX_ROWS
_CALLS_PER_STATEMENT: Final = 100
# Limits of a statement that reads several topics.
_TOPICS_PER_STATEMENT: Final = 50
_ROWS_PER_TOPIC: Final = 400


@dataclass(frozen=True)
class StreamStatements:
    """The statements that read ranges of topics; ``conditions`` are SQL that filters the rows.

    The iterator adapts each statement to the rows that the previous one returned.
    """

    client: str
    ranges: Sequence[IdRange]
    columns: Sequence[str]
    conditions: Sequence[str] = ()

    def __iter__(self) -> Iterator[ReadStatement]:
        for first in range(0, len(self.ranges), _TOPICS_PER_STATEMENT):
            group = self.ranges[first : first + _TOPICS_PER_STATEMENT]
            if self.conditions or len({part.topic for part in group}) < len(group):
                # Conditions filter rows, or two ranges are of one topic: rows cannot be counted.
                for part in group:
                    yield from self._read_in_steps(part, _MAX_IDS // 10)
            else:
                yield from self._read_group(group)

    @property
    def _has_bodies(self) -> bool:
        return "body" in self.columns

    def _read_group(self, group: Sequence[IdRange]) -> Iterator[ReadStatement]:
        """Read each topic with one call of limited rows, and the rest of longer topics in steps."""
        max_rows = _MAX_ROWS if len(group) == 1 else _ROWS_PER_TOPIC
        calls = [
            range_sql(self.client, part, max_rows, with_bodies=self._has_bodies) for part in group
        ]
        by_topic = {part.topic: _RowStatistics() for part in group}
        if len(group) == 1:
            yield self._statement(calls, group, by_topic[group[0].topic].add_ids, ("id",))
        else:
            yield self._statement(calls, group, partial(_add_by_topic, by_topic), ("id", "topic"))
        for part in group:
            statistics = by_topic[part.topic]
            if statistics.count >= max_rows:
                # Count from the first row: the ids before it may all belong to other topics.
                step = statistics.next_step(statistics.last_id - statistics.first_id + 1)
                yield from self._read_in_steps(replace(part, low=statistics.last_id), step)

    def _read_in_steps(self, part: IdRange, step: int) -> Iterator[ReadStatement]:
        """Read with calls of ``step`` ids each; without conditions, adapt ``step`` to the rows.

        If a statement returns no rows, for instance in a gap of ids after a restore, continue at
        the next message.
        """
        low = part.low
        names = f"{literals.text(self.client)}, {literals.text(part.topic)}"
        while low < part.high:
            step = max(1, min(step, _MAX_IDS))
            high = min(part.high, low + step * _CALLS_PER_STATEMENT)
            calls = (
                f"generate_series({low}::bigint, {high - 1}, {step}) AS g CROSS JOIN LATERAL"
                f" messages.read_stream({names}, g, least(g + {step}, {high}),"
                f" with_bodies => {self._has_bodies})"
            )
            statistics = _RowStatistics()
            yield self._statement([calls], [part], statistics.add, ())
            if not self.conditions:
                step = statistics.next_step(high - low)
            low = high
            if not statistics.count and low < part.high:
                next_row = _RowStatistics()
                source = range_sql(self.client, replace(part, low=low), 1, with_bodies=False)
                sql = f"SELECT id FROM {source}"  # noqa: S608
                yield ReadStatement(sql, on_batch=next_row.add_ids, is_internal=True)
                low = next_row.first_id - 1 if next_row.count else part.high

    def _statement(
        self,
        calls: Sequence[str],
        group: Sequence[IdRange],
        on_batch: Callable[[pa.RecordBatch], None],
        required_columns: Sequence[str],
    ) -> ReadStatement:
        # Each column costs time, so omit constants. Messages of topics have no headers.
        constants: dict[str, str | None] = {"headers": None}
        if len(group) == 1:
            constants["topic"] = group[0].topic
        names = [name for name in self.columns if name not in constants]
        # Select at least one column.
        required = required_columns or (() if names else ("id",))
        names += [name for name in required if name not in names]
        columns = ", ".join(f"r.{name}" for name in names)
        conditions = " AND ".join(f"({condition})" for condition in self.conditions)
        where = f" WHERE {conditions}" if conditions else ""
        selects = (f"SELECT {columns} FROM {call} AS r{where}" for call in calls)  # noqa: S608
        return ReadStatement(" UNION ALL ".join(selects), constants, on_batch)


def range_sql(client: str, part: IdRange, max_rows: int | None, *, with_bodies: bool) -> str:
    """Return the call of read_stream for a range, with at most ``max_rows`` rows (None: all)."""
    return (
        f"messages.read_stream({literals.text(client)}, {literals.text(part.topic)}, {part.low},"
        f" {part.high}, {'NULL' if max_rows is None else max_rows}, {with_bodies})"
    )


@dataclass
class _RowStatistics:
    """Statistics of the rows of one topic that a statement returned; ``size`` is in bytes."""

    count: int = 0
    size: int = 0
    first_id: int = 0
    last_id: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.count += batch.num_rows
        self.size += batch.nbytes

    def next_step(self, id_count: int) -> int:
        """Return the number of ids of the next call, if ``id_count`` ids contained these rows."""
        rows = max(1, self.count)
        rows_in_max_bytes = _MAX_BYTES * rows // max(1, self.size)
        target_rows = max(_MIN_ROWS, min(_MAX_ROWS, rows_in_max_bytes))
        return id_count * target_rows // rows

    def add_ids(self, batch: pa.RecordBatch) -> None:
        self.add(batch)
        if batch.num_rows:
            ids = batch.column("id")
            self.first_id, self.last_id = self.first_id or ids[0].as_py(), ids[-1].as_py()


def _add_by_topic(by_topic: Mapping[str, _RowStatistics], batch: pa.RecordBatch) -> None:
    """Add a batch with several topics to their statistics, without the sizes."""
    table = pa.table({name: batch.column(name) for name in ("topic", "id")})
    measures = [("id", "count"), ("id", "min"), ("id", "max")]
    for row in table.group_by("topic").aggregate(measures).to_pylist():
        rows = by_topic[row["topic"]]
        rows.count += row["id_count"]
        rows.first_id = rows.first_id or row["id_min"]
        rows.last_id = max(rows.last_id, row["id_max"])


# Narrower ranges are not sampled: sampling would cost more than an uneven split.
_MIN_SAMPLED_WIDTH: Final = 200_000
_WINDOWS_PER_RANGE: Final = 64
_SAMPLE_DIVISOR: Final = 100
_MAX_SAMPLED_TOPICS: Final = 16


def estimate_weights(
    database: Database, client: str, ranges: Sequence[IdRange]
) -> list[WeightedRange]:
    """Split the widest ranges into windows, and estimate their messages from 1 % of the ids.

    Topics share one sequence of ids, so the density of a topic's ids varies. The weight of a range
    that is not sampled is its width.
    """
    widest = sorted(ranges, key=lambda range_: -range_.width)[:_MAX_SAMPLED_TOPICS]
    sampled = [range_ for range_ in widest if range_.width > _MIN_SAMPLED_WIDTH]
    windows = [
        piece.range
        for range_ in sampled
        for piece in _split(WeightedRange(range_, _WINDOWS_PER_RANGE), 1, 1)
    ]
    weighted = [WeightedRange(range_, range_.width) for range_ in ranges if range_ not in sampled]
    if windows:
        counts = []
        for window in windows:
            middle = (window.low + window.high) // 2
            part = IdRange(window.topic, middle, middle + max(1, window.width // _SAMPLE_DIVISOR))
            rows = range_sql(client, part, None, with_bodies=False)
            counts.append(f"(SELECT count(*) FROM {rows})")  # noqa: S608
        (row,) = database.fetch_rows(f"SELECT {', '.join(counts)}")
        pairs = zip(windows, row, strict=True)
        weighted += [WeightedRange(window, count * _SAMPLE_DIVISOR) for window, count in pairs]
    return weighted
