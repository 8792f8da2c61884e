"""Status of the monitor: since when it observes, or why it does not. No I/O."""

from __future__ import annotations

from typing import Any, Final

from psqlmessages.monitor.history import HISTORY_SECONDS

LIVE: Final = "live"
STARTING: Final = "starting"
UNREACHABLE: Final = "away"
NOT_OBSERVING: Final = "not_observing"
# Status of one page: the permissions of its user could not be checked.
UNCHECKED: Final = "unchecked"
# If queries fail for longer than this, PostgreSQL counts as unreachable.
_READ_FAILURE_SECONDS: Final = 5.0


class MonitorStatus:
    """The current status of the monitor; times are Unix times.

    ``is_registered``: the hub has a node that observes all topics. ``is_disconnected``: the hub has
    lost PostgreSQL; it will register the node again. ``live_since``: since when the status is LIVE.
    ``gaps``: recent periods without observation, as (start, end).
    """

    def __init__(self) -> None:
        self.is_registered = False
        self.is_disconnected = False
        self.first_observed_at: float | None = None
        self.live_since: float | None = None
        self.role_without_rule: str | None = None
        self._reason = ""
        self._was_refused = False
        self._gap_start: float | None = None
        self._read_failed_since: float | None = None
        self.gaps: list[tuple[float, float]] = []

    def on_observing(self, now: float) -> None:
        """Record that the monitor now observes all topics."""
        self.is_registered, self.is_disconnected, self._was_refused = True, False, False
        self.first_observed_at = self.first_observed_at or now
        self._close_gap(now)

    def on_not_observing(
        self, now: float, role_without_rule: str | None = None, reason: str = ""
    ) -> None:
        """Record that the monitor does not observe.

        If observing was refused, ``reason`` says why, and ``role_without_rule`` lacks the rule.
        """
        self.is_registered, self.is_disconnected = False, False
        self._was_refused = bool(role_without_rule or reason)
        self.role_without_rule, self._reason = role_without_rule, reason
        self._open_gap(now)

    def on_connection_lost(self, now: float) -> None:
        """Record that the hub has lost PostgreSQL."""
        self.is_disconnected = True
        self._open_gap(now)

    def on_reconnected(self, now: float) -> None:
        """Record that the hub has reconnected and registered its nodes again."""
        self.is_disconnected = False
        if self.is_registered:
            self._close_gap(now)

    def on_read(self, now: float) -> None:
        """Record that the queries succeeded. If they had failed for long, LIVE begins again now."""
        if self.is_registered and self.name(now) == UNREACHABLE and not self.is_disconnected:
            self.live_since = now
        self._read_failed_since = None

    def on_read_failed(self, now: float) -> None:
        """Record that a query failed."""
        self._read_failed_since = self._read_failed_since or now

    def name(self, now: float) -> str:
        """Return LIVE, STARTING, UNREACHABLE or NOT_OBSERVING."""
        if self.is_disconnected or (
            self._read_failed_since is not None
            and now - self._read_failed_since > _READ_FAILURE_SECONDS
        ):
            return UNREACHABLE
        if self.is_registered:
            return LIVE
        return NOT_OBSERVING if self._was_refused else STARTING

    def as_json(self, now: float) -> dict[str, Any]:
        """Describe the status for the page."""
        name = self.name(now)
        self.gaps = [gap for gap in self.gaps if gap[1] > now - HISTORY_SECONDS]
        return {
            "is": name,
            "since": self.first_observed_at,
            "live_since": self.live_since if name == LIVE else None,
            "why": self._reason if name == NOT_OBSERVING else "",
            "role_without_rule": self.role_without_rule if name == NOT_OBSERVING else None,
            "gaps": [*self.gaps, *([(self._gap_start, None)] if self._gap_start else [])],
        }

    def _open_gap(self, now: float) -> None:
        self.live_since = None
        if self.first_observed_at is not None:
            self._gap_start = self._gap_start or now

    def _close_gap(self, now: float) -> None:
        self.live_since = self.live_since or now
        if self._gap_start is not None:
            self.gaps.append((self._gap_start, now))
            self._gap_start = None
