"""Contents of a report as plain values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

# The percentiles 50, 95 and 99.
Shares = tuple[float, float, float]

# More steps are unreadable in a chart, and fewer hide detail.
STEPS: Final = 400
# The number of topics and of senders in the tables, and of topics in the chart.
LISTED: Final = 100
DRAWN: Final = 8
_LENGTHS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_AGO: Final = re.compile(r"(\d+) ?(s|m|min|h|d)")
_UNITS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Period(NamedTuple):
    """A range of time in UTC; ``end`` is exclusive."""

    begin: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return (self.end - self.begin).total_seconds()

    def step(self, least: int = 1) -> int:
        """Return the step length in seconds: a multiple of ``least``, for at most STEPS steps."""
        for length in _LENGTHS:
            if length % least == 0 and self.seconds / length <= STEPS:
                return length
        unit = max(least, 3600)
        return unit * -(-int(self.seconds) // (STEPS * unit))


@dataclass(frozen=True)
class TrafficAmount:
    """Messages published in a step, to a topic or by a sender; latencies are in milliseconds.

    ``latency`` is None if it was not measured.
    """

    count: int
    bytes: int
    size: Shares
    latency: Shares | None = None


@dataclass(frozen=True)
class ReportFigures:
    """The counts of a period. The keys of ``steps`` and ``points`` are start times in Unix time.

    ``topics`` and ``senders`` are ordered by messages, descending. ``points`` has the messages of
    the busiest topics in each step. ``source`` describes the origin of the counts. ``counted`` is
    the part of the period that was counted; None means all of it.
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
    """An exchange with its counts since it was created: copies by destination, and outcomes."""

    name: str
    source: tuple[str, str]
    destinations: list[dict[str, Any]]
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The contents of the page. ``database`` describes the database, without secrets."""

    database: str
    period: Period
    made_at: datetime
    figures: ReportFigures
    flows: list[ExchangeFlow]
    home: str = "default"

    def as_json(self) -> dict[str, Any]:
        """Return the data that the script of the page draws."""
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
    """Parse a time: ISO 8601 (UTC if it has no zone), or an age such as ``24h``.

    :raises ValueError: it is neither
    """
    if found := _AGO.fullmatch(text.strip()):
        return now - timedelta(seconds=int(found[1]) * _UNITS[found[2]])
    try:
        read = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time: use 2026-11-21, 2026-11-21T12:00, 24h or 7d"
        ) from None
    return read.astimezone(UTC) if read.tzinfo else read.replace(tzinfo=UTC)
