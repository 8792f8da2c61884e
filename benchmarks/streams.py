"""Benchmark of streams: publishing and reading, against tables by hand and against pgmq.

python -m benchmarks.streams [--rounds 5] [--seconds 0.5]

It starts a PostgreSQL of its own, with the settings PostgreSQL has by default: every commit waits
for the disk. All sides use one server over TCP and take turns; ratios are of each round, then the
median. pgmq is installed from the SQL that its Python package brings.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import psycopg

from benchmarks.servers import own_server

BATCH, BYTES = 500, 1000
BODY = json.dumps({"payload": "x" * (BYTES - 15)})
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'PUB', 'Topic', 'ONE', 'W', 5),
        ('psqlmessages', 'PUB', 'Topic', 'MANY', 'W', 5),
        ('psqlmessages', 'SUB', 'Topic', '*', 'R', 5);
    SELECT messages.subscribe('SUB', 'ONE', 600);
    SELECT messages.subscribe('SUB', 'MANY', 600);
    CREATE TABLE by_hand (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text, sender text,
        published_at timestamptz DEFAULT clock_timestamp(), payload text
    );
    CREATE TABLE place (id bigint);
    INSERT INTO place VALUES (0)
"""
TAKE_BY_HAND = """
    WITH found AS (
        SELECT * FROM by_hand WHERE id > (SELECT id FROM place) ORDER BY id LIMIT 500
    ), moved AS (UPDATE place SET id = (SELECT max(id) FROM found) WHERE EXISTS (SELECT FROM found))
    SELECT * FROM found ORDER BY id
"""
Act = Callable[[], object]


class Sides:
    """The acts that are compared, each on the same connection; each commits."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection
        self.has_pgmq = self.install_pgmq()

    def install_pgmq(self) -> bool:
        """Install pgmq, where its package is here; it is not imported, for all that it needs."""
        found = importlib.util.find_spec("pgmq")
        if found is None or not found.submodule_search_locations:
            return False
        script = Path(found.submodule_search_locations[0]) / "sql" / "pgmq.sql"
        self.connection.execute(script.read_text("utf-8"))
        self.connection.execute("SELECT pgmq.create('one'), pgmq.create('many')")
        return True

    def one_by_one(self) -> dict[str, Act]:
        """Store one message, durably."""
        run = self.connection.execute
        sides: dict[str, Act] = {
            "psqlmessages": lambda: run("SELECT messages.publish('PUB', 'ONE', %s)", [BODY]),
            "INSERT by hand": lambda: run(
                "INSERT INTO by_hand (topic, sender, payload) VALUES ('ONE', 'PUB', %s)"
                " RETURNING id", [BODY],
            ),
        }  # fmt: skip
        if self.has_pgmq:
            sides["pgmq.send"] = lambda: run("SELECT pgmq.send('one', %s::jsonb)", [BODY])
        return sides

    def many(self) -> dict[str, Act]:
        """Store 500 messages in one call, then read them and commit that they are read."""
        sides: dict[str, Act] = {"psqlmessages": self.many_here, "COPY by hand": self.many_by_hand}
        if self.has_pgmq:
            sides["pgmq.send_batch"] = self.many_pgmq
        return sides

    def many_here(self) -> None:
        """Call publish_many and subscribe."""
        self.connection.execute(
            "SELECT messages.publish_many('PUB', 'MANY', %b::text[])", [[BODY] * BATCH]
        )
        take = "SELECT * FROM messages.subscribe('SUB', 'MANY', 600, 500)"
        expect(self.connection.execute(take).fetchall())

    def many_by_hand(self) -> None:
        """COPY, then select what came and move on."""
        with (
            self.connection.cursor() as cursor,
            cursor.copy("COPY by_hand (topic, sender, payload) FROM STDIN") as copy,
        ):
            for _ in range(BATCH):
                copy.write_row(("MANY", "PUB", BODY))
        expect(self.connection.execute(TAKE_BY_HAND).fetchall())

    def many_pgmq(self) -> None:
        """Call send_batch, then read and delete in one transaction."""
        self.connection.execute("SELECT pgmq.send_batch('many', %b::jsonb[])", [[BODY] * BATCH])
        with self.connection.transaction():
            rows = self.connection.execute("SELECT * FROM pgmq.read('many', 30, 500)").fetchall()
            expect(rows)
            self.connection.execute(
                "SELECT pgmq.delete('many', %b::bigint[])", [[row[0] for row in rows]]
            ).fetchall()


def expect(rows: list[object]) -> None:
    """Take care that all was read."""
    if len(rows) != BATCH:
        raise AssertionError(f"{len(rows)} rows instead of {BATCH}")


def compare(sides: dict[str, Act], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Measure each side in turns; acts a second of each round."""
    for act in sides.values():
        for _ in range(10):
            act()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, act in sides.items():
            begun, acts = perf_counter(), 0
            while perf_counter() - begun < seconds:
                act()
                acts += 1
            rates[name].append(acts / (perf_counter() - begun))
    return rates


def report(title: str, rates: dict[str, list[float]], messages: int) -> None:
    """Print the medians, and our ratio to each."""
    print(f"\n{title}")
    ours = rates["psqlmessages"]
    for name, theirs in rates.items():
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"  {name:16}{median(theirs) * messages:12,.0f} messages/s   ours / this {ratio:6.2f}"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    with own_server() as server, psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(SETUP)
        sides = Sides(connection)
        if not sides.has_pgmq:
            print("pgmq is left out: pip install -r benchmarks/requirements.txt")
        report(
            f"one by one, {BYTES} B, durable",
            compare(sides.one_by_one(), options.rounds, options.seconds), 1,
        )  # fmt: skip
        report(
            f"{BATCH} of {BYTES} B stored in one call, then read and committed",
            compare(sides.many(), options.rounds, options.seconds), BATCH,
        )  # fmt: skip


if __name__ == "__main__":
    main()
