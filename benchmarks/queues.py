"""Benchmark of queues: push, reserve and commit, and how soon a waiting reader has an element.

python -m benchmarks.queues [--rounds 5] [--elements 300]

It starts a PostgreSQL of its own, with the settings PostgreSQL has by default: every commit waits
for the disk. All sides use one server over TCP and take turns; ratios are of each round, then the
median. Peers are those of requirements.txt; one that is not installed is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import ExitStack, closing
from statistics import median

import psycopg

from benchmarks import waiting
from benchmarks.queue_peers import BODY, PEERS, Side, expect
from benchmarks.servers import own_server
from psqlmessages import Node

SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT current_user, a.ident, 'Queue', 'jobs', 'RW', 60
    FROM unnest('{NODE,CONSUMER,SQL,PUSHER,READER}'::text[]) AS a (ident)
"""
TABLES = ("psqlmessages_element", "psqlmessages_queuecount")
OURS = "psqlmessages"


class Ours(Side):
    """Node.push, reserve and commit: a reservation and a commit for each call."""

    name = OURS
    tables = TABLES
    ident = "NODE"

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.node = Node(self.ident, dsn)
        self.node.open()

    def fill(self, count: int, at_once: int) -> None:
        """Call push or push_many."""
        if at_once == 1:
            for _ in range(count):
                self.node.push("jobs", BODY)
            return
        for _ in range(count // at_once):
            self.node.push_many("jobs", [BODY] * at_once)

    def empty(self, count: int, at_once: int) -> None:
        """Call reserve, then commit."""
        for _ in range(count // at_once):
            elements = self.node.reserve("jobs", at_once)
            expect(len(elements), at_once)
            self.node.commit(*elements)

    def close(self) -> None:
        """End the node."""
        self.node.close()
        super().close()


class OursConsuming(Ours):
    """Node.push, and Node.consume as a worker uses it."""

    name = "psqlmessages, consume"
    ident = "CONSUMER"

    def empty(self, count: int, at_once: int) -> None:
        """Take them from consume, ten at once at least, as workers of others do."""
        seen = 0
        for _ in self.node.consume("jobs", batch=max(at_once, 10)):
            seen += 1
            if seen == count:
                break
        expect(seen, count)


class OursInSql(Side):
    """The same functions of SQL, called by psycopg."""

    name = "psqlmessages, SQL"
    tables = TABLES

    def fill(self, count: int, at_once: int) -> None:
        """Call push or push_many."""
        run = self.connection.execute
        if at_once == 1:
            for _ in range(count):
                run("SELECT messages.push('SQL', 'jobs', %s)", [BODY]).fetchone()
            return
        sql = "SELECT messages.push_many('SQL', 'jobs', %b::text[])"
        for _ in range(count // at_once):
            run(sql, [[BODY] * at_once]).fetchone()

    def empty(self, count: int, at_once: int) -> None:
        """Call reserve, then commit."""
        for _ in range(count // at_once):
            rows = self.connection.execute(
                "SELECT * FROM messages.reserve('SQL', 'jobs', %s)", [at_once]
            ).fetchall()
            expect(len(rows), at_once)
            leases = [row[-1] for row in rows]
            self.connection.execute(
                "SELECT messages.commit('SQL', VARIADIC %b::text[])", [leases]
            ).fetchone()


class OursPopping(OursInSql):
    """Pop: taken and removed in one transaction."""

    name = "psqlmessages, pop in SQL"

    def empty(self, count: int, at_once: int) -> None:
        """Call pop."""
        for _ in range(count // at_once):
            rows = self.connection.execute(
                "SELECT * FROM messages.pop('SQL', 'jobs', %s)", [at_once]
            ).fetchall()
            expect(len(rows), at_once)


def compare(sides: Iterable[Side], rounds: int, count: int, at_once: int) -> dict[str, list[float]]:
    """Measure each side in turns: elements a second of each round; a first one does not count."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(rounds + 1):
        for side in sides:
            rate = count / side.seconds(count, at_once)
            if turn:
                rates[side.name].append(rate)
    return rates


def is_durable(dsn: str, connection: psycopg.Connection) -> bool:
    """Tell whether what a node pushes and commits is on the disk when it answers."""
    asked = "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn"
    written = "SELECT pg_current_wal_insert_lsn()"
    with Node("NODE", dsn) as node:
        for _ in range(20):
            node.push("jobs", BODY)
            (element,) = node.reserve("jobs")
            node.commit(element)
            row = connection.execute(written).fetchone()
            if not connection.execute(asked, row).fetchone()[0]:
                return False
    return True


def report(title: str, rates: dict[str, list[float]]) -> None:
    """Print the medians, and our ratio to each."""
    print(f"\n{title}")
    for name, theirs in rates.items():
        ratio = median(a / b for a, b in zip(rates[OURS], theirs, strict=True))
        print(f"  {name:26}{median(theirs):10,.0f} elements/s   ours / this {ratio:6.2f}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--elements", type=int, default=300, help="one by one; in batches, tenfold")
    options = parser.parse_args()
    with own_server() as server, ExitStack() as stack:
        dsn = server.url()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(SETUP)
            if not is_durable(dsn, connection):
                print("Node.push does not wait for the disk: its figures are not comparable")
        sides = []
        for kind in (Ours, OursConsuming, OursInSql, OursPopping, *PEERS):
            if kind.is_here():
                sides.append(stack.enter_context(closing(kind(dsn))))
            else:
                print(f"{kind.name} is left out: pip install -r benchmarks/requirements.txt")
        for at_once, count in ((1, options.elements), (100, options.elements * 10 // 100 * 100)):
            report(
                f"push, reserve and commit of 1 KB, {at_once} in one call",
                compare(sides, options.rounds, count, at_once),
            )
        waiting.report(dsn, options.rounds)


if __name__ == "__main__":
    main()
