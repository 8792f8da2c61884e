"""Benchmark of the pipeline: stored messages into Spark and back, and as a stream.

python -m benchmarks.pipeline [--rounds 5]

It starts a PostgreSQL of its own, with the settings PostgreSQL has by default, and one Spark
session on this machine. All sides use one server over TCP and take turns; a first round does not
count. Bodies have 200 bytes. The driver of JDBC comes from Debian (libpostgresql-jdbc-java);
without it, it is left out. A full run takes about seven minutes; a quick one leaves Spark out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import psycopg
from pyspark import __version__ as spark_version
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
)
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server
from psqlmessages.pipeline import register, session

OURS, COPY, JDBC, BINARY = "psqlmessages", "COPY BINARY", "Spark JDBC", "Spark JDBC, binary"
STORED, WRITTEN, AT_ONCE, READERS = 5_000_000, 1_000_000, 20_000, 2
BACKLOG_SIZES, DEFAULT_SIZE, BACKLOG_BATCHES = (10_000, 30_000, 100_000, 300_000), 100_000, 12
WANTED_RATE = 200_000.0
RATE_SIZES, RATE_BATCHES = (10_000, 100_000), 10
ROWS_A_SECOND, LIVE_SECONDS = 10_000, 20
AS_OWNER = "the peer reads a table without rules, as its owner"
SAME_IN_ALL = "ours sends not what all rows have alike: the topic, and that they have no headers"
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
        topic_id bigint DEFAULT 1, id bigint GENERATED ALWAYS AS IDENTITY, slot smallint DEFAULT 0,
        sender text DEFAULT session_user, published_at timestamptz DEFAULT clock_timestamp(),
        enc text, body text NOT NULL, PRIMARY KEY (topic_id, id, slot)
    )
"""
CONFIGURATION = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "2g",
    "spark.sql.streaming.numRecentProgressUpdates": "2000",
}


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


@dataclass(frozen=True)
class Bench:
    """All that is needed to measure."""

    spark: SparkSession
    connection: psycopg.Connection
    url: str
    postmaster: int
    rounds: int

    def compare(self, sides: Mapping[str, Act]) -> dict[str, list[Spent]]:
        """Run each side in turns; what it took in each round but the first."""
        spent: dict[str, list[Spent]] = {name: [] for name in sides}
        for turn in range(self.rounds + 1):
            for name, act in sides.items():
                taken = Spent.by(act, self.postmaster)
                if turn:
                    spent[name].append(taken)
        return spent


@contextmanager
def bench(rounds: int) -> Iterator[Bench]:
    """Start a server and Spark, and store the messages."""
    jars = {"spark.jars": JDBC_JAR} if Path(JDBC_JAR).exists() else {}
    with (
        temporary_server() as server,
        closing(psycopg.connect(server.url(), autocommit=True)) as connection,
    ):
        os.environ["PSQLMESSAGES_DSN"] = server.url()
        fill(connection, STORED)
        spark = register(session("benchmark", "local[2]", **CONFIGURATION, **jars))
        try:
            yield Bench(spark, connection, server.url(), server.postmaster.pid, rounds)  # type: ignore[union-attr]
        finally:
            spark.stop()


def fill(connection: psycopg.Connection, rows: int) -> None:
    """Publish so many messages, and put the same into a table by hand."""
    connection.execute(SETUP)
    for done in range(0, rows, AT_ONCE):
        connection.execute(FILL, [min(AT_ONCE, rows - done)])
    connection.execute(BY_HAND)
    connection.execute(WRITTEN_BY_HAND)
    # Not the tables of messages, which nothing vacuums or analyzes where they are used either.
    connection.execute("VACUUM ANALYZE by_hand")


def row(
    key: str, what: str, peer: str, spent: Mapping[str, list[Spent]], rows: int,
    reach: float | None, note: str,
) -> Row:  # fmt: skip
    """Compare rows a second with one peer; the note also tells the processors' time for a row."""

    def busy(name: str) -> float:
        return median(taken.processors for taken in spent[name]) / rows * 1e6

    ours, theirs = ([rows / taken.clock for taken in spent[name]] for name in (OURS, peer))
    note += f"; CPU {busy(OURS):.2f} to {busy(peer):.2f} µs a row"
    return Row.of(key, what, peer, "rows/s", ours, theirs, reach=reach, note=note)


def read(here: Bench, jdbcs: Mapping[str, Jdbc]) -> list[Row]:
    """Compare reading, of all columns and of two."""
    span = here.connection.execute("SELECT min(id), max(id) FROM by_hand").fetchone()
    rows = []
    with closing(Copying(here.url, span, READERS)) as copying:  # type: ignore[arg-type]
        for label, columns, wanted in (
            ("all", EVERYTHING, 0.6),
            ("two", ("topic", "published_at"), 0.9),
        ):
            sides = reading_sides(here.spark, columns, READERS, copying, jdbcs)
            spent = here.compare(sides)
            what = f"reading 5 million messages, {label} columns"
            reaches = {JDBC: 1.3, BINARY: None, COPY: wanted}
            notes = {
                JDBC: f"{AS_OWNER}; {SAME_IN_ALL}",
                BINARY: f"{AS_OWNER}, with the driver's prepareThreshold=-1",
                COPY: f"{AS_OWNER}, by {READERS} sessions that drop what comes",
            }
            rows += [
                row(f"pipeline: read {label} to {peer}", what, peer, spent, STORED,
                    reaches[peer], notes[peer])
                for peer in spent if peer != OURS
            ]  # fmt: skip
    return rows


