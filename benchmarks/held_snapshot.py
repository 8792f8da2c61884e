"""Benchmark of queues while a transaction is open: does taking stay as fast as in a new database?

python -m benchmarks.held_snapshot [--rounds 5] [--quick] [--json FILE]

In one database, a transaction holds a snapshot while elements are pushed, reserved and committed:
vacuum cannot remove them, nor their entries in the indexes. The same work is then measured there
and in a new database of the same server, in turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import psycopg

from benchmarks.databases import create_database
from benchmarks.queue_sides import ReserveSide
from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server
from psqlmessages import Node

TAKEN, QUICK_TAKEN = 1_000_000, 50_000
PER_CALL = 1000
# The number of elements in a round, for each number of elements in a call.
COUNTS, QUICK_COUNTS = {1: 400, 100: 20_000}, {1: 100, 100: 5000}
QUICK_ROUNDS = 3
NAMES = {1: "one by one", 100: "100 at once"}
RULES = [(ReserveSide.queue, "Queue", ReserveSide.queue, "RW")]


@contextmanager
def hold_snapshot(dsn: str) -> Iterator[None]:
    """Keep a transaction open, as a long report or a forgotten session does."""
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        yield


def take_elements(dsn: str, count: int) -> None:
    """Push, reserve and commit elements."""
    queue = ReserveSide.queue
    bodies = ["x"] * PER_CALL
    with Node(queue, dsn) as node:
        for _ in range(count // PER_CALL):
            node.push_many(queue, bodies)
            node.commit(*node.reserve(queue, PER_CALL))


def measure(options: Options) -> Findings:
    """Compare both databases, with one element per call and with 100."""
    findings = Findings()
    rounds = min(options.rounds, QUICK_ROUNDS) if options.is_quick else options.rounds
    taken = QUICK_TAKEN if options.is_quick else TAKEN
    with temporary_server() as server, ExitStack() as stack:
        held, new = (create_database(server, name, RULES) for name in ("held", "new"))
        stack.enter_context(hold_snapshot(held))
        take_elements(held, taken)
        sides = [stack.enter_context(closing(ReserveSide(dsn))) for dsn in (held, new)]
        for batch, count in (QUICK_COUNTS if options.is_quick else COUNTS).items():
            rates = measure_rates(sides, rounds, count, batch)
            row = Row.of(
                f"held snapshot: {NAMES[batch]}", f"push, reserve, commit, {NAMES[batch]}",
                "a new database", "elements/s", *rates, goal=0.9,
                note=f"after {taken:,} elements were taken while a transaction was open",
            )  # fmt: skip
            findings.rows.append(row)
    return findings


def measure_rates(
    sides: list[ReserveSide], rounds: int, count: int, batch: int
) -> list[list[float]]:
    """Measure elements/s of each side in turns; the first round does not count."""
    rates: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        order = list(zip(sides, rates, strict=True))
        for side, found in reversed(order) if turn % 2 else order:
            found.append(count / side.seconds(count, batch))
    return [found[1:] for found in rates]


if __name__ == "__main__":
    run(measure, __doc__)
