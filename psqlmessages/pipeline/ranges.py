"""Ranges: parts of topics by id, shared out among partitions, and the SQL that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psqlmessages.pipeline import literals
from psqlmessages.pipeline.reading import Statement

# Of SELECTs in one statement.
_MOST_IN_UNION: Final = 50

BEFORE: Final = (
    # A snapshot older than the lock could miss what removal moves.
    "LOCK TABLE messages.stored IN ACCESS SHARE MODE",
    # By the index a wide range is as quick as a whole scan; bitmaps of one outgrow their memory.
    # PostgreSQL thinks otherwise where somebody has analyzed the tables, which nothing here does:
    # 50,000 rows then took 230 ms, by processes that scan a table in parallel, instead of 7.
    "SET LOCAL enable_seqscan = off",
    "SET LOCAL enable_bitmapscan = off",
    "SET LOCAL max_parallel_workers_per_gather = 0",
)


@dataclass(frozen=True)
class Range:
    """The messages of a topic with ids above ``low``, up to ``high``.

    ``is_checked``: those above ``low`` must all be there still.
    """

    topic: str
    low: int
    high: int
    is_checked: bool = False

    @property
    def width(self) -> int:
        """How many ids there are: at least as many as messages."""
        return self.high - self.low


@dataclass(frozen=True)
class Weighed:
    """A range, and about how many messages it holds."""

    range: Range
    weight: int


def shared_out(weighed: Iterable[Weighed], parts: int) -> list[list[Range]]:
    """Cut ranges so that each part holds about as many messages; none of them is empty."""
    # What seems to hold nothing is read all the same.
    found = [Weighed(w.range, max(1, w.weight)) for w in weighed if w.range.width > 0]
    size = -(-sum(w.weight for w in found) // max(1, parts))
    return [joined(part) for part in _filled(found, size)]


def joined(parts: Iterable[Range]) -> list[Range]:
    """Make one of ranges that follow each other."""
    found: list[Range] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and (last.topic, last.high) == (part.topic, part.low):
            found[-1] = Range(part.topic, last.low, part.high, last.is_checked)
        else:
            found.append(part)
    return found


def _filled(weighed: Iterable[Weighed], size: int) -> Iterator[list[Range]]:
    part: list[Range] = []
    room = size
    for whole in weighed:
        for piece in _cut(whole, room, size):
            part.append(piece.range)
            room -= piece.weight
            if room <= 0:
                yield part
                part, room = [], size
    if part:
        yield part


def _cut(whole: Weighed, first: int, others: int) -> Iterator[Weighed]:
    """Cut a range into one that weighs ``first``, some that weigh ``others``, and the rest."""
    topic, low, high = whole.range.topic, whole.range.low, whole.range.high
    taken = first
    while taken < whole.weight:
        end = whole.range.low + whole.range.width * taken // whole.weight
        yield Weighed(Range(topic, low, end, whole.range.is_checked), first)
        low, first = end, others
        taken += others
    yield Weighed(Range(topic, low, high, whole.range.is_checked), whole.weight - taken + first)


def statements(
    ranges: Sequence[Range], columns: Sequence[str], conditions: Sequence[str] = ()
) -> tuple[Statement, ...]:
    """Return queries of columns of ``messages.stored`` for ranges, some in each."""
    return tuple(
        _statement(ranges[first : first + _MOST_IN_UNION], columns, conditions)
        for first in range(0, len(ranges), _MOST_IN_UNION)
    )


def _statement(
    ranges: Sequence[Range], columns: Sequence[str], conditions: Sequence[str]
) -> Statement:
    # Each column more takes a tenth more time; messages of topics have no headers.
    known: dict[str, str | None] = {"headers": None}
    if len({r.topic for r in ranges}) == 1:
        known["topic"] = ranges[0].topic
    # Without any column, rows would not be told apart.
    constants = known if set(columns) - set(known) else {}
    names = ", ".join(name for name in columns if name not in constants)
    selects = [f"SELECT {names} FROM messages.stored WHERE {where(r, conditions)}" for r in ranges]  # noqa: S608
    return Statement(" UNION ALL ".join(selects), constants)


def where(range_: Range, conditions: Sequence[str] = ()) -> str:
    """Return a range as a condition: an equality and bounds, which reach the index."""
    own = f"topic = {literals.text(range_.topic)} AND id > {range_.low} AND id <= {range_.high}"
    return " AND ".join([own, *(f"({condition})" for condition in conditions)])
