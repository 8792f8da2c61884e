"""A driver with four queries that go on until its input ends.

    python -m tests.pipeline.restart_program FOLDER ROWS

FOLDER holds the checkpoints, and `ended`, a line for each query that ended: it is started again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from psqlmessages.pipeline import register, session
from psqlmessages.pipeline.jobs import sentence
from psqlmessages.pipeline.spark import stop
from tests.pipeline.sink_program import SMALL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

QUERIES = ("topic", "queue", "files", "taken")
# What a reservation holds whose answer a restart cut off can be taken again after so long.
LEASE_SECONDS = 20


class Program:
    """The session, and how each query is started."""

    def __init__(self, folder: Path, rows: str) -> None:
        # One attempt for each task, as for everybody who does not ask for more.
        self._spark: SparkSession = register(session("restarts", "local[2]", **SMALL))
        self._folder = folder
        self._rows = rows

    def start(self, name: str) -> StreamingQuery:
        """Start a query, or start it again."""
        messages = self._read(name)
        write = messages.select("body", "enc").writeStream
        if name == "files":
            write = messages.writeStream.foreachBatch(self._write_files())
        elif name == "queue":
            write = write.format("psqlmessages").option("queue", "DONE")
        else:
            to = "OUT" if name == "topic" else "TAKEN"
            write = write.format("psqlmessages").option("topic", to)
        checkpoint = self._folder / f"checkpoint of {name}"
        return write.option("checkpointLocation", str(checkpoint)).start()

    def _read(self, name: str) -> DataFrame:
        reader = self._spark.readStream.format("psqlmessages").option(
            "maxRowsPerTrigger", self._rows
        )
        if name == "taken":
            return reader.option("queue", "WORK").option("timeout", LEASE_SECONDS).load()
        return reader.option("topic", "IN").option("client", f"pipeline.{name}").load()

    def _write_files(self) -> Callable[[DataFrame, int], None]:
        folder = self._folder / "files"

        def write(batch: DataFrame, number: int) -> None:
            # Written again, a batch takes the place of what was there of it.
            batch.select("body").write.mode("overwrite").parquet(str(folder / str(number)))
            (
                batch.select("body").write.format("psqlmessages").mode("append")
                .option("topic", "EACH").option("query", "each").save()
            )  # fmt: skip

        return write


def main(folder: Path, rows: str) -> None:
    """Run the queries until the input ends."""
    program = Program(folder, rows)
    queries = {name: program.start(name) for name in QUERIES}
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    with (folder / "ended").open("a", buffering=1) as ended:
        while not is_over.wait(0.1):
            for name, query in queries.items():
                if not query.isActive:
                    error = query.exception()
                    print(f"{name}: {sentence(error) if error else 'no error'}", file=ended)
                    print(f"{name} has ended: {error}", file=sys.stderr)
                    queries[name] = program.start(name)
    for query in queries.values():
        query.stop()
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
