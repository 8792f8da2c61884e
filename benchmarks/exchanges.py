"""Benchmark of exchanges: from one queue to two, by a regular expression on a header.

python -m benchmarks.exchanges [--rounds 5] [--quick] [--json FILE]

Elements of 1 KB wait in a queue. The time ends when both other queues have a copy of each element
and the first queue is empty. Exchanges run in a process of `exchange run`. Peers are 16 loops of
keuss, on PostgreSQL and on a Redis that stores nothing on disk, and one SQL statement that routes
100 elements. All but keuss on Redis use one PostgreSQL over TCP; every commit waits for the disk.
The sides take turns. keuss needs Node.js with npm, and redis-server. It is installed into a
temporary folder, or into the folder in KEUSS_FOLDER.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from benchmarks import keuss
from benchmarks.brokers import PeerMissing, version
from benchmarks.exchange_sides import (
    Exchange,
    PlainSql,
    RunningExchange,
    Side,
    exchange_worker,
    keuss_on_postgres,
    keuss_on_redis,
)
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server

SUBJECT = "exchange, 1 to 2, 1 KB, header regex"
DEFAULT, WIDE = "ours", "ours, 2 loops of 500"
PLAIN, POSTGRES, REDIS = "by hand", "keuss on PostgreSQL", "keuss on Redis"
EXCHANGES = {
    DEFAULT: Exchange("plain"),
    WIDE: Exchange("wide", consumer="{parallel: 2, wsize: 1000}"),
}
FANS = [Exchange(f"fan{size}", tuple(f"to{n}" for n in range(size))) for size in (1, 2, 4, 8)]
# Each side takes about a second for this number of elements.
COUNTS = {DEFAULT: 20_000, WIDE: 20_000, PLAIN: 30_000, POSTGRES: 2_000, REDIS: 20_000}
QUICK_COUNTS = {DEFAULT: 3_000, PLAIN: 5_000}
PLAIN_NOTE = "the statement has no rules, counts or notifications, and fixed selectors"
COPIES = 16_000
KILOBYTES = {1: COPIES, 10: COPIES // 4}
CURVE_ROUNDS = 3


def measure(options: Options) -> Findings:
    """Compare exchanges with an SQL statement and keuss."""
    findings = Findings()
    exchanges = [EXCHANGES[DEFAULT]] if options.is_quick else [*EXCHANGES.values(), *FANS]
    with temporary_server() as server, tempfile.TemporaryDirectory() as temp, ExitStack() as stack:
        dsn = server.url()
        sides: dict[str, Side] = {}
        if not options.is_quick:
            folder = Path(os.environ.get("KEUSS_FOLDER") or temp)
            sides |= open_peers(dsn, folder, findings, stack)
        sides[PLAIN] = stack.enter_context(closing(PlainSql(dsn)))
        for name, exchange in EXCHANGES.items():
            if exchange in exchanges:
                sides[name] = stack.enter_context(closing(RunningExchange(dsn, exchange)))
        stack.enter_context(exchange_worker(dsn, exchanges))
        counts = QUICK_COUNTS if options.is_quick else COUNTS
        findings.rows = compare(measure_rates(sides, counts, options.rounds))
        if not options.is_quick:
            findings.curves.append(measure_curve(dsn))
    return findings


def open_peers(dsn: str, folder: Path, findings: Findings, stack: ExitStack) -> dict[str, Side]:
    """Start keuss on both databases, if it can be installed."""
    sides: dict[str, Side] = {}
    try:
        keuss.install(folder)
        findings.versions["keuss"] = keuss.VERSION
        findings.versions["Node.js"] = version("node")
        sides[POSTGRES] = keuss_on_postgres(folder, dsn, stack)
        sides[REDIS] = keuss_on_redis(folder, stack)
        findings.versions["Redis"] = version("redis-server")
    except PeerMissing as reason:
        missing = REDIS if sides else "keuss"
        findings.left_out.append(f"exchanges: {missing}: {reason}")
    return sides


def measure_rates(
    sides: Mapping[str, Side], counts: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Measure elements/s of each side in each round; the first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        order = list(sides)
        for name in reversed(order) if turn % 2 else order:
            rate = counts[name] / sides[name].route(counts[name])
            if turn:
                found[name].append(rate)
    return found


def compare(rates: Mapping[str, list[float]]) -> list[Row]:
    """Create a row for each exchange and each peer."""
    rows: list[Row] = []
    peers: dict[str, tuple[str, float | None, str]] = {
        PLAIN: ("one SQL statement that routes 100", None, PLAIN_NOTE),
        POSTGRES: ("keuss 2.0.6 on PostgreSQL, 16 loops", 10, "ours 1 loop"),
        REDIS: ("keuss 2.0.6 on Redis, 16 loops", 1, "ours 1 loop; Redis stores nothing on disk"),
    }
    for ours in (name for name in EXCHANGES if name in rates):
        config = "" if ours == DEFAULT else ", 2 loops of 500"
        for name, (peer, goal, note) in peers.items():
            if name in rates:
                row = Row.of(
                    f"exchanges: {name}{config}", SUBJECT + config, peer, "elements/s",
                    rates[ours], rates[name], goal=goal,
                    note=note.replace("1 loop", "2 loops") if config else note,
                )  # fmt: skip
                rows.append(row)
    return rows


def measure_curve(dsn: str) -> Curve:
    """Measure how the rate depends on the number of destinations and the size of bodies."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for kilobytes, copies in KILOBYTES.items():
        points = lines.setdefault(f"{kilobytes} KB", [])
        for exchange in FANS:
            count = copies // (len(exchange.destinations) + 1)
            with closing(RunningExchange(dsn, exchange, "x" * (1000 * kilobytes))) as side:
                seconds = median(side.route(count) for _ in range(CURVE_ROUNDS))
            points.append((len(exchange.destinations), count / seconds))
    return Curve(
        "exchanges: by destinations", "Elements routed to all destinations", "destinations",
        "elements/s", lines, "one loop, the default",
    )  # fmt: skip


if __name__ == "__main__":
    run(measure, __doc__)
