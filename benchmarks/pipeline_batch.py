"""Sides of benchmarks.pipeline for batches: reading and writing with psqlmessages, JDBC, COPY."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from urllib.parse import unquote, urlsplit

import psycopg
from pyspark.sql import DataFrame, SparkSession

JDBC_JAR = "/usr/share/java/postgresql.jar"
# Of the values from 1,000 to 100,000, these are the best ones for JDBC.
FETCH_ROWS, INSERT_ROWS = 10_000, 10_000
ALL_COLUMNS = ("id", "topic", "sender", "body", "enc", "headers", "published_at")
TYPES = {"id": "bigint", "published_at": "timestamp"}
Act = Callable[[], object]


class Jdbc:
    """Spark's JDBC source and sink, on tables without rules."""

    def __init__(self, url: str, *, is_binary: bool = False) -> None:
        address = urlsplit(url)
        place = f"{address.hostname}:{address.port}{address.path}"
        self.url = f"jdbc:postgresql://{place}?reWriteBatchedInserts=true"
        if is_binary:
            # By default, the driver gets a large result as text.
            self.url += "&prepareThreshold=-1"
        self.properties = {
            "user": unquote(address.username or ""),
            "password": unquote(address.password or ""),
            "driver": "org.postgresql.Driver",
        }

    def read(self, spark: SparkSession, ids: tuple[int, int], readers: int) -> DataFrame:
        """Read plain_source, with a range of ids for each reader."""
        low, high = ids
        return spark.read.jdbc(
            self.url, "plain_source", column="id", lowerBound=low, upperBound=high + 1,
            numPartitions=readers, properties=self.properties | {"fetchsize": str(FETCH_ROWS)},
        )  # fmt: skip

    def write(self, frame: DataFrame) -> None:
        """Append to plain_target."""
        properties = self.properties | {"batchsize": str(INSERT_ROWS)}
        frame.write.jdbc(self.url, "plain_target", mode="append", properties=properties)


class CopyReader:
    """Processes that read with COPY BINARY and discard the data. They start before measuring."""

    def __init__(self, url: str, ids: tuple[int, int], readers: int) -> None:
        self.url = url
        low, high = ids
        step = -(-(high + 1 - low) // readers)
        self.ranges = [(at, min(at + step, high + 1)) for at in range(low, high + 1, step)]
        self.processes = multiprocessing.get_context("spawn").Pool(len(self.ranges))

    def read(self, columns: tuple[str, ...]) -> None:
        """Copy these columns of plain_source."""
        arguments = [(self.url, columns, low, high) for low, high in self.ranges]
        self.processes.starmap(copy_range, arguments, chunksize=1)

    def close(self) -> None:
        """Stop the processes."""
        self.processes.close()
        self.processes.join()


def copy_range(url: str, columns: tuple[str, ...], low: int, high: int) -> int:
    """Read a range of plain_source; return the number of bytes."""
    names = ", ".join(columns)
    select = f"SELECT {names} FROM plain_source WHERE id >= {low} AND id < {high}"  # noqa: S608
    copied = 0
    with (
        closing(psycopg.connect(url)) as connection,
        connection.cursor() as cursor,
        cursor.copy(f"COPY ({select}) TO STDOUT (FORMAT binary)") as copy,
    ):
        for piece in copy:
            copied += len(piece)
    return copied


def read_topic(spark: SparkSession, columns: tuple[str, ...], readers: int) -> DataFrame:
    """Read the topic ROWS."""
    schema = ", ".join(f"{name} {TYPES.get(name, 'string')}" for name in columns)
    reader = spark.read.format("psqlmessages").schema(schema)
    return reader.option("topic", "ROWS").option("partitions", readers).load()


def pull(frame: DataFrame) -> None:
    """Read all rows into Spark, and discard them there."""
    frame.write.format("noop").mode("overwrite").save()


def reading_sides(
    spark: SparkSession, columns: tuple[str, ...], readers: int, copy: CopyReader,
    jdbcs: Mapping[str, Jdbc],
) -> Mapping[str, Act]:  # fmt: skip
    """Return acts that read the same columns of all messages."""
    sides: dict[str, Act] = {"psqlmessages": lambda: pull(read_topic(spark, columns, readers))}
    ids = copy.ranges[0][0], copy.ranges[-1][1] - 1
    for name, jdbc in jdbcs.items():
        frame = jdbc.read(spark, ids, readers).select(*columns)
        sides[name] = partial(pull, frame)
    sides["COPY BINARY"] = lambda: copy.read(columns)
    return sides


def rows_to_write(spark: SparkSession, rows: int, writers: int) -> DataFrame:
    """Create rows of 200 bytes in Spark's memory."""
    numbers = spark.range(rows, numPartitions=writers)
    frame = numbers.selectExpr("rpad(concat('message ', id), 200, '.') AS body").persist()
    frame.count()
    return frame


def writing_sides(frame: DataFrame, jdbc: Jdbc) -> Mapping[str, Act]:
    """Return acts that write the same rows."""
    writer = frame.write.format("psqlmessages").option("topic", "OUT").mode("append")
    return {"psqlmessages": writer.save, "Spark JDBC": lambda: jdbc.write(frame)}
