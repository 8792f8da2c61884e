"""Benchmark of the pipeline: reading messages into Spark, writing them, and streaming.

python -m benchmarks.pipeline [--rounds 5]

It starts a temporary PostgreSQL with default settings, and one Spark session on this machine. All
sides use one server over TCP and take turns; the first round does not count. Bodies have 200 bytes.
The JDBC driver comes from Debian (libpostgresql-jdbc-java); without it, JDBC is left out. A full
run takes about four minutes; a quick run measures nothing.
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

from benchmarks import cpu_time
from benchmarks import pipeline_streaming as streaming
from benchmarks.pipeline_batch import (
    ALL_COLUMNS,
    JDBC_JAR,
    Act,
    CopyReader,
    Jdbc,
    reading_sides,
    rows_to_write,
    writing_sides,
)
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server
from psqlmessages.pipeline import register, session

OURS, COPY, JDBC, BINARY = "psqlmessages", "COPY BINARY", "Spark JDBC", "Spark JDBC, binary"
STORED_ROWS, WRITTEN_ROWS, ROWS_PER_CALL, READERS = 2_000_000, 500_000, 20_000, 2
BACKLOG_SIZES, DEFAULT_SIZE, BACKLOG_BATCHES = (10_000, 30_000, 100_000), 100_000, 12
GOAL_RATE = 200_000.0
RATE_SIZES, RATE_BATCHES = (10_000, 100_000), 10
ROWS_PER_SECOND, LIVE_SECONDS = 10_000, 15
AS_OWNER = "the peer reads a table without rules, as its owner"
CONSTANT_COLUMNS = "ours does not send columns that are equal in all rows: topic and headers"
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
CREATE_SOURCE = """
    CREATE TABLE plain_source AS
    SELECT m.id, t.name AS topic, m.sender, m.payload AS body, m.enc, null::text AS headers,
           m.published_at
    FROM psqlmessages_streammessage AS m JOIN psqlmessages_topic AS t ON t.id = m.topic_id
    ORDER BY m.id;
    ALTER TABLE plain_source ADD PRIMARY KEY (id)
