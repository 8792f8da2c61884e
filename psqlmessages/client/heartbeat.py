"""Heartbeat: when to probe a connection, and when it is lost. No I/O, no clock."""

from __future__ import annotations

import os
from typing import Final

from psqlmessages import wire
from psqlmessages.client.options import Options

PROBE: Final = "Probe"


class Heartbeat:
    """Times of one node: last receipt, next housekeeping and next probe.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(self, options: Options) -> None:
        self._evaluate_interval = options.evaluate_interval.total_seconds()
        self._probe_interval = options.probe_interval.total_seconds()
        self._probe_timeout = options.probe_timeout.total_seconds()
        # Time limit of housekeeping and probes. With the pause before it, a loss is found within
        # probe_interval + probe_timeout, as by a probe.
        self.answer_seconds = max(
            self._probe_timeout,
            self._probe_interval + self._probe_timeout - self._evaluate_interval,
        )
        self._nonce = ""
        self.echo_seconds: float | None = None
        self._evaluated_at = 0.0
        self._probed_at = 0.0
        self.received_at = 0.0
        self.lost_at: float | None = None
        self.is_connected = False

    def on_connected(self, now: float) -> None:
        """Start over with a new connection."""
        self._nonce = ""
        self._evaluated_at = self._probed_at = self.received_at = now
        self.lost_at = None
        self.is_connected = True

    def on_connection_lost(self, now: float) -> None:
        """Record that the connection is lost; the time of the first loss counts."""
        self.is_connected = False
        if self.lost_at is None:
            self.lost_at = now

    def rest(self, now: float) -> None:
        """End the current probe, because there is no channel or the server refused it."""
        self._nonce = ""
        self._probed_at = now

    def on_received(self, now: float) -> None:
        """Record that the server sent something."""
        self.received_at = now

    def evaluation_due(self, now: float) -> bool:
        """Return whether housekeeping is due; if so, start the next interval."""
        if now - self._evaluated_at < self._evaluate_interval:
            return False
        self._evaluated_at = now
        return True

    def probe_due(self, now: float) -> str | None:
        """Return the payload of a probe to send now; None if none is due or one is pending."""
        if self._nonce or now - self._probed_at < self._probe_interval:
            return None
        self._probed_at = now
        self._nonce = os.urandom(8).hex()
        return wire.serialize({"Type": PROBE, "Nonce": self._nonce})

    def is_echo(self, header: dict[str, object]) -> bool:
        """Return whether a notification is the echo of the pending probe; if so, end the probe."""
        if not self._nonce or header.get("Nonce") != self._nonce:
            return False
        self._nonce = ""
        self.echo_seconds = max(0.0, self.received_at - self._probed_at)
        return True

    def is_overdue(self, now: float) -> bool:
        """Return whether a probe has no echo in time and nothing else arrived either."""
        # A slow receiver reads the echo late, after everything that was sent before it.
        since = max(self._probed_at, self.received_at)
        return bool(self._nonce) and now - since >= self._probe_timeout

    def next_at(self) -> float:
        """Return when something is due next."""
        evaluate_at = self._evaluated_at + self._evaluate_interval
        if self._nonce:
            probe_at = max(self._probed_at, self.received_at) + self._probe_timeout
        else:
            probe_at = self._probed_at + self._probe_interval
        return min(evaluate_at, probe_at)
