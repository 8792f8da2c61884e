"""The verdict: whether a gauge was at the end where it was when all had warmed up."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.reliability.soak.gauges import Gauges


@dataclass(frozen=True)
class Bound:
    """What a gauge whose name begins so may grow by: a share of what it was, and some besides."""

    begins: str
    share: float
    more: float


# The first that fits counts.
BOUNDS = (
    Bound("memory of the backend", 0.1, 4),
    Bound("memory", 0.1, 8),
    # Connections of callers come and go.
    Bound("descriptors", 0, 12),
    Bound("threads", 0, 6),
    Bound("connections", 0, 10),
    # A transaction of many tables, caught in the act, holds about a hundred.
    Bound("locks", 0, 250),
    Bound("advisory locks", 0, 8),
    Bound("LISTENs", 0, 3),
    Bound("notification queue", 0, 0.001),
    Bound("table", 0.5, 2),
)


@dataclass(frozen=True)
class Change:
    """A gauge's value when all had warmed up, and at the end."""

    name: str
    first: float
    last: float
    bound: Bound

    @property
    def has_grown(self) -> bool:
        return self.last > self.first * (1 + self.bound.share) + self.bound.more

    def __str__(self) -> str:
        return f"{self.name}: {self.first:.6g} -> {self.last:.6g}"


def changes(samples: Sequence[tuple[float, Gauges]], warm: float) -> list[Change]:
    """Compare what follows `warm` seconds with the end, each the most of a tenth of the rest.

    What was not there in the beginning was 0, but for the memory of those who come and go, which
    is what it was when they were first seen. What has gone does not grow.
    """
    end = samples[-1][0]
    window = (end - warm) / 10
    first = _most(samples, warm, warm + window)
    last = _most(samples, end - window, end)
    found = []
    for name in sorted(last):
        bound = next((bound for bound in BOUNDS if name.startswith(bound.begins)), None)
        if bound is not None:
            guest = next(
                (gauges[name] for at, gauges in samples if name in gauges and at >= warm), 0
            )
            was = first.get(name, guest if name.startswith("memory") else 0)
            found.append(Change(name, was, last[name], bound))
    return found


def _most(samples: Sequence[tuple[float, Gauges]], since: float, until: float) -> Gauges:
    most: Gauges = {}
    for at, gauges in samples:
        if since <= at <= until:
            for name, value in gauges.items():
                most[name] = max(value, most.get(name, 0))
    return most
