"""Counted: what the rows of ExchangeCount say when those of all workers are added up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from psqlmessages.graph.tallies import BUCKET_SECONDS
from psqlmessages.models.exchanges import ExchangeCount

Outcome = ExchangeCount.Outcome

# A worker writes every 2 s: one that has not for so long has stopped.
ALIVE_SECONDS: Final = 10
# What an element can come to, in the order in which it is told.
ELEMENT_OUTCOMES: Final = (
    *(Outcome.OK, Outcome.NO_ROUTE, Outcome.TOO_MANY_HOPS, Outcome.FAILED),
)  # fmt: skip


class Row(NamedTuple):
    """What one worker has counted, or several of them together."""

    outcome: str
    destination: int
    count: int
    seconds: float
    buckets: Sequence[int]
    selector_seconds: float


@dataclass(slots=True)
class Histogram:
    """How long elements took: their number, the sum of seconds, and how many by bucket."""

    count: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_SECONDS) + 1))

    def add(self, row: Row) -> None:
        """Add what a worker has counted."""
        self.count += row.count
        self.seconds += row.seconds
        for place, number in enumerate(row.buckets[: len(self.buckets)]):
            self.buckets[place] += number

    def quantile(self, share: float) -> float | None:
        """Return the seconds that this share of the elements took at most; None without any.

        Within a bucket the elements are taken for evenly spread; what took longer than all
        buckets counts as ``inf``.
        """
        measured = sum(self.buckets)
        wanted, passed, least = share * measured, 0, 0.0
        for number, most in zip(self.buckets, (*BUCKET_SECONDS, float("inf")), strict=True):
            if number and passed + number >= wanted:
                return least + (most - least) * max(wanted - passed, 0) / number
            passed, least = passed + number, most
        return None


@dataclass(slots=True)
class Counted:
    """What became of elements; by destination copies and failures; the selectors' time."""

    outcomes: dict[str, Histogram] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    selector_failures: dict[int, int] = field(default_factory=dict)
    selector_seconds: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Counted:
        """Add up rows."""
        counted = cls()
        for row in rows:
            counted.selector_seconds += row.selector_seconds
            if row.outcome in (Outcome.TO, Outcome.BAD_SELECTOR):
                is_copy = row.outcome == Outcome.TO
                counts = counted.copies if is_copy else counted.selector_failures
                counts[row.destination] = counts.get(row.destination, 0) + row.count
            else:
                counted.outcomes.setdefault(row.outcome, Histogram()).add(row)
        return counted

    @property
    def elements(self) -> int:
        """All that were taken."""
        return sum(histogram.count for histogram in self.outcomes.values())
