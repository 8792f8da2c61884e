"""Benchmark of streams: publish and read, compared with plain SQL, pgmq, JetStream, Redis streams.

python -m benchmarks.streams [--rounds 5] [--quick] [--json FILE]

Each side answers when the message is on the disk: PostgreSQL has its default settings, NATS syncs
always, Redis has appendfsync always. A row with a peer that syncs later has no goal.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks import stream_curves, stream_sides
from benchmarks.results import Findings, Options, Row, run
from benchmarks.rounds import Act, measure_rates
from benchmarks.servers import temporary_server
from benchmarks.stream_sides import BATCH, MESSAGES_PER_ACT, NODE, OURS, OURS_MANY, Sides

LAZY = "the peer syncs every 2 minutes: if the machine fails, acknowledged messages are lost"
ONE: dict[str, dict[str, Any]] = {
    stream_sides.PGMQ: {"goal": 1.0, "note": "pgmq stores jsonb, for one reader, without rules"},
    stream_sides.JETSTREAM: {"goal": 1.0, "note": "sync_interval: always; nats-py, awaited"},
    stream_sides.REDIS: {"goal": 1.0, "note": "appendfsync always; redis-py with hiredis"},
    stream_sides.JETSTREAM_LAZY: {"note": LAZY},
    stream_sides.PLAIN: {"note": "a table without rules, readers or removal"},
}
MANY: dict[str, dict[str, Any]] = {
    stream_sides.PGMQ_MANY: {"goal": 1.5, "note": "pgmq's rows are read, then deleted"},
    stream_sides.COPY: {"note": "a table without rules or removal"},
}


def compare(
    key: str, subject: str, ours: str, acts: dict[str, list[float]], messages: int,
    peers: dict[str, dict[str, Any]],
) -> list[Row]:  # fmt: skip
    """Create a row for each installed peer; ``acts`` are acts/s, with ``messages`` in each act."""
    rates = {side: [rate * messages for rate in act_rates] for side, act_rates in acts.items()}
    return [
        Row.of(
            f"streams: {key} to {peer}", subject, peer, "messages/s", rates[ours], rates[peer],
            **more,
        )
        for peer, more in peers.items()
        if peer in rates
    ]  # fmt: skip


def measure_in_turns(sides: dict[str, Act], options: Options) -> dict[str, list[float]]:
    """Measure in many short turns: a shared disk is slow for seconds, then fast again."""
    return measure_rates(sides, 3 * options.rounds, 0.05 if options.is_quick else 0.25)


def measure(options: Options) -> Findings:
    """Compare with each peer; measure curves in a full run."""
    with temporary_server() as server, ExitStack() as stack:
        sides = Sides(server.url(), stack)
        brokers = () if options.is_quick else stream_sides.BROKERS
        acts = sides.one_by_one(brokers)
        if options.is_quick:
            del acts[stream_sides.PLAIN]
        one = measure_in_turns(acts, options)
        many = measure_in_turns(sides.many(), options)
        findings = Findings(
            compare("publish", "publish one by one, 1 KB", OURS, one, MESSAGES_PER_ACT, ONE)
            + compare("500", "publish 500 in one call, subscribe", OURS_MANY, many, BATCH, MANY)
        )
        if not options.is_quick:
            clients = measure_in_turns(sides.clients(), options)
            peers = {stream_sides.PGMQ_CLIENT: {"note": "both convert a value to JSON"}}
            findings.rows += compare(
                *("Node.publish", "Node.publish one by one, 1 KB", NODE, clients, MESSAGES_PER_ACT),
                peers,
            )
        findings.left_out, findings.versions = sides.left_out, sides.versions
    if not options.is_quick:
        findings.curves += stream_curves.measure(options.rounds)
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
