"""Status of the monitor: live or not, since when, why. No I/O."""

from __future__ import annotations

from typing import Any, Final

from psqlmessages.monitor.history import KEPT

LIVE: Final = "live"
STARTING: Final = "starting"
AWAY: Final = "away"
NOT_OBSERVING: Final = "not_observing"
# For a single page: its permissions could not be checked.
UNCHECKED: Final = "unchecked"
# A single failed query is not yet an outage.
_UNREAD_SECONDS: Final = 5.0


class MonitorStatus:
    """The current status of the monitor; times are Unix time.

    ``gaps``: periods without reception, as (start, end), within the last ``KEPT`` seconds.
    """

    def __init__(self) -> None:
        self.is_observing = False
        self.is_away = False
        self.since: float | None = None
        self.missing_role: str | None = None
        self._why = ""
        self._was_refused = False
        self._blind_since: float | None = None
        self._unread_since: float | None = None
        self.gaps: list[tuple[float, float]] = []

    def observes(self, now: float) -> None:
        """Record that the monitor now receives everything."""
        self.is_observing, self.is_away, self._was_refused = True, False, False
        self.since = self.since or now
        self._sees(now)

    def refused(self, now: float, missing_role: str | None, why: str) -> None:
        """Record that the monitor does not observe: ``missing_role`` needs a rule, or ``why``."""
        self.is_observing, self.is_away = False, False
        self._was_refused = bool(missing_role or why)
        self.missing_role, self._why = missing_role, why
        self._is_blind(now)

    def lost(self, now: float) -> None:
        """Record that the connection to PostgreSQL is lost."""
        self.is_away = True
        self._is_blind(now)

    def returned(self, now: float) -> None:
        """Record that the connection is back and the nodes are registered again."""
        self.is_away = False
        if self.is_observing:
            self._sees(now)

    def read(self) -> None:
        """Record that the database answered the monitor's queries."""
        self._unread_since = None

    def unread(self, now: float) -> None:
        """Record that the database did not answer."""
        self._unread_since = self._unread_since or now

    def name(self, now: float) -> str:
        """Return the name of the status."""
        if self.is_away or (
            self._unread_since is not None and now - self._unread_since > _UNREAD_SECONDS
        ):
            return AWAY
        if self.is_observing:
            return LIVE
        return NOT_OBSERVING if self._was_refused else STARTING

    def as_json(self, now: float) -> dict[str, Any]:
        """Describe the status for the page."""
        name = self.name(now)
        self.gaps = [gap for gap in self.gaps if gap[1] > now - KEPT]
        return {
            "is": name,
            "since": self.since,
            "why": self._why if name == NOT_OBSERVING else "",
            "missing_role": self.missing_role if name == NOT_OBSERVING else None,
            "gaps": [*self.gaps, *([(self._blind_since, None)] if self._blind_since else [])],
        }

    def _is_blind(self, now: float) -> None:
        if self.since is not None:
            self._blind_since = self._blind_since or now

    def _sees(self, now: float) -> None:
        if self._blind_since is not None:
            self.gaps.append((self._blind_since, now))
            self._blind_since = None
