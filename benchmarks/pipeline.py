"""Benchmark of the pipeline: stored messages into Spark and back, and as a stream.

python -m benchmarks.pipeline [read write backlog rate latency] [--rounds 5] [--rows 5000000]

It starts a PostgreSQL of its own, with the settings PostgreSQL has by default, and one Spark
session on this machine. All sides use one server over TCP and take turns; ratios are of each round,
then the median; a first round does not count. Bodies have 200 bytes. What is unequal: peers read
and write a plain table without rules, as its owner, where ours goes through the rules; COPY only
moves bytes and makes no rows of them; JDBC writes at least once, ours exactly once.
The driver of JDBC comes from Debian (libpostgresql-jdbc-java); without it, it is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import psycopg
from pyspark.sql import SparkSession

from benchmarks import pipeline_streaming as streaming
from benchmarks import processor
from benchmarks.pipeline_batch import (
    EVERYTHING,
    JDBC_JAR,
    Act,
    Copying,
    Jdbc,
    reading_sides,
    rows_to_write,
    writing_sides,
)  # fmt: skip
from benchmarks.servers import own_server
from project.postgres import Server
from psqlmessages.pipeline import register, session

OURS = "psqlmessages"
PARTS = ("read", "write", "backlog", "rate", "latency")
AT_ONCE = 20_000
DRAINED, LEAST_BATCHES = 14, 5
RATE_ROWS, RATE_BATCHES = 100_000, 10
ROWS_A_SECOND, LIVE_SECONDS = 10_000, 20
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'pipeline', 'Topic', '*', 'RW', 5),
        ('psqlmessages', 'PUB', 'Topic', 'ROWS', 'W', 5),
        ('psqlmessages', 'pipeline', 'Topic', 'ROWS', 'R', 5),
        ('psqlmessages', 'PUB', 'Topic', 'LIVE', 'W', 5),
        ('psqlmessages', 'pipeline', 'Topic', 'LIVE', 'R', 5),
        ('psqlmessages', 'pipeline', 'Topic', 'OUT', 'W', 5);
    UPDATE psqlmessages_topic SET retention = 86400
"""
FILL = """
    SELECT messages.publish_many('PUB', 'ROWS', array_agg(rpad('message ' || n, 200, '.')))
    FROM generate_series(1, %s) AS n
"""
BY_HAND = """
    CREATE TABLE by_hand AS
    SELECT m.id, t.name AS topic, m.sender, m.payload AS body, m.enc, null::text AS headers,
           m.published_at
    FROM psqlmessages_streammessage AS m JOIN psqlmessages_topic AS t ON t.id = m.topic_id
    ORDER BY m.id;
    ALTER TABLE by_hand ADD PRIMARY KEY (id)
"""
WRITTEN_BY_HAND = """
    CREATE TABLE written_by_hand (
        id bigint GENERATED ALWAYS AS IDENTITY, topic text, sender text DEFAULT session_user,
        body text, published_at timestamptz DEFAULT clock_timestamp(), PRIMARY KEY (topic, id)
    )
"""
CONFIGURATION = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "2g",
    "spark.sql.streaming.numRecentProgressUpdates": "2000",
}


def fill(connection: psycopg.Connection, rows: int) -> None:
    """Publish so many messages, and put the same into a table by hand."""
    connection.execute(SETUP)
    begun = perf_counter()
    for done in range(0, rows, AT_ONCE):
        connection.execute(FILL, [min(AT_ONCE, rows - done)])
    print(f"{rows:,} messages published in {perf_counter() - begun:.0f} s", flush=True)
    connection.execute(BY_HAND)
    connection.execute(WRITTEN_BY_HAND)
    connection.execute("VACUUM ANALYZE")


@dataclass(frozen=True)
class Spent:
    """What one act took: seconds of the clock, and of all processors together."""

    clock: float
    processors: float

    @classmethod
    def by(cls, act: Act, postmaster: int) -> Spent:
        """Measure it: our processes, Java's, and the server's."""
        processes = os.getpid(), postmaster
        begun, before = perf_counter(), processor.seconds(*processes)
        act()
        return cls(perf_counter() - begun, processor.seconds(*processes) - before)


