"""Ranges: parts of topics by id, shared out among partitions. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


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
