"""Contents of a traffic report as plain values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any, Final, NamedTuple

# The percentiles 50, 95 and 99.
Percentiles = tuple[float, float, float]

# A chart with more steps would be unreadable.
MAX_STEPS: Final = 400
TABLE_ROWS: Final = 100
CHART_TOPICS: Final = 8
_STEP_SECONDS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_AGE: Final = re.compile(r"(\d+) ?(s|m|min|h|d)")
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Period(NamedTuple):
    """A range of time in UTC; ``end`` is exclusive."""

    begin: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return (self.end - self.begin).total_seconds()

    def step(self, unit: int = 1) -> int:
        """Return the length of a step in seconds, a multiple of ``unit``.

        The period has at most MAX_STEPS steps of this length.
        """
        for length in _STEP_SECONDS:
            if length % unit == 0 and self.seconds / length <= MAX_STEPS:
                return length
        unit = max(unit, 3600)
        return unit * ceil(int(self.seconds) / (MAX_STEPS * unit))


@dataclass(frozen=True)
class TrafficStatistics:
    """Statistics of the messages of a step, a topic, a sender, or the whole period.

    ``size`` is in bytes. ``latency`` is in milliseconds, or None if it was not measured.
    """

    count: int
    bytes: int
    size: Percentiles
    latency: Percentiles | None = None


@dataclass(frozen=True)
class ReportStatistics:
    """The traffic of a period. ``step`` is in seconds; the keys of ``steps`` are Unix times.

    ``topics`` and ``senders`` begin with the busiest. ``points`` has the numbers of messages of the
    busiest topics, by topic and start of the step. ``source`` is the origin of the statistics.
    ``counted`` is the part of the period that was counted, in Unix time; None means all of it.
    """

    source: str
    step: int
    total: TrafficStatistics | None
    steps: dict[int, TrafficStatistics]
    topics: dict[str, TrafficStatistics]
    senders: dict[str, TrafficStatistics]
    points: dict[str, dict[int, int]]
    counted: tuple[int, int] | None = None


@dataclass(frozen=True)
class ExchangeFlow:
    """An exchange, and its numbers of copies and outcomes since the exchange was created.

    ``source`` is a namespace and a queue.
    """

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
    statistics: ReportStatistics
    flows: list[ExchangeFlow]

    def as_json(self) -> dict[str, Any]:
        """Return the data that the script of the page draws."""
        statistics = self.statistics
        return {
            "begin": self.period.begin.timestamp(),
            "end": self.period.end.timestamp(),
            "step": statistics.step,
            "counted": statistics.counted,
            "steps": [[at, asdict(step)] for at, step in sorted(statistics.steps.items())],
            "points": [[name, list(counts.items())] for name, counts in statistics.points.items()],
            "exchanges": [asdict(flow) for flow in self.flows],
        }


def parse_time(text: str, now: datetime) -> datetime:
    """Parse ISO 8601 (UTC if without a zone) or an age such as ``24h``; raises ValueError."""
    try:
        if match := _AGE.fullmatch(text.strip()):
            return now - timedelta(seconds=int(match[1]) * _UNIT_SECONDS[match[2]])
        time = datetime.fromisoformat(text.strip())
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r:.100} is not a time: use 2026-11-21, 2026-11-21T12:00, 24h or 7d"
        ) from None