"""
CREATE_TARGET = """
    CREATE TABLE plain_target (
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
class Duration:
    """The elapsed seconds of an act, and its CPU seconds."""

    elapsed: float
    cpu: float

    @classmethod
    def of(cls, act: Act, postmaster: int) -> Duration:
        """Run an act; measure the CPU time of Python, Java and PostgreSQL."""
        processes = os.getpid(), postmaster
        begun, before = perf_counter(), cpu_time.seconds(*processes)
        act()
        return cls(perf_counter() - begun, cpu_time.seconds(*processes) - before)


@dataclass(frozen=True)
class Bench:
    """The server and the Spark session of the measurements."""

    spark: SparkSession
    connection: psycopg.Connection
    url: str
    postmaster: int
    rounds: int

    def measure_sides(self, sides: Mapping[str, Act]) -> dict[str, list[Duration]]:
        """Run the sides in turns; return the durations of each round but the first."""
        durations: dict[str, list[Duration]] = {name: [] for name in sides}
        for turn in range(self.rounds + 1):
            for name, act in sides.items():
                duration = Duration.of(act, self.postmaster)
                if turn:
                    durations[name].append(duration)
        return durations


@contextmanager
def open_bench(rounds: int) -> Iterator[Bench]:
    """Start a server and Spark, and store the messages."""
    jars = {"spark.jars": JDBC_JAR} if Path(JDBC_JAR).exists() else {}
    with (
        temporary_server() as server,
        closing(psycopg.connect(server.url(), autocommit=True)) as connection,
    ):
        os.environ["PSQLMESSAGES_DSN"] = server.url()
        fill(connection, STORED_ROWS)
        spark = register(session("benchmark", "local[2]", **CONFIGURATION, **jars))
        try:
            yield Bench(spark, connection, server.url(), server.postmaster.pid, rounds)  # type: ignore[union-attr]
        finally:
            spark.stop()


def fill(connection: psycopg.Connection, rows: int) -> None:
    """Publish messages, and copy them to a table."""
    connection.execute(SETUP)
    for done in range(0, rows, ROWS_PER_CALL):
        connection.execute(FILL, [min(ROWS_PER_CALL, rows - done)])
    connection.execute(CREATE_SOURCE)
    connection.execute(CREATE_TARGET)
    # The tables of messages are not analyzed, because nothing analyzes them in production either.
    connection.execute("VACUUM ANALYZE plain_source")


def to_row(
    key: str, subject: str, peer: str, durations: Mapping[str, list[Duration]], rows: int,
    goal: float | None, note: str,
) -> Row:  # fmt: skip
    """Compare rows/s with a peer; add the CPU time of a row to the note."""

    def row_microseconds(name: str) -> float:
        return median(duration.cpu for duration in durations[name]) / rows * 1e6

    ours, theirs = ([rows / each.elapsed for each in durations[name]] for name in (OURS, peer))
    note += f"; CPU {row_microseconds(OURS):.2f} to {row_microseconds(peer):.2f} µs per row"
    return Row.of(key, subject, peer, "rows/s", ours, theirs, goal=goal, note=note)


def compare_reading(bench: Bench, jdbcs: Mapping[str, Jdbc]) -> list[Row]:
    """Compare reading all columns, and reading two columns."""
    ids = bench.connection.execute("SELECT min(id), max(id) FROM plain_source").fetchone()
    rows = []
    with closing(CopyReader(bench.url, ids, READERS)) as copy:  # type: ignore[arg-type]
        for label, columns in (("all", ALL_COLUMNS), ("two", ("topic", "published_at"))):
            sides = reading_sides(bench.spark, columns, READERS, copy, jdbcs)
            durations = bench.measure_sides(sides)
            subject = f"reading {STORED_ROWS:,} messages, {label} columns"
            notes = {
                JDBC: f"{AS_OWNER}; {CONSTANT_COLUMNS}",
                BINARY: f"{AS_OWNER}, with the driver's prepareThreshold=-1",
                COPY: f"{AS_OWNER}, by {READERS} sessions that discard the data",
            }
            rows += [
                to_row(f"pipeline: read {label} to {peer}", subject, peer, durations, STORED_ROWS,
                       1.3 if peer == JDBC else None, notes[peer])
                for peer in durations if peer != OURS
            ]  # fmt: skip
    return rows


def compare_writing(bench: Bench, jdbc: Jdbc) -> Row:
    """Compare writing with JDBC."""
    frame = rows_to_write(bench.spark, WRITTEN_ROWS, READERS)
    durations = bench.measure_sides(writing_sides(frame, jdbc))
    frame.unpersist()
    return to_row(
        "pipeline: write to Spark JDBC", f"writing {WRITTEN_ROWS:,} rows", JDBC, durations,
        WRITTEN_ROWS, 1.0,
        "ours exactly once and with rules; JDBC at least once, into a table with the same key",
    )  # fmt: skip


def measure_backlog(bench: Bench) -> tuple[Row, Curve]:
    """Measure how fast a backlog is aggregated, by the size of the batches."""
    # Until Java has compiled its code, a batch takes three times as long.
    drain(bench, DEFAULT_SIZE)
    rates = {size: drain(bench, size).rate for size in BACKLOG_SIZES}
    default_rates = [rates[DEFAULT_SIZE]]
    default_rates += [drain(bench, DEFAULT_SIZE).rate for _ in range(bench.rounds - 1)]
    row = Row.of(
        "pipeline: backlog drained", "a backlog into an aggregate", "the goal",
        "rows/s", default_rates, [GOAL_RATE] * len(default_rates), goal=1.0,
        note=f"{DEFAULT_SIZE:,} rows per batch, the default of maxRowsPerTrigger; without bodies",
    )  # fmt: skip
    points = [(float(size), rate) for size, rate in rates.items()]
    return row, Curve(
        "pipeline: backlog by batch", "Backlog drained into an aggregate", "rows in a batch",
        "rows/s", {OURS: points},
    )  # fmt: skip


def drain(bench: Bench, size: int) -> streaming.Batches:
    """Aggregate the last messages in batches of a size."""
    return streaming.drain(bench.spark, find_start(bench.connection, size, BACKLOG_BATCHES), size)


def find_start(connection: psycopg.Connection, size: int, batches: int) -> int:
    """Return the first id of the last messages that fill this number of batches."""
    row = connection.execute(
        "SELECT id FROM plain_source ORDER BY id DESC OFFSET %s LIMIT 1",
        [size * (batches + streaming.WARM_UP) - 1],
    ).fetchone()
    return int(row[0]) if row else 0


def compare_with_rate_source(bench: Bench) -> list[Row]:
    """Compare the times of batches with those of Spark's rate source; measure row to result."""
    rows = []
    streaming.run_rate(bench.spark, RATE_SIZES[0], RATE_BATCHES)
    for size in RATE_SIZES:
        ours, theirs = [], []
        first = find_start(bench.connection, size, RATE_BATCHES)
        for _ in range(bench.rounds):
            ours.append(median(streaming.drain(bench.spark, first, size).seconds))
            theirs.append(median(streaming.run_rate(bench.spark, size, RATE_BATCHES).seconds))
        row = Row.of(
            f"pipeline: batch of {size:,}", f"a batch of {size:,} rows into an aggregate",
            "the rate source", "s", ours, theirs, goal=1.5, is_lower_better=True,
            note="the rate source generates its rows in the task, and stores nothing",
        )  # fmt: skip
        rows.append(row)
        if size == ROWS_PER_SECOND:
            rows.append(measure_row_to_result(bench, median(theirs)))
    return rows


def measure_row_to_result(bench: Bench, batch_seconds: float) -> Row:
    """Measure the time from row to visible result; compare it with a batch of the rate source."""
    delays, rate = streaming.latency(bench.spark, bench.url, ROWS_PER_SECOND, LIVE_SECONDS)
    return Row.of(
        "pipeline: row to result", f"row to visible result at {ROWS_PER_SECOND:,} rows/s, p50",
        "a batch of the rate source", "s", [median(delays)], [batch_seconds], is_lower_better=True,
        note=f"at {rate:,.0f} rows/s; 1.5 is the minimum: a row waits for half of a batch first",
    )  # fmt: skip


def measure(options: Options) -> Findings:
    """Measure reading, writing and streaming."""
    findings = Findings(versions={"Spark": spark_version})
    if options.is_quick:
        findings.left_out.append("Spark, in the quick run: its start and warm-up take a minute")
        return findings
    with open_bench(options.rounds) as bench:
        if Path(JDBC_JAR).exists():
            jdbc = Jdbc(bench.url)
            jdbcs = {JDBC: jdbc, BINARY: Jdbc(bench.url, is_binary=True)}
            findings.rows += [*compare_reading(bench, jdbcs), compare_writing(bench, jdbc)]
        else:
            findings.left_out.append("Spark JDBC: apt-get install libpostgresql-jdbc-java")
            findings.rows += compare_reading(bench, {})
        row, curve = measure_backlog(bench)
        findings.rows += [row, *compare_with_rate_source(bench)]
        findings.curves.append(curve)
    return findings


if __name__ == "__main__":
    run(measure, __doc__)
