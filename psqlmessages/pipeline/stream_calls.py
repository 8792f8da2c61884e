"""Stream calls: how ranges of topics are read by messages.read_stream, some thousand rows a call.

The function collects what a call returns before the first row goes out, so no call takes all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from psqlmessages.pipeline import literals
from psqlmessages.pipeline.ranges import Range
from psqlmessages.pipeline.reading import Statement

# What a call collects then stays in memory: bodies over 2 kB are not collected, but looked up.
BEFORE: Final = ("SET LOCAL work_mem = '32MB'",)

_MOST_ROWS: Final = 10_000
# With conditions a call may return few rows or none, so it is limited by its ids.
_MOST_IDS: Final = 100_000
# Of topics in one statement.
_MOST_IN_UNION: Final = 50


@dataclass(frozen=True)
class StreamCalls:
    """Queries that read ranges of topics: first those in front, each topic by its ids.

    Each is made when the one before has been read. ``conditions`` are of SQL.
    """

    client: str
    ranges: Sequence[Range]
    columns: Sequence[str]
    conditions: Sequence[str] = ()

    def __iter__(self) -> Iterator[Statement]:
        return self._by_ids() if self.conditions else self._by_rows()

    def _by_ids(self) -> Iterator[Statement]:
        for range_ in self.ranges:
            for low in range(range_.low, range_.high, _MOST_IDS):
                part = replace(range_, low=low, high=min(low + _MOST_IDS, range_.high))
                yield self._statement([part], None, lambda _: None)

    def _by_rows(self) -> Iterator[Statement]:
        left = deque(self.ranges)
        while left:
            group = self._group(left)
            most = _MOST_ROWS // len(group)
            found = {part.topic: _Found() for part in group}
            yield self._statement(group, most, lambda batch, f=found: _note(batch, f))  # type: ignore[misc]
            for part in reversed(group):
                last, rows = found[part.topic].last, found[part.topic].rows
                if rows >= most and last < part.high:
                    left.appendleft(replace(part, low=last))

    def _group(self, left: deque[Range]) -> list[Range]:
        """Take ranges of different topics from the front."""
        group: list[Range] = []
        while left and len(group) < _MOST_IN_UNION:
            if left[0].topic in {part.topic for part in group}:
                break
            group.append(left.popleft())
        return group

    def _statement(
        self, group: Sequence[Range], most: int | None, note: Callable[[pa.RecordBatch], None]
    ) -> Statement:
        # Each column more takes a tenth more time; messages of topics have no headers.
        constants: dict[str, str | None] = {"headers": None}
        if len(group) == 1:
            constants["topic"] = group[0].topic
        names = [name for name in self.columns if name not in constants]
        # How far each topic was read.
        names += [name for name in ("id", "topic") if name not in (*names, *constants)]
        where = " AND ".join(f"({condition})" for condition in self.conditions)
        end = f" WHERE {where}" if where else ""
        selects = (
            f"SELECT {', '.join(names)} FROM {self._call(part, most)}{end}"  # noqa: S608
            for part in group
        )
        return Statement(" UNION ALL ".join(selects), constants, note)

    def _call(self, part: Range, most: int | None) -> str:
        return call(self.client, part, most, with_bodies="body" in self.columns)


def call(client: str, part: Range, most: int | None, *, with_bodies: bool) -> str:
    """Return the call that reads a range, at most some rows of it, as SQL."""
    return (
        f"messages.read_stream({literals.text(client)}, {literals.text(part.topic)}, {part.low},"
        f" {part.high}, {'NULL' if most is None else most}, {str(with_bodies).lower()})"
    )


@dataclass
class _Found:
    """What a call returned of a topic."""

    rows: int = 0
    last: int = 0


def _note(batch: pa.RecordBatch, found: dict[str, _Found]) -> None:
    if not batch.num_rows:
        return
    if len(found) == 1:
        (of_all,) = found.values()
        of_all.rows += batch.num_rows
        of_all.last = batch.column("id")[-1].as_py()
        return
    table = pa.table({name: batch.column(name) for name in ("topic", "id")})
    for row in table.group_by("topic").aggregate([("id", "count"), ("id", "max")]).to_pylist():
        found[row["topic"]].rows += row["id_count"]
        found[row["topic"]].last = max(found[row["topic"]].last, row["id_max"])
