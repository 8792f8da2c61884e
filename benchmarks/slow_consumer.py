"""Slow consumer: how much memory Daphne uses for a WebSocket that does not read."""

from __future__ import annotations

from contextlib import closing, suppress

from benchmarks.results import Row
from benchmarks.servers import temporary_server
from benchmarks.websocket_clients import connect_websocket, timed_body
from benchmarks.websocket_sites import memory_bytes, relay_site
from psqlmessages.conf import Settings
from psqlmessages.exceptions import NoListeners

BODY_BYTES = 4096
MIB = 2**20
# Frames need more memory than their bytes, and Daphne loads modules for the first frames.
GOAL = 4
MAX_SENT_BYTES = 256 * MIB


def measure(rounds: int) -> Row:
    """Send to a WebSocket that does not read, until Daphne closes it; measure Daphne's growth."""
    grown: list[float] = []
    with temporary_server() as server, relay_site(server, rounds) as site:
        for number in range(rounds):
            with closing(connect_websocket(site.endpoint(number))):
                before = largest = memory_bytes(site.pid)
                sent = 0
                # After the WebSocket is closed, the topic has no listener.
                with suppress(NoListeners):
                    while sent < MAX_SENT_BYTES:
                        site.send(timed_body(BODY_BYTES))
                        sent += BODY_BYTES
                        largest = max(largest, memory_bytes(site.pid))
            if sent >= MAX_SENT_BYTES:
                raise AssertionError("a WebSocket that does not read is never closed")
            grown.append((largest - before) / MIB)
    bound = Settings.RELAY_QUEUE_BYTES / MIB
    return Row.of(
        "websockets: behind", "memory of Daphne for a WebSocket that does not read",
        "RELAY_QUEUE_BYTES", "MiB", grown, [bound] * rounds, goal=GOAL, is_lower_better=True,
        note=f"the maximum until it was closed, after {sent / MIB:.0f} MiB were sent to it; the"
        " system's buffers hold a part of them",
    )  # fmt: skip
