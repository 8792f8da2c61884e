"""Benchmark of queues: elements are pushed, taken and ended, one by one and 100 at once.

python -m benchmarks.queues [--rounds 5] [--quick] [--json FILE]

It starts a PostgreSQL of its own, with the settings PostgreSQL has by default: every commit waits
for the disk. Only its WAL is laid out beforehand: whoever happened to need the next 16 MB would
wait for them. All sides use one server over TCP, each with a queue of its own, and take turns.
Peers are those of requirements.txt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version

import psycopg

from benchmarks.queue_ours import (
    SETUP,
    Popping,
    Reserving,
    Working,
    WorkingSingly,
    is_durable,
)
from benchmarks.queue_peers import (
    ByHand,
    ByHandAtOnce,
    Pgmq,
    PgQueuer,
    Procrastinate,
    Side,
)
from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server

SIZES = {1: "one by one", 100: "100 at once"}
LEASES = "each taken by a lease; by design ours is not awaited on the disk, its is"


@dataclass(frozen=True)
class Pair:
    """Which of our sides stands beside which of others; a note for each of SIZES."""

    ours: type[Side]
    theirs: type[Side]
    notes: tuple[str, str]
    is_quick: bool = False


PAIRS = (
    Pair(Reserving, ByHand, (LEASES, LEASES), is_quick=True),
    Pair(
        Popping,
        ByHandAtOnce,
        ("taken and removed in the reader's transaction; ours is one call in it, its are two",) * 2,
    ),
    Pair(Reserving, Pgmq, (LEASES, LEASES), is_quick=True),
    Pair(
        WorkingSingly,
        Procrastinate,
        (
            "workers that take and end each job by itself, one at a time",
            "100 in a push; workers that take and end each job by itself, its 10 at a time",
        ),
    ),
    Pair(
        Working,
        PgQueuer,
        (
            "workers that take 10 at once and end what is done in groups",
            "workers that take 100 at once and end what is done in groups",
        ),
    ),
)


def measure(options: Options) -> Findings:
    """Compare each pair, with one element in a call and with 100."""
    findings = Findings()
    segments = 4 if options.is_quick else 14
    settings = {"min_wal_size": f"{16 * (segments + 2)}MB"}
    with temporary_server(settings) as server, ExitStack() as stack:
        lay_out_wal(server.superuser_url(), segments)
        dsn = server.url()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(SETUP)
            if not is_durable(dsn, connection):
                raise AssertionError("what a node pushes and commits does not wait for the disk")
        pairs = [
            pair
            for pair in PAIRS
            if (pair.is_quick or not options.is_quick) and is_here(pair.theirs, findings)
        ]
        kinds = dict.fromkeys(kind for pair in pairs for kind in (pair.ours, pair.theirs))
        sides = [stack.enter_context(closing(kind(dsn))) for kind in kinds]
        for place, at_once in enumerate(SIZES):
            count = (100 if options.is_quick else 200) * (1 if at_once == 1 else 10)
            rates = compare(sides, options.rounds, count, at_once)
            findings.rows += [row(pair, place, rates) for pair in pairs]
    return findings


def lay_out_wal(dsn: str, segments: int) -> None:
    """Use up so many segments of WAL; the checkpoint makes them those that are used next."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(segments):
            connection.execute("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
        connection.execute("CHECKPOINT")


def is_here(kind: type[Side], findings: Findings) -> bool:
    """Note a peer's version, or that it is not installed."""
    if not kind.is_here():
        findings.left_out.append(
            f"{kind.name} is not here: pip install -r benchmarks/requirements.txt"
        )
        return False
    for package in kind.needs[:1]:
        findings.versions[kind.name] = version(package)
    return True


def compare(sides: Iterable[Side], rounds: int, count: int, at_once: int) -> dict[str, list[float]]:
    """Measure each side in turns: elements a second of each round; a first one does not count."""
    order = list(sides)
    rates: dict[str, list[float]] = {side.name: [] for side in order}
    for turn in range(rounds + 1):
        for side in order:
            elements = min(count, side.most)
            rate = elements / side.seconds(elements, at_once)
            if turn:
                rates[side.name].append(rate)
        order.reverse()
    return rates


def row(pair: Pair, place: int, rates: Mapping[str, list[float]]) -> Row:
    """Set the two of a pair beside each other."""
    how = list(SIZES.values())[place]
    return Row.of(
        f"queues: {how} to {pair.theirs.name}",
        f"{pair.ours.name}, 1 KB, {how}",
        pair.theirs.name,
        "elements/s",
        rates[pair.ours.name],
        rates[pair.theirs.name],
        reach=1.0,
        note=pair.notes[place],
    )


if __name__ == "__main__":
    run(measure, __doc__)
