"""Heartbeat: when to probe a connection, and when it is lost. No I/O, no clock.

The intervals are in options.py.
"""

from __future__ import annotations

import os
from typing import Final

from psqlmessages import wire
from psqlmessages.client.options import Options

PROBE: Final = "Probe"


class Heartbeat:
    """When housekeeping and probes of one connection are due, and whether a probe is overdue.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(self, options: Options) -> None:
        self._evaluate_interval = options.evaluate_interval.total_seconds()
        self._probe_interval = options.probe_interval.total_seconds()
        self._probe_timeout = options.probe_timeout.total_seconds()
        # Time limit for answers to housekeeping and probes. Housekeeping begins at most
        # evaluate_interval after a loss, so it detects the loss within probe_interval +
        # probe_timeout, as a probe does.
        self.answer_seconds = max(
            self._probe_timeout,
            self._probe_interval + self._probe_timeout - self._evaluate_interval,
        )
        # Nonce of the echo that must arrive; "" if none is expected.
        self._nonce = ""
        self._has_echoed = False
        self.echo_seconds: float | None = None
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
        """Stop expecting an echo, because there is no channel or the server refused the probe."""
        self._nonce = ""
        self._probed_at = now

    def start_housekeeping_if_due(self, now: float) -> bool:
        """Return whether housekeeping is due; if so, the next interval begins."""
        if now - self._housekeeping_at < self._evaluate_interval:
            return False
        self._housekeeping_at = now
        return True

    def start_probe_if_due(self, now: float) -> bool:
        """Return whether a probe is due; if so, the next interval begins."""
        if self._nonce or now - self._probed_at < self._probe_interval:
            return False
        self._probed_at = now
        return True

    def expect_echo(self) -> str | None:
        """Return a payload to notify the own channel with; None if an earlier echo has arrived.

        Notifications arrive on the same TCP connection as answers. So after one echo, the answer
        to a query is as good a proof, and a query writes no WAL.
        """
        if self._has_echoed:
            return None
        self._nonce = os.urandom(8).hex()
        return wire.serialize({"Type": PROBE, "Nonce": self._nonce})

    def accept_echo(self, header: dict[str, object]) -> bool:
        """Return whether a notification is the expected echo; if so, record that it arrived."""
        if not self._nonce or header.get("Nonce") != self._nonce:
            return False
        self._nonce = ""
        self._has_echoed = True
        self.on_probe_answered(self.received_at)
        return True

    def on_probe_answered(self, now: float) -> None:
        """Record how long the probe took."""
        self.echo_seconds = max(0.0, now - self._probed_at)

    def is_overdue(self, now: float) -> bool:
        """Return whether the echo is late, and no other data has arrived."""
        return bool(self._nonce) and now >= self._echo_deadline()

    def next_at(self) -> float:
        """Return when housekeeping or a probe is due, or the expected echo is late."""
        housekeeping_at = self._housekeeping_at + self._evaluate_interval
        probe_at = self._probed_at + self._probe_interval
        return min(housekeeping_at, self._echo_deadline() if self._nonce else probe_at)

    def _echo_deadline(self) -> float:
        # A slow receiver reads the echo late, after everything that was sent before it.
        return max(self._probed_at, self.received_at) + self._probe_timeout
