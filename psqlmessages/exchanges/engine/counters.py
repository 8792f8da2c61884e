"""Counters of an exchange, by outcome and destination. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

# Values of ExchangeCount.Outcome, a class that this module cannot import: it must not use Django.
OK: Final = "ok"
TO: Final = "to"
BAD_SELECTOR: Final = "bad_selector"
# Upper bounds of the buckets. One more bucket counts elements that took longer.
BUCKET_SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip


@dataclass(slots=True)
class Histogram:
    """Number of elements, their total time, the part that selectors took, and time buckets."""

    count: int = 0
    seconds: float = 0.0
    selector_seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_SECONDS) + 1))

    def add(self, other: Any) -> None:
        """Add another histogram, or a row of ExchangeCount."""
        self.count += other.count
        self.seconds += other.seconds
        self.selector_seconds += other.selector_seconds
        for index, number in enumerate(other.buckets[: len(self.buckets)]):
            self.buckets[index] += number

    def quantile(self, share: float) -> float | None:
        """Return the seconds within which this share of elements finished; None if there are none.

        The elements of a bucket are assumed to be evenly distributed. In the last bucket, which has
        no upper bound, the result is ``inf``.
        """
        rank = share * sum(self.buckets)
        below, lower = 0, 0.0
        for number, upper in zip(self.buckets, BUCKET_SECONDS, strict=False):
            if number and below + number >= rank:
                return lower + (upper - lower) * (rank - below) / number
            below, lower = below + number, upper
        return float("inf") if self.buckets[-1] else None


class ExchangeCounters:
    """Counters of one exchange. ``waits``: how often its consumers waited after an error.

    A key of ``entries`` is an outcome and a number: the index of a destination for counts of its
    copies or selector failures, or -1 for counts of elements.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int], Histogram] = {(OK, -1): Histogram()}
        self._written: dict[tuple[str, int], int] = {}
        self.waits = 0

    def add_elements(
        self, outcome: str, number: int, seconds: float, selector_seconds: float
    ) -> None:
        """Count elements that took ``seconds`` each, and ``selector_seconds`` in total."""
        counter = self.entry(outcome)
        counter.count += number
        counter.seconds += number * seconds
        counter.selector_seconds += selector_seconds
        counter.buckets[bisect_left(BUCKET_SECONDS, seconds)] += number

    def entry(self, outcome: str, destination: int = -1) -> Histogram:
        """Return an entry; create it if it does not exist."""
        return self.entries.setdefault((outcome, destination), Histogram())

    @property
    def selector_failures(self) -> int:
        """Number of failed selector evaluations."""
        entries = self.entries.items()
        return sum(counter.count for (outcome, _), counter in entries if outcome == BAD_SELECTOR)

    @property
    def elements(self) -> int:
        """Number of elements that were finished, with any outcome."""
        entries = self.entries.items()
        return sum(counter.count for (_, destination), counter in entries if destination < 0)

    def count(self, outcome: str) -> int:
        """Return the number of elements with this outcome."""
        return self.entries.get((outcome, -1), Histogram()).count

    def list_unwritten(self, *, is_running: bool) -> Iterator[tuple[str, int, Histogram]]:
        """Yield the changed counters. If running, also yield ``ok``, which is the heartbeat."""
        for (outcome, destination), counter in self.entries.items():
            is_heartbeat = is_running and outcome == OK
            if is_heartbeat or self._written.get((outcome, destination), 0) != counter.count:
                yield outcome, destination, counter

    def mark_written(self, outcome: str, destination: int, count: int) -> None:
        """Record that a counter with this count has been written."""
        self._written[outcome, destination] = count
