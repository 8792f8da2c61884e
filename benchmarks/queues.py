"""Benchmark of queues: push, reserve and commit elements, one by one and 100 in each call.

python -m benchmarks.queues [--rounds 5] [--quick] [--json FILE]

It starts a temporary PostgreSQL with default settings: every commit waits for the disk. Only the
WAL segments are created in advance, because the side that needs the next segment would wait for it.
All sides use one server over TCP, each has its own queue, and they take turns. requirements.txt
lists the packages of the peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version

import psycopg

from benchmarks.queue_peers import (
    Pgmq,
    PgQueuer,
    PlainLease,
    PlainTransaction,
    Procrastinate,
    Side,
)
from benchmarks.queue_sides import (
    SETUP,
    ConsumeSide,
    PopSide,
    ReserveSide,
    SingleConsumeSide,
    is_durable,
)
from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server

BATCHES = {1: "one by one", 100: "100 at once"}
LEASES = "both reserve by a lease; ours does not wait until the lease is on the disk, the peer does"


@dataclass(frozen=True)
class Pair:
    """One of our sides and a peer, with a note for each of BATCHES."""

    ours: type[Side]
    theirs: type[Side]
    notes: tuple[str, str]
    is_quick: bool = False


PAIRS = (
    Pair(ReserveSide, PlainLease, (LEASES, LEASES), is_quick=True),
    Pair(
        PopSide,
        PlainTransaction,
        ("taken and removed in one transaction; ours with one call, the peer with two",) * 2,
    ),
    Pair(ReserveSide, Pgmq, (LEASES, LEASES), is_quick=True),
    Pair(
        SingleConsumeSide,
        Procrastinate,
        (
            "workers that take and finish jobs one at a time",
            "100 in a push; workers that take and finish single jobs, the peer 10 concurrently",
        ),
    ),
    Pair(
        ConsumeSide,
        PgQueuer,
        (
            "workers that take 10 elements at once and finish them in groups",
            "workers that take 100 elements at once and finish them in groups",
        ),
    ),
)


def measure(options: Options) -> Findings:
    """Compare each pair, with one element per call and with 100."""
    findings = Findings()
    segments = 4 if options.is_quick else 14
    settings = {"min_wal_size": f"{16 * (segments + 2)}MB"}
    with temporary_server(settings) as server, ExitStack() as stack:
        create_wal_segments(server.superuser_url(), segments)
        dsn = server.url()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(SETUP)
            if not is_durable(dsn, connection):
                raise AssertionError("pushes and commits of a node do not wait for the disk")
        pairs = [
            pair
            for pair in PAIRS
            if (pair.is_quick or not options.is_quick) and check_peer(pair.theirs, findings)
        ]
        kinds = dict.fromkeys(kind for pair in pairs for kind in (pair.ours, pair.theirs))
        sides = [stack.enter_context(closing(kind(dsn))) for kind in kinds]
        for index, batch in enumerate(BATCHES):
            count = (100 if options.is_quick else 200) * (1 if batch == 1 else 10)
            rates = measure_rates(sides, options.rounds, count, batch)
            findings.rows += [to_row(pair, index, rates) for pair in pairs]
    return findings


def create_wal_segments(dsn: str, segments: int) -> None:
    """Fill WAL segments, which PostgreSQL recycles after the checkpoint."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(segments):
            connection.execute("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
        connection.execute("CHECKPOINT")


def check_peer(kind: type[Side], findings: Findings) -> bool:
    """Return whether a peer is installed; add its version, or how to install it, to findings."""
    if not kind.is_installed():
        findings.left_out.append(
            f"{kind.name} is not installed: pip install -r benchmarks/requirements.txt"
        )
        return False
    for package in kind.packages[:1]:
        findings.versions[kind.name] = version(package)
    return True


def measure_rates(
    sides: Iterable[Side], rounds: int, count: int, batch: int
) -> dict[str, list[float]]:
    """Measure elements/s of each side in turns; the first round does not count."""
    order = list(sides)
    rates: dict[str, list[float]] = {side.name: [] for side in order}
    for turn in range(rounds + 1):
        for side in order:
            elements = min(count, side.max_count)
            rate = elements / side.seconds(elements, batch)
            if turn:
                rates[side.name].append(rate)
        order.reverse()
    return rates


def to_row(pair: Pair, index: int, rates: Mapping[str, list[float]]) -> Row:
    """Compare the rates of a pair, in the mode with this index in BATCHES."""
    mode = list(BATCHES.values())[index]
    return Row.of(
        f"queues: {mode} to {pair.theirs.name}", f"{pair.ours.name}, 1 KB, {mode}",
        pair.theirs.name, "elements/s", rates[pair.ours.name], rates[pair.theirs.name],
        goal=None if issubclass(pair.theirs, PlainLease) else 1.0, note=pair.notes[index],
    )  # fmt: skip


if __name__ == "__main__":
    run(measure, __doc__)
