"""Streams: publishing and reading, against tables by hand, pgmq, JetStream and Redis streams.

python -m benchmarks.streams [--rounds 5] [--quick] [--json FILE]

Every side's answer says that the message is on the disk: PostgreSQL has its own settings, NATS
syncs always, Redis has appendfsync always. What syncs later is told, and not counted.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks import stream_curves, stream_sides
from benchmarks.results import Findings, Options, Row, run
from benchmarks.rounds import Act, rates
from benchmarks.servers import temporary_server
from benchmarks.stream_sides import AT_ONCE, BATCH, NODE, OURS, OURS_MANY, Sides

LAZY = "the peer syncs every 2 minutes: what it answered may be lost with the machine"
ONE: dict[str, dict[str, Any]] = {
    stream_sides.PGMQ: {"reach": 1.0, "note": "pgmq stores jsonb, for one reader, without rights"},
    stream_sides.JETSTREAM: {"reach": 1.0, "note": "sync_interval: always; nats-py, awaited"},
    stream_sides.REDIS: {"reach": 1.0, "note": "appendfsync always; redis-py with hiredis"},
    stream_sides.JETSTREAM_LAZY: {"note": LAZY},
    stream_sides.BY_HAND: {"note": "a table without rights, readers or removal"},
}
MANY: dict[str, dict[str, Any]] = {
    stream_sides.PGMQ_MANY: {"reach": 1.5, "note": "pgmq's rows are read, then deleted"},
    stream_sides.COPY: {"reach": 0.3, "note": "a table without rights or removal"},
}


def rows(
    name: str, what: str, ours: str, figures: dict[str, list[float]], messages: int,
    peers: dict[str, dict[str, Any]],
) -> list[Row]:  # fmt: skip
    """Make a row of ours with each peer that is here."""
    of = {side: [rate * messages for rate in found] for side, found in figures.items()}
    return [
        Row.of(
            f"streams: {name} to {peer}", what, peer, "messages/s", of[ours], of[peer], **more
        )
        for peer, more in peers.items()
        if peer in of
    ]  # fmt: skip


def in_turns(sides: dict[str, Act], options: Options) -> dict[str, list[float]]:
    """Measure in many short turns: a disk that others use is slow for seconds, then fast again."""
    return rates(sides, 3 * options.rounds, 0.05 if options.is_quick else 0.25)


def measure(options: Options) -> Findings:
    """Compare with each peer; curves where there is time."""
    with temporary_server() as server, ExitStack() as stack:
        sides = Sides(server.url(), stack)
        brokers = () if options.is_quick else stream_sides.BROKERS
        acts = sides.one_by_one(brokers)
        if options.is_quick:
            del acts[stream_sides.BY_HAND]
        one = in_turns(acts, options)
        many = in_turns(sides.many(), options)
        findings = Findings(
            rows("publish", "publish one by one, 1 KB", OURS, one, AT_ONCE, ONE)
            + rows("500", "publish 500 in one call, subscribe", OURS_MANY, many, BATCH, MANY)
        )
        if not options.is_quick:
            by_clients = in_turns(sides.clients(), options)
            more = {stream_sides.PGMQ_CLIENT: {"note": "a value each, made to JSON"}}
            findings.rows += rows(
                "Node.publish", "Node.publish one by one, 1 KB", NODE, by_clients, AT_ONCE, more
            )
        findings.left_out, findings.versions = sides.left_out, sides.versions
    if not options.is_quick:
        findings.curves += stream_curves.measured(options.rounds)
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
