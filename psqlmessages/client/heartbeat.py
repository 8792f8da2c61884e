"""Heartbeat: when to probe a connection, and when it is lost. No I/O, no clock."""

from __future__ import annotations

import os
from typing import Final

from psqlmessages import wire
from psqlmessages.client.options import Options

PROBE: Final = "Probe"


class Heartbeat:
    """Times of one node: when it heard something, when to evaluate and to probe.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(self, options: Options) -> None:
        self._evaluate_interval = options.evaluate_interval.total_seconds()
        self._probe_interval = options.probe_interval.total_seconds()
        self._probe_timeout = options.probe_timeout.total_seconds()
        # So long a statement of our own may take: with the pause before it as long as a probe.
        self.patience = max(
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
        """Start anew with a fresh connection."""
        self._nonce = ""
        self._evaluated_at = self._probed_at = self.received_at = now
        self.lost_at = None
        self.is_connected = True

    def on_connection_lost(self, now: float) -> None:
        """Note that the connection is gone; the first of several losses counts."""
        self.is_connected = False
        if self.lost_at is None:
            self.lost_at = now

    def rest(self, now: float) -> None:
        """Probe no more until the next is due: there is no channel to probe, or it was refused."""
        self._nonce = ""
        self._probed_at = now

    def on_received(self, now: float) -> None:
        """Note that something came from the server, whatever it was."""
        self.received_at = now

    def evaluation_due(self, now: float) -> bool:
        """Whether to evaluate now; if so, the next time is counted from here."""
        if now - self._evaluated_at < self._evaluate_interval:
            return False
        self._evaluated_at = now
        return True

    def probe_due(self, now: float) -> str | None:
        """Give the payload of a probe to send now; None where none is due or one is under way."""
        if self._nonce or now - self._probed_at < self._probe_interval:
            return None
        self._probed_at = now
        self._nonce = os.urandom(8).hex()
        return wire.serialize({"Type": PROBE, "Nonce": self._nonce})

    def is_echo(self, header: dict[str, object]) -> bool:
        """Whether a notification is the probe that is under way; ends it if so."""
        if not self._nonce or header.get("Nonce") != self._nonce:
            return False
        self._nonce = ""
        self.echo_seconds = max(0.0, self.received_at - self._probed_at)
        return True

    def is_overdue(self, now: float) -> bool:
        """Whether a probe is not echoed though nothing else came either."""
        # A receiver far behind hears the echo late, after all that was sent before it.
        since = max(self._probed_at, self.received_at)
        return bool(self._nonce) and now - since >= self._probe_timeout

    def next_at(self) -> float:
        """When something is due next."""
        evaluate_at = self._evaluated_at + self._evaluate_interval
        if self._nonce:
            probe_at = max(self._probed_at, self.received_at) + self._probe_timeout
        else:
            probe_at = self._probed_at + self._probe_interval
        return min(evaluate_at, probe_at)
