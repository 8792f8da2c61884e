"""Heartbeat: when to probe a connection, and when it is lost. No I/O, no clock.

The first probe of a connection is a notification to the session's own channel; its arrival is the
echo. After an echo, probes are queries.
"""

from __future__ import annotations

import os
from typing import Final

from psqlmessages import wire
from psqlmessages.client.options import Options

PROBE: Final = "Probe"


class Heartbeat:
    """When housekeeping and probes of one connection are due, and whether an echo is overdue.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(self, options: Options) -> None:
        self._housekeeping_seconds = options.evaluate_interval.total_seconds()
        self._probe_interval_seconds = options.probe_interval.total_seconds()
        self._probe_timeout_seconds = options.probe_timeout.total_seconds()
        # Time limit for answers to housekeeping and probes. A loss should be detected within
        # probe_interval + probe_timeout, and housekeeping may begin evaluate_interval after it.
        self.answer_seconds = max(
            self._probe_timeout_seconds,
            self._probe_interval_seconds + self._probe_timeout_seconds - self._housekeeping_seconds,
        )
        # Nonce of the echo that must arrive; "" if none is expected.
        self._nonce = ""
        self._has_echoed = False
        self.probe_seconds: float | None = None
        self._housekeeping_at = 0.0
        self._probed_at = 0.0
        self.received_at = 0.0
        self.lost_at: float | None = None
        self.is_connected = False

    def on_connected(self, now: float) -> None:
        """Record a new connection, and start all intervals."""
        self._nonce = ""
        self._has_echoed = False
        self._housekeeping_at = self._probed_at = self.received_at = now
        self.lost_at = None
        self.is_connected = True

    def on_connection_lost(self, now: float) -> None:
        """Record that the connection is lost; ``lost_at`` stays until the next connection."""
        self.is_connected = False
        if self.lost_at is None:
            self.lost_at = now

    def cancel_probe(self, now: float) -> None:
        """Stop expecting an echo, and begin the next interval of probes."""
        self._nonce = ""
        self._probed_at = now

    def check_housekeeping_due(self, now: float) -> bool:
        """Return whether housekeeping is due; if so, begin its next interval."""
        if now - self._housekeeping_at < self._housekeeping_seconds:
            return False
        self._housekeeping_at = now
        return True

    def check_probe_due(self, now: float) -> bool:
        """Return whether a probe is due; if so, begin the next interval of probes."""
        if self._nonce or now - self._probed_at < self._probe_interval_seconds:
            return False
        self._probed_at = now
        return True

    def create_echo_payload(self) -> str | None:
        """Return the payload of the probe's notification; None if the probe should be a query.

        An echo shows that notifications arrive. Then a query is enough, as its answer takes the
        same TCP connection. A query writes no WAL.
        """
        if self._has_echoed:
            return None
        self._nonce = os.urandom(8).hex()
        return wire.serialize({"Type": PROBE, "Nonce": self._nonce})

    def accept_echo(self, header: dict[str, object]) -> bool:
        """Return whether a notification is the expected echo; if so, record its arrival."""
        if not self._nonce or header.get("Nonce") != self._nonce:
            return False
        self._nonce = ""
        self._has_echoed = True
        self.on_probe_answered(self.received_at)
        return True

    def on_probe_answered(self, now: float) -> None:
        """Record how long the last probe took: ``now`` is the time of its answer or echo."""
        self.probe_seconds = max(0.0, now - self._probed_at)

    def is_overdue(self, now: float) -> bool:
        """Return whether neither the expected echo nor another notification came in time."""
        return bool(self._nonce) and now >= self._echo_deadline()

    def next_at(self) -> float:
        """Return when housekeeping or a probe is due, or the expected echo is late."""
        housekeeping_at = self._housekeeping_at + self._housekeeping_seconds
        probe_at = self._probed_at + self._probe_interval_seconds
        return min(housekeeping_at, self._echo_deadline() if self._nonce else probe_at)

    def _echo_deadline(self) -> float:
        # A slow receiver gets more time: it reads the echo after all earlier notifications.
        return max(self._probed_at, self.received_at) + self._probe_timeout_seconds
