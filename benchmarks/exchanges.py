"""Benchmark of exchanges: from one queue into two, by a regular expression on a header.

python -m benchmarks.exchanges [--rounds 5] [--quick] [--json FILE]

Elements of 1 KB wait in a queue; measured is how long it takes until both others have a copy of
each and the first is empty. Exchanges run as users run them, in a process of their own. Beside
them stand the loop of keuss, 16 of it, on PostgreSQL and on a Redis that keeps nothing on disk,
and one statement by hand that routes 100 at a time. All use one PostgreSQL over TCP and take
turns; every commit waits for the disk. keuss needs Node.js with npm, and redis-server; it is
installed into a folder of the run, or into the one that KEUSS_FOLDER names.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import keuss
from benchmarks.brokers import NotHere, version
from benchmarks.exchange_sides import (
    ByHand,
    Graph,
    Ours,
    Side,
    keuss_on_postgres,
    keuss_on_redis,
    running,
)
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server

WHAT = "exchange, 1 to 2, 1 KB, header regex"
DEFAULT, WIDE = "ours", "ours, 2 loops of 500"
HAND, POSTGRES, REDIS = "by hand", "keuss on PostgreSQL", "keuss on Redis"
GRAPHS = {DEFAULT: Graph("plain"), WIDE: Graph("wide", consumer="{parallel: 2, wsize: 1000}")}
FANS = [Graph(f"fan{size}", tuple(f"to{n}" for n in range(size))) for size in (1, 2, 4, 8)]
# How many elements take each of them about a second.
COUNTS = {DEFAULT: 20_000, WIDE: 20_000, HAND: 30_000, POSTGRES: 2_000, REDIS: 20_000}
QUICK_COUNTS = {DEFAULT: 3_000, HAND: 5_000}
OF_HAND = "the statement knows no rules, counts or wake-ups, and no selectors but its own"
COPIES = 16_000
KILOBYTES = {1: COPIES, 10: COPIES // 4}
CURVE_ROUNDS = 3


def measure(options: Options) -> Findings:
    """Measure exchanges beside a statement by hand and keuss."""
    findings = Findings()
    graphs = [GRAPHS[DEFAULT]] if options.is_quick else [*GRAPHS.values(), *FANS]
    with temporary_server() as server, tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        dsn = server.url()
        sides: dict[str, Side] = {}
        if not options.is_quick:
            folder = Path(os.environ.get("KEUSS_FOLDER") or made)
            sides |= peers(dsn, folder, findings, stack)
        sides[HAND] = stack.enter_context(closing(ByHand(dsn)))
        for name, graph in GRAPHS.items():
            if graph in graphs:
                sides[name] = stack.enter_context(closing(Ours(dsn, graph)))
        stack.enter_context(running(dsn, graphs))
        counts = QUICK_COUNTS if options.is_quick else COUNTS
        findings.rows = rows(rates(sides, counts, options.rounds))
        if not options.is_quick:
            findings.curves.append(curve(dsn))
    return findings


def peers(dsn: str, folder: Path, findings: Findings, stack: ExitStack) -> dict[str, Side]:
    """Open keuss where it and what it needs are here."""
    sides: dict[str, Side] = {}
    try:
        keuss.install(folder)
        findings.versions["keuss"] = keuss.VERSION
        findings.versions["Node.js"] = version("node")
        sides[POSTGRES] = keuss_on_postgres(folder, dsn, stack)
        sides[REDIS] = keuss_on_redis(folder, stack)
        findings.versions["Redis"] = version("redis-server")
    except NotHere as reason:
        missing = REDIS if sides else "keuss"
        findings.left_out.append(f"exchanges: {missing}: {reason}")
    return sides


def rates(
    sides: Mapping[str, Side], counts: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Measure elements a second of each side in each round; a first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        order = list(sides)
        for name in reversed(order) if turn % 2 else order:
            rate = counts[name] / sides[name].route(counts[name])
            if turn:
                found[name].append(rate)
    return found


def rows(found: Mapping[str, list[float]]) -> list[Row]:
    """Make a row for each of those beside which ours stand."""
    made: list[Row] = []
    of = partial(Row.of, unit="elements/s")
    against = {
        HAND: ("one statement by hand that routes 100", 0.3, OF_HAND),
        POSTGRES: ("keuss 2.0.6 on PostgreSQL, 16 loops", 10, "ours 1 loop"),
        REDIS: ("keuss 2.0.6 on Redis, 16 loops", 1, "ours 1 loop; Redis keeps nothing on disk"),
    }
    for mine in (name for name in GRAPHS if name in found):
        config = "" if mine == DEFAULT else ", 2 loops of 500"
        for name, (peer, reach, note) in against.items():
            if name in found:
                key = f"exchanges: {name}{config}"
                made.append(
                    of(key, WHAT + config, peer, ours=found[mine], theirs=found[name],
                       reach=reach, note=note.replace("1 loop", "2 loops") if config else note)
                )  # fmt: skip
    return made


def curve(dsn: str) -> Curve:
    """Measure how the rate goes with the number of destinations and the size of bodies."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for kilobytes, copies in KILOBYTES.items():
        points = lines.setdefault(f"{kilobytes} KB", [])
        for graph in FANS:
            count = copies // (len(graph.destinations) + 1)
            with closing(Ours(dsn, graph, "x" * (1000 * kilobytes))) as side:
                seconds = median(side.route(count) for _ in range(CURVE_ROUNDS))
            points.append((len(graph.destinations), count / seconds))
    return Curve(
        "exchanges: by destinations",
        "Elements that an exchange routes, all destinations take them",
        "destinations",
        "elements/s",
        lines,
        "one loop, as defined by default",
    )


if __name__ == "__main__":
    run(measure, __doc__)
