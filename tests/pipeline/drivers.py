"""Drivers to be killed, or to go on while PostgreSQL restarts.

    python -m tests.pipeline.drivers exchange DEFINITIONS     runs these until it is killed
    python -m tests.pipeline.drivers FOLDER MASTER ROWS NAME …   runs queries until its input ends

FOLDER holds the checkpoints, and `ended`, a line for each query that ended: it is started again.
With a MASTER that tries tasks again, one task of `topic` and `queue` fails amid its rows, once.
"""

import sys
import threading
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.functions import udf
from pyspark.sql.streaming.query import StreamingQuery

from psqlmessages.pipeline import register, session
from psqlmessages.pipeline.exchange.definition import compile_exchanges
from psqlmessages.pipeline.exchange.driver import SparkExchanges
from psqlmessages.pipeline.job_runner import cause_line
from psqlmessages.pipeline.spark_session import stop
from tests.pipeline.processes import SMALL

# If a restart cuts off the answer of a reservation, its elements are free after this time.
LEASE_SECONDS = 20
TO = {"topic": ("topic", "OUT"), "queue": ("queue", "DONE"), "taken": ("topic", "TAKEN")}


def exchange(definitions: str) -> None:
    spark = session("exchange", "local[2]", **SMALL)
    exchanges = SparkExchanges(spark, lambda turn, _: print(turn, flush=True), tasks=2, span=1.0)
    exchanges.define(compile_exchanges(definitions, ()))
    exchanges.start().awaitTermination()


class Streams:
    def __init__(self, folder: Path, master: str, rows: str) -> None:
        self._spark = register(session("streams", master, **SMALL))
        self._fails = "," in master
        self._folder = folder
        self._rows = rows

    def start(self, name: str) -> StreamingQuery:
        messages = self._read(name)
        if self._fails:
            messages = self._failing(messages, name)
        write = messages.select("body").writeStream
        if name == "files":
            write = write.foreachBatch(self._write_files)
        else:
            write = write.format("psqlmessages").option(*TO[name])
        checkpoint = self._folder / f"checkpoint of {name}"
        return write.option("checkpointLocation", str(checkpoint)).start()

    def _read(self, name: str) -> DataFrame:
        read = self._spark.readStream.format("psqlmessages").option("maxRowsPerTrigger", self._rows)
        if name == "taken":
            return read.option("queue", "WORK").option("timeout", LEASE_SECONDS).load()
        return read.option("topic", "IN").option("client", f"pipeline.{name}").load()

    def _failing(self, messages: DataFrame, name: str) -> DataFrame:
        # Not Arrow: that would need pandas.
        once = udf(partial(fails_once, self._folder / name), "string", useArrow=False)
        return messages.select(once("body").alias("body"))

    def _write_files(self, batch: DataFrame, number: int) -> None:
        # A repeated batch replaces its earlier files.
        batch.write.mode("overwrite").parquet(str(self._folder / "files" / str(number)))
        each = batch.write.format("psqlmessages").mode("append")
        each.option("topic", "EACH").option("query", "each").save()


def fails_once(mark: Path, body: str) -> str:
    """Return a body, but raise an error at one of them the first time."""
    if body == "message 150" and not mark.exists():
        mark.touch()
        raise ArithmeticError("the first attempt fails")
    return body


def streams(folder: Path, master: str, rows: str, *names: str) -> None:
    made = Streams(folder, master, rows)
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    queries = {}
    for name in names:
        queries[name] = made.start(name)
        # In their first batches Spark adds to a map of variables that queries of one source share,
        # and a task that it writes down meanwhile cannot be read (OptionalDataException).
        while queries[name].lastProgress is None and not is_over.wait(0.05):
            pass
    with (folder / "ended").open("a", buffering=1) as ended:
        while not is_over.wait(0.1):
            for name, query in queries.items():
                if not query.isActive:
                    error = query.exception()
                    print(f"{name}: {cause_line(error) if error else 'no error'}", file=ended)
                    print(f"{name} has ended: {error}", file=sys.stderr)
                    queries[name] = made.start(name)
    for query in queries.values():
        query.stop()
    stop()


if __name__ == "__main__":
    if sys.argv[1] == "exchange":
        exchange(sys.argv[2])
    else:
        streams(Path(sys.argv[1]), *sys.argv[2:])
