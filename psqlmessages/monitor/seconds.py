"""Seconds: how many messages and bytes came in each of the last seconds. No I/O."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

KEPT: Final = 10 * 60


class Amount(NamedTuple):
    """Messages, and the bytes of their bodies."""

    count: int
    size: int


class Seconds:
    """A ring over the last ``KEPT`` seconds; a second is a whole number of Unix time."""

    __slots__ = ("_counts", "_sizes", "newest")

    def __init__(self, second: int) -> None:
        self._counts = array("Q", bytes(8 * KEPT))
        self._sizes = array("Q", bytes(8 * KEPT))
        self.newest = second

    def add(self, second: int, size: int) -> None:
        """Count a message; where the clock was put back, into the newest second."""
        if second > self.newest:
            self._advance(second)
        place = self.newest % KEPT
        self._counts[place] += 1
        self._sizes[place] += size

    def between(self, first: int, last: int) -> Amount:
        """Add up what came from the first second to the last, both included."""
        return Amount(
            sum(sum(part) for part in self._parts(self._counts, first, last)),
            sum(sum(part) for part in self._parts(self._sizes, first, last)),
        )

    def each(self, first: int, last: int) -> list[Amount]:
        """Tell what came in each second from the first to the last; 0 where it is not kept."""
        return [self.between(second, second) for second in range(first, last + 1)]

    def sums(self, first: int, step: int, number: int) -> list[int]:
        """Count the messages in so many steps of some seconds, from the first second on."""
        place = (self.newest + 1) % KEPT
        ordered = self._counts[place:] + self._counts[:place]
        begin = first - (self.newest - KEPT + 1)
        return [
            sum(ordered[max(begin + n * step, 0) : max(begin + (n + 1) * step, 0)])
            for n in range(number)
        ]

    def _parts(self, ring: array[int], first: int, last: int) -> tuple[array[int], ...]:
        first, last = max(first, self.newest - KEPT + 1), min(last, self.newest)
        if first > last:
            return ()
        begin, end = first % KEPT, last % KEPT + 1
        return (ring[begin:end],) if begin < end else (ring[begin:], ring[:end])

    def _advance(self, second: int) -> None:
        for passed in range(max(self.newest + 1, second - KEPT + 1), second + 1):
            self._counts[passed % KEPT] = self._sizes[passed % KEPT] = 0
        self.newest = second
