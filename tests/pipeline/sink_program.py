"""A driver that is killed: it streams the topic IN into a topic and a queue, until both have all.

    python -m tests.pipeline.sink_program FOLDER TOPIC QUEUE BATCH

FOLDER holds the checkpoints. One task fails amid its rows, once, and is tried again.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.functions import udf

from psqlmessages.pipeline import register, session
from psqlmessages.pipeline.spark import stop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

# For a Java that lives for seconds: compiling well would take longer than it saves.
SMALL = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def main(folder: Path, topic: str, queue: str, batch: str) -> None:
    # Three attempts for each task, where local[2] has one.
    spark = register(session("sink", "local[2,3]", **SMALL))
    queries = [
        start(spark, {"topic": topic}, folder, batch),
        start(spark, {"queue": queue}, folder, batch),
    ]
    for query in queries:
        query.awaitTermination()
    stop()


def start(spark: SparkSession, to: dict[str, str], folder: Path, batch: str) -> StreamingQuery:
    (kind,) = to
    rows = (
        spark.readStream.format("psqlmessages").option("topic", "IN")
        .option("client", f"pipeline.{kind}").option("maxRowsPerTrigger", batch).load()
    )  # fmt: skip
    # Not Arrow: that would need pandas.
    once = udf(partial(fails_once, folder / kind), "string", useArrow=False)
    failing = rows.select(once("body").alias("body"))
    return (
        failing.writeStream.format("psqlmessages").options(**to)
        .option("checkpointLocation", str(folder / f"checkpoint of {kind}"))
        .trigger(availableNow=True).start()
    )  # fmt: skip


def fails_once(mark: Path, body: str) -> str:
    """Hand a body on, but end the task of one of them with an error, the first time."""
    if body == "message 150" and not mark.exists():
        mark.touch()
        raise ArithmeticError("the first attempt fails")
    return body


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