def compare(sides: Mapping[str, Act], rounds: int, postmaster: int) -> dict[str, list[Spent]]:
    """Run each side in turns; what it took in each round."""
    spent: dict[str, list[Spent]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, act in sides.items():
            taken = Spent.by(act, postmaster)
            if turn:
                spent[name].append(taken)
    return spent


def report(title: str, spent: dict[str, list[Spent]], rows: int) -> None:
    """Print rows a second, our ratio to each, and the processors' time for a row."""
    print(f"\n{title}")
    for name, theirs in spent.items():
        clock = median(taken.clock for taken in theirs)
        busy = median(taken.processors for taken in theirs)
        ratio = median(b.clock / a.clock for a, b in zip(spent[OURS], theirs, strict=True))
        print(
            f"  {name:24}{rows / clock:12,.0f} rows/s   ours / this {ratio:6.2f}"
            f"   processors {busy / rows * 1e6:6.2f} µs a row"
        )
    print(end="", flush=True)


def machine() -> str:
    """Say on what this ran."""
    load = ", ".join(f"{figure:.1f}" for figure in os.getloadavg())
    return f"{os.cpu_count()} cores, {platform.machine()}, load before: {load}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="part", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=5_000_000, help="to read")
    parser.add_argument("--written", type=int, default=1_000_000, help="rows to write")
    parser.add_argument("--readers", type=int, default=2, help="partitions, sessions of COPY")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)}")
    print(machine())
    jars = {"spark.jars": JDBC_JAR} if Path(JDBC_JAR).exists() else {}
    with ExitStack() as stack:
        server = stack.enter_context(own_server())
        os.environ["PSQLMESSAGES_DSN"] = server.url()
        connection = stack.enter_context(psycopg.connect(server.url(), autocommit=True))
        fill(connection, options.rows)
        spark = register(session("benchmark", "local[2]", **CONFIGURATION, **jars))
        stack.callback(spark.stop)
        run(spark, connection, options, server)


def run(
    spark: SparkSession, connection: psycopg.Connection, options: argparse.Namespace, server: Server
) -> None:
    """Run the parts that are asked for."""
    url, postmaster = server.url(), server.postmaster.pid  # type: ignore[union-attr]
    jdbc = Jdbc(url) if Path(JDBC_JAR).exists() else None
    if jdbc is None:
        print("JDBC is left out: apt-get install libpostgresql-jdbc-java")
    if "read" in options.parts:
        read(spark, connection, options, server, jdbc)
    if "write" in options.parts:
        frame = rows_to_write(spark, options.written, options.readers)
        title = f"writing {options.written:,} rows"
        report(
            title, compare(writing_sides(frame, jdbc), options.rounds, postmaster), options.written
        )
        frame.unpersist()
    if "backlog" in options.parts:
        drain(spark, connection, options.rows)
    if "rate" in options.parts:
        against_rate(spark, connection, options.rounds)
    if "latency" in options.parts:
        delays, rate = streaming.latency(spark, url, ROWS_A_SECOND, LIVE_SECONDS)
        p99 = quantiles(delays, n=100)[98]
        print(
            f"\nrow to visible result at {rate:,.0f} rows/s (of {ROWS_A_SECOND:,} asked for)\n"
            f"  p50 {median(delays):.3f} s, p99 {p99:.3f} s"
        )


def read(
    spark: SparkSession, connection: psycopg.Connection, options: argparse.Namespace,
    server: Server, jdbc: Jdbc | None,
) -> None:  # fmt: skip
    """Compare reading, of all columns and of two."""
    postmaster = server.postmaster.pid  # type: ignore[union-attr]
    jdbcs = {} if jdbc is None else {
        "Spark JDBC": jdbc,
        "Spark JDBC, all binary": Jdbc(server.url(), is_binary=True),
    }  # fmt: skip
    span = connection.execute("SELECT min(id), max(id) FROM by_hand").fetchone()
    with closing(Copying(server.url(), span, options.readers)) as copying:
        for columns in (EVERYTHING, ("topic", "published_at")):
            sides = reading_sides(spark, columns, options.readers, copying, jdbcs)
            title = f"reading {options.rows:,} messages: {', '.join(columns)}"
            report(title, compare(sides, options.rounds, postmaster), options.rows)


def drain(spark: SparkSession, connection: psycopg.Connection, rows: int) -> None:
    """Show how fast a backlog goes into the aggregate, by how much is taken at once."""
    print("\nbacklog into an aggregate by topic and minute")
    for at_once in (10_000, 30_000, 100_000, 300_000):
        if rows < at_once * (streaming.WARM_UP + LEAST_BATCHES):
            print(f"  {at_once:8,} rows at once: left out, as there are too few rows")
            continue
        batches = streaming.drain(spark, start(connection, at_once, DRAINED), at_once)
        print(
            f"  {at_once:8,} rows at once {batches.rate:12,.0f} rows/s,"
            f" {median(batches.seconds):6.3f} s a batch  {batches.parts}",
            flush=True,
        )


def start(connection: psycopg.Connection, at_once: int, batches: int) -> int:
    """Find the id from which on so many batches are left."""
    row = connection.execute(
        "SELECT id FROM by_hand ORDER BY id DESC OFFSET %s LIMIT 1",
        [at_once * (batches + streaming.WARM_UP) - 1],
    ).fetchone()
    return int(row[0]) if row else 0


def against_rate(spark: SparkSession, connection: psycopg.Connection, rounds: int) -> None:
    """Compare the time of a batch with that of rows made from nothing."""
    ours, theirs = [], []
    first = start(connection, RATE_ROWS, RATE_BATCHES)
    for _ in range(rounds):
        ours.append(median(streaming.drain(spark, first, RATE_ROWS).seconds))
        theirs.append(median(streaming.run_rate(spark, RATE_ROWS, RATE_BATCHES).seconds))
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    print(
        f"\n{RATE_ROWS:,} rows in a batch, the same aggregate\n"
        f"  psqlmessages {median(ours):.3f} s, the rate source {median(theirs):.3f} s,"
        f"  ours / this {ratio:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
