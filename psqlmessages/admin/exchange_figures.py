"""Exchange figures: what an exchange has done, as its page shows it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Q
from django.db.models.functions import Now

from psqlmessages.graph.counted import (
    ALIVE_SECONDS,
    BUCKET_SECONDS,
    ELEMENT_OUTCOMES,
    Counted,
    Histogram,
    Row,
)
from psqlmessages.models import Exchange, ExchangeCount

_ROW = ("outcome", "destination", "count", "seconds", "buckets", "selector_seconds")


@dataclass(frozen=True)
class OutcomeRow:
    """An outcome, how many elements had it, and how long they took."""

    label: str
    count: int
    mean: str
    median: str
    slowest: str


@dataclass(frozen=True)
class Figures:
    """What is known of an exchange's work."""

    workers: int
    outcomes: list[OutcomeRow]
    copies: list[tuple[str, int, int]]
    selector_time: str


def alive(prefix: str = "") -> Q:
    """Keep the counts that show that a worker runs the exchange now."""
    seen = Now() - timedelta(seconds=ALIVE_SECONDS)
    return Q(**{f"{prefix}outcome": ExchangeCount.Outcome.OK, f"{prefix}seen_at__gt": seen})


def figures(exchange: Exchange) -> Figures:
    """Read what all workers have counted."""
    counts = ExchangeCount.objects.filter(exchange=exchange)
    counted = Counted.of(Row(*values) for values in counts.values_list(*_ROW))
    elements = counted.elements
    return Figures(
        workers=counts.filter(alive()).count(),
        outcomes=[
            _outcome_row(outcome.label, counted.outcomes.get(outcome, Histogram()))
            for outcome in ELEMENT_OUTCOMES
        ],
        copies=[
            (
                str(destination),
                counted.copies.get(destination.position, 0),
                counted.selector_failures.get(destination.position, 0),
            )
            for destination in exchange.destinations.all()
        ],
        selector_time=duration(counted.selector_seconds / elements) if elements else "-",
    )


def duration(seconds: float | None) -> str:
    """Write a duration for people."""
    if seconds is None:
        return "-"
    if seconds == float("inf"):
        return f"over {BUCKET_SECONDS[-1]:g} s"
    if seconds < 0.001:
        return f"{seconds * 1_000_000:.0f} µs"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _outcome_row(label: str, histogram: Histogram) -> OutcomeRow:
    mean = histogram.seconds / histogram.count if histogram.count else None
    quantiles = (duration(histogram.quantile(share)) for share in (0.5, 0.95))
    return OutcomeRow(label, histogram.count, duration(mean), *quantiles)