def write(here: Bench, jdbc: Jdbc) -> list[Row]:
    """Compare writing."""
    frame = rows_to_write(here.spark, WRITTEN, READERS)
    spent = here.compare(writing_sides(frame, jdbc))
    frame.unpersist()
    note = "ours exactly once and by rules; JDBC at least once, into a table with the same key"
    what = "writing 1 million rows"
    return [row("pipeline: write to Spark JDBC", what, JDBC, spent, WRITTEN, 1.0, note)]


def backlog(here: Bench) -> tuple[Row, Curve]:
    """Measure how fast a backlog goes into the aggregate, by how much is taken at once."""
    # Java compiles what runs often: until then a batch takes three times as long.
    drained(here, DEFAULT_SIZE)
    rates = {size: drained(here, size).rate for size in BACKLOG_SIZES}
    at_default = [rates[DEFAULT_SIZE]]
    at_default += [drained(here, DEFAULT_SIZE).rate for _ in range(here.rounds - 1)]
    drain = Row.of(
        "pipeline: backlog drained", "a backlog into an aggregate", "the figure that is wanted",
        "rows/s", at_default, [WANTED_RATE] * len(at_default), reach=1.0,
        note=f"{DEFAULT_SIZE:,} rows in each batch, as maxRowsPerTrigger is by default; no bodies",
    )  # fmt: skip
    points = [(float(size), rate) for size, rate in rates.items()]
    return drain, Curve(
        "pipeline: backlog by batch", "Backlog drained into an aggregate", "rows in a batch",
        "rows/s", {OURS: points},
    )  # fmt: skip


def drained(here: Bench, size: int) -> streaming.Batches:
    """Drain what so many batches hold."""
    return streaming.drain(here.spark, start(here.connection, size, BACKLOG_BATCHES), size)


def start(connection: psycopg.Connection, size: int, batches: int) -> int:
    """Find the id from which on so many batches are left."""
    found = connection.execute(
        "SELECT id FROM by_hand ORDER BY id DESC OFFSET %s LIMIT 1",
        [size * (batches + streaming.WARM_UP) - 1],
    ).fetchone()
    return int(found[0]) if found else 0


def against_rate(here: Bench) -> list[Row]:
    """Compare the time of a batch with that of rows made from nothing, and row to result."""
    rows = []
    streaming.run_rate(here.spark, RATE_SIZES[0], RATE_BATCHES)
    for size in RATE_SIZES:
        ours, theirs = [], []
        first = start(here.connection, size, RATE_BATCHES)
        for _ in range(here.rounds):
            ours.append(median(streaming.drain(here.spark, first, size).seconds))
            theirs.append(median(streaming.run_rate(here.spark, size, RATE_BATCHES).seconds))
        batch = Row.of(
            f"pipeline: batch of {size:,}", f"a batch of {size:,} rows into an aggregate",
            "the rate source", "s", ours, theirs, reach=1.5, is_at_most=True,
            note="the rate source makes its rows where they are used, and keeps nothing",
        )  # fmt: skip
        rows.append(batch)
        if size == ROWS_A_SECOND:
            rows.append(to_result(here, median(theirs)))
    return rows


def to_result(here: Bench, batch_seconds: float) -> Row:
    """Measure from row to visible result, beside a batch of as many rows of the rate source."""
    delays, rate = streaming.latency(here.spark, here.url, ROWS_A_SECOND, LIVE_SECONDS)
    return Row.of(
        "pipeline: row to result", f"row to visible result at {ROWS_A_SECOND:,} rows/s, p50",
        "a batch of the rate source", "s", [median(delays)], [batch_seconds], is_at_most=True,
        note=f"{rate:,.0f} rows/s came; 1.5 at best: a row waits for half of the batch before it",
    )  # fmt: skip


def measure(options: Options) -> Findings:
    """Measure all of it."""
    findings = Findings(versions={"Spark": spark_version})
    if options.is_quick:
        findings.left_out.append("Spark, in the quick run: its start and warming up take a minute")
        return findings
    with bench(options.rounds) as here:
        if Path(JDBC_JAR).exists():
            jdbc = Jdbc(here.url)
            findings.rows += read(here, {JDBC: jdbc, BINARY: Jdbc(here.url, is_binary=True)})
            findings.rows += write(here, jdbc)
        else:
            findings.left_out.append("Spark JDBC: apt-get install libpostgresql-jdbc-java")
            findings.rows += read(here, {})
        drain, curve = backlog(here)
        findings.rows += [drain, *against_rate(here)]
        findings.curves.append(curve)
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
