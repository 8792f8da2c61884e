"""What benchmarks.pipeline compares in batches: reading and writing, ours, JDBC's and COPY's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from urllib.parse import unquote, urlsplit

import psycopg
from pyspark.sql import DataFrame, SparkSession

JDBC_JAR = "/usr/share/java/postgresql.jar"
# Of 1,000 to 100,000 these were JDBC's best.
FETCH_ROWS, INSERT_ROWS = 10_000, 10_000
EVERYTHING = ("id", "topic", "sender", "body", "enc", "headers", "published_at")
TYPES = {"id": "bigint", "published_at": "timestamp"}
Act = Callable[[], object]


class Jdbc:
    """Spark's JDBC, on tables by hand."""

    def __init__(self, url: str, *, is_binary: bool = False) -> None:
        address = urlsplit(url)
        place = f"{address.hostname}:{address.port}{address.path}"
        self.url = f"jdbc:postgresql://{place}?reWriteBatchedInserts=true"
        if is_binary:
            # From the first time on: by itself the driver has a large result as text.
            self.url += "&prepareThreshold=-1"
        self.properties = {
            "user": unquote(address.username or ""),
            "password": unquote(address.password or ""),
            "driver": "org.postgresql.Driver",
        }

    def read(self, spark: SparkSession, span: tuple[int, int], readers: int) -> DataFrame:
        """Read by_hand in as many ranges of ids as there are readers."""
        low, high = span
        return spark.read.jdbc(
            self.url, "by_hand", column="id", lowerBound=low, upperBound=high + 1,
            numPartitions=readers, properties=self.properties | {"fetchsize": str(FETCH_ROWS)},
        )  # fmt: skip

    def write(self, frame: DataFrame) -> None:
        """Append to written_by_hand."""
        properties = self.properties | {"batchsize": str(INSERT_ROWS)}
        frame.write.jdbc(self.url, "written_by_hand", mode="append", properties=properties)


class Copying:
    """COPY BINARY, by processes that drop what comes; they are there before time is measured."""

    def __init__(self, url: str, span: tuple[int, int], readers: int) -> None:
        self.url = url
        low, high = span
        step = -(-(high + 1 - low) // readers)
        self.ranges = [(at, min(at + step, high + 1)) for at in range(low, high + 1, step)]
        self.processes = multiprocessing.get_context("spawn").Pool(len(self.ranges))

    def read(self, columns: tuple[str, ...]) -> None:
        """Copy these columns of by_hand."""
        asked = [(self.url, columns, low, high) for low, high in self.ranges]
        self.processes.starmap(copy_away, asked, chunksize=1)

    def close(self) -> None:
        """End the processes."""
        self.processes.close()
        self.processes.join()


def copy_away(url: str, columns: tuple[str, ...], low: int, high: int) -> int:
    """Read one range of by_hand; the number of bytes."""
    names = ", ".join(columns)
    select = f"SELECT {names} FROM by_hand WHERE id >= {low} AND id < {high}"  # noqa: S608
    copied = 0
    with (
        closing(psycopg.connect(url)) as connection,
        connection.cursor() as cursor,
        cursor.copy(f"COPY ({select}) TO STDOUT (FORMAT binary)") as copy,
    ):
        for piece in copy:
            copied += len(piece)
    return copied


def ours(spark: SparkSession, columns: tuple[str, ...], readers: int) -> DataFrame:
    """Read the topic ROWS through its rules."""
    schema = ", ".join(f"{name} {TYPES.get(name, 'string')}" for name in columns)
    reader = spark.read.format("psqlmessages").schema(schema)
    return reader.option("topic", "ROWS").option("partitions", readers).load()


def pull(frame: DataFrame) -> None:
    """Move all rows into Spark, and drop them there."""
    frame.write.format("noop").mode("overwrite").save()


def reading_sides(
    spark: SparkSession, columns: tuple[str, ...], readers: int, copying: Copying,
    jdbcs: Mapping[str, Jdbc],
) -> Mapping[str, Act]:  # fmt: skip
    """Read the same columns of all messages."""
    sides: dict[str, Act] = {"psqlmessages": lambda: pull(ours(spark, columns, readers))}
    span = copying.ranges[0][0], copying.ranges[-1][1] - 1
    for name, jdbc in jdbcs.items():
        frame = jdbc.read(spark, span, readers).select(*columns)
        sides[name] = partial(pull, frame)
    sides["COPY BINARY"] = lambda: copying.read(columns)
    return sides


def rows_to_write(spark: SparkSession, rows: int, writers: int) -> DataFrame:
    """Make rows of 200 bytes, kept in memory."""
    numbers = spark.range(rows, numPartitions=writers)
    frame = numbers.selectExpr("rpad(concat('message ', id), 200, '.') AS body").persist()
    frame.count()
    return frame


def writing_sides(frame: DataFrame, jdbc: Jdbc) -> Mapping[str, Act]:
    """Write the same rows."""
    writer = frame.write.format("psqlmessages").option("topic", "OUT").mode("append")
    return {"psqlmessages": writer.save, "Spark JDBC": lambda: jdbc.write(frame)}
