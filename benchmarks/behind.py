"""What a WebSocket costs that does not read: the memory of Daphne until it is closed."""

from __future__ import annotations

from contextlib import closing, suppress

from benchmarks.crowd import body_of, connected
from benchmarks.results import Row
from benchmarks.servers import temporary_server
from benchmarks.sites import memory_bytes, relay_site
from psqlmessages.conf import Settings
from psqlmessages.exceptions import NoListeners

BODY_BYTES = 4096
MIB = 2**20
# What a frame holds beside its bytes, and what the first frames make Daphne load.
REACH = 4
MOST_SENT = 256 * MIB


def behind(rounds: int) -> Row:
    """Send to one that reads nothing until it is closed: how much Daphne grows meanwhile."""
    grown: list[float] = []
    with temporary_server() as server, relay_site(server, rounds) as site:
        for number in range(rounds):
            with closing(connected(site.place(number))):
                before = most = memory_bytes(site.pid)
                sent = 0
                # It is a node no more when it is closed.
                with suppress(NoListeners):
                    while sent < MOST_SENT:
                        site.send(body_of(BODY_BYTES))
                        sent += BODY_BYTES
                        most = max(most, memory_bytes(site.pid))
            if sent >= MOST_SENT:
                raise AssertionError("a WebSocket that does not read is never closed")
            grown.append((most - before) / MIB)
    bound = Settings.RELAY_QUEUE_BYTES / MIB
    return Row.of(
        "websockets: behind", "memory of Daphne beside a WebSocket that does not read",
        "RELAY_QUEUE_BYTES", "MiB", grown, [bound] * rounds, reach=REACH, is_at_most=True,
        note=f"the most until it was closed, after {sent / MIB:.0f} MiB were sent to it, which the"
        " system's buffers take in part",
    )  # fmt: skip
