"""Counters of an exchange, by outcome and destination. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

# Same values as ExchangeCount.Outcome: a process may count without Django.
OK: Final = "ok"
TO: Final = "to"
BAD_SELECTOR: Final = "bad_selector"
# Upper bounds of the buckets. One more bucket counts elements that took longer.
BUCKET_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)  # fmt: skip


@dataclass(slots=True)
class Counter:
    """Number of elements, their total time, and the part of it that selectors took."""

    count: int = 0
    seconds: float = 0.0
    selector_seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_SECONDS) + 1))


class ExchangeCounters:
    """Counters of one exchange by outcome and destination, and how often consumers waited."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int], Counter] = {(OK, -1): Counter()}
        self._written: dict[tuple[str, int], int] = {}
        self.waits = 0

    def finished(self, outcome: str, number: int, seconds: float, selector_seconds: float) -> None:
        """Count elements that took ``seconds`` each; ``selector_seconds`` is their sum."""
        entry = self.entries.setdefault((outcome, -1), Counter())
        entry.count += number
        entry.seconds += number * seconds
        entry.selector_seconds += selector_seconds
        entry.buckets[bisect_left(BUCKET_SECONDS, seconds)] += number

    def copied(self, destination: int, number: int) -> None:
        """Count copies to a destination."""
        self.entries.setdefault((TO, destination), Counter()).count += number

    def failed_to_select(self, destination: int) -> None:
        """Count a failure of a destination's selector."""
        self.entries.setdefault((BAD_SELECTOR, destination), Counter()).count += 1

    def add(self, outcome: str, destination: int, more: Counter) -> None:
        """Add the counters of another process."""
        entry = self.entries.setdefault((outcome, destination), Counter())
        entry.count += more.count
        entry.seconds += more.seconds
        entry.selector_seconds += more.selector_seconds
        entry.buckets = [
            one + other for one, other in zip(entry.buckets, more.buckets, strict=True)
        ]

    @property
    def selector_failures(self) -> int:
        """Number of failed selector evaluations."""
        entries = self.entries.items()
        return sum(entry.count for (what, _), entry in entries if what == BAD_SELECTOR)

    @property
    def elements(self) -> int:
        """Number of elements that were finished, with any outcome."""
        return sum(entry.count for (_, place), entry in self.entries.items() if place < 0)

    def count(self, outcome: str) -> int:
        """Return the number of elements with this outcome."""
        return self.entries.get((outcome, -1), Counter()).count

    def unwritten(self, *, is_running: bool) -> Iterator[tuple[str, int, Counter]]:
        """Yield the changed entries, and always the ok entry of a running exchange as heartbeat."""
        for (outcome, destination), entry in self.entries.items():
            is_sign = is_running and outcome == OK
            if is_sign or self._written.get((outcome, destination), 0) != entry.count:
                yield outcome, destination, entry

    def wrote(self, outcome: str, destination: int, count: int) -> None:
        """Record that this count of an entry has been written."""
        self._written[outcome, destination] = count
