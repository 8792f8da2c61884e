"""Contents of a report as plain values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

# Percentiles: what half, 95 % and 99 % are at most.
Shares = tuple[float, float, float]

# More steps than that are no picture any more, and fewer hide what happened.
STEPS: Final = 400
# What is listed of topics and of senders, and what is drawn over time.
LISTED: Final = 100
DRAWN: Final = 8
_LENGTHS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_AGO: Final = re.compile(r"(\d+) ?(s|m|min|h|d)")
_UNITS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Period(NamedTuple):
    """A time: from its beginning on, before its end; both in UTC."""

    begin: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end - self.begin).total_seconds()

    def step(self, least: int = 1) -> int:
        """Return how long steps are: a multiple of ``least`` seconds, so that they are few."""
        for length in _LENGTHS:
            if length % least == 0 and self.seconds / length <= STEPS:
                return length
        unit = max(least, 3600)
        return unit * -(-int(self.seconds) // (STEPS * unit))


@dataclass(frozen=True)
class TrafficAmount:
    """What was published in a step, to a topic or by a sender; latencies are milliseconds.

    ``latency`` is None where nobody measured it.
    """

    count: int
    bytes: int
    size: Shares
    latency: Shares | None = None


@dataclass(frozen=True)
class ReportFigures:
    """What was counted in a period. ``steps`` and ``points`` are by the beginning, as Unix time.

    ``topics`` and ``senders`` have the most messages first; ``points`` are the messages of the
    busiest topics in each step; ``source`` says in words who has counted. Before and after
    ``counted`` nobody has; None: all of the period was counted.
    """

    source: str
    step: int
    total: TrafficAmount | None
    steps: dict[int, TrafficAmount]
    topics: dict[str, TrafficAmount]
    senders: dict[str, TrafficAmount]
    points: dict[str, dict[int, int]]
    counted: tuple[int, int] | None = None


@dataclass(frozen=True)
class ExchangeFlow:
    """An exchange with what it has done since it was made: copies by destination, outcomes."""

    name: str
    source: tuple[str, str]
    destinations: list[dict[str, Any]]
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All that the page tells. ``database`` says which it is, in words and without secrets."""

    database: str
    period: Period
    made_at: datetime
    figures: ReportFigures
    flows: list[ExchangeFlow]
    home: str = "default"

    def as_json(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        figures = self.figures
        return {
            "begin": self.period.begin.timestamp(),
            "end": self.period.end.timestamp(),
            "step": figures.step,
            "counted": figures.counted,
            "steps": [[at, asdict(amount)] for at, amount in sorted(figures.steps.items())],
            "points": [[name, list(at.items())] for name, at in figures.points.items()],
            "home": self.home,
            "exchanges": [asdict(flow) for flow in self.flows],
        }


def moment(text: str, now: datetime) -> datetime:
    """Read a time: ISO 8601 (UTC where it names no zone), or how long ago, as in ``24h``.

    :raises ValueError: it is neither
    """
    if found := _AGO.fullmatch(text.strip()):
        return now - timedelta(seconds=int(found[1]) * _UNITS[found[2]])
    try:
        read = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: give 2026-11-21, 2026-11-21T12:00, 24h or 7d"
        ) from None
    return read.astimezone(UTC) if read.tzinfo else read.replace(tzinfo=UTC)
