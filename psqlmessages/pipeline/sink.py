"""The sink: rows of Spark enter a topic or queue exactly once, be tasks and drivers killed or not.

Each task copies its rows into messages.staged. The commit of a batch is one call that checks the
rules, moves the rows and remembers (query, batch): a batch that Spark writes again does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from psqlmessages.pipeline.committing import Batch, Desk, Destination
from psqlmessages.pipeline.dsn import OPTION as DSN_FILE
from psqlmessages.pipeline.dsn import dsn
from psqlmessages.pipeline.errors import OptionRefused
from psqlmessages.pipeline.options import destination, lowered, refuse_unknown
from psqlmessages.pipeline.sink_columns import QUEUE_COLUMNS, TOPIC_COLUMNS, check, staged
from psqlmessages.pipeline.staging import stage

OPTIONS: Final = ("topic", "queue", "client", "query", DSN_FILE)
# Spark hands its own options on to every sink.
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})

# What Spark tells its tasks of the stream they work for.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    """Make the writer of ``df.write``: all of its rows are there at once, or none.

    Rights are checked here, before any work. Raises OptionRefused, ColumnRefused, or what the
    check raises.
    """
    return MessagesWriter(*_prepared(options, schema, overwrite))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Make the writer of ``df.writeStream``, as Spark does for each batch: see batch_writer."""
    return MessagesStreamWriter(*_prepared(options, schema, overwrite))


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task staged, and the stream's query and batch it did so for, where Spark tells it."""

    stagings: tuple[str, ...]
    rows: int
    query: str | None
    batch: int | None


class _Stager:
    """What both writers do on executors. It is pickled: it holds no connection and no address."""

    def __init__(
        self, options: dict[str, str], destination: Destination, columns: list[str]
    ) -> None:
        self.options = options
        self.destination = destination
        self.columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of a task's attempt, under names of its own."""
        found = stage(dsn(self.options), staged(iterator, self.columns))
        task = TaskContext.get()
        query = task.getLocalProperty(_QUERY_ID) if task else None
        batch = task.getLocalProperty(_BATCH_ID) if task else None
        return Staged(found.names, found.rows, query, None if batch is None else int(batch))

    def _commit(self, messages: list[Staged], query: str, number: int) -> None:
        filled = [message for message in messages if message.rows]
        if filled:
            batch = Batch(
                query,
                number,
                tuple(name for message in filled for name in message.stagings),
                sum(message.rows for message in filled),
            )
            Desk(self.options, self.destination).commit(batch)

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        stagings = [name for message in _known(messages) for name in message.stagings]
        Desk(self.options, self.destination).unstage(stagings)


class MessagesWriter(_Stager, DataSourceArrowWriter):
    """Writes one DataFrame."""

    def __init__(
        self, options: dict[str, str], destination: Destination, columns: list[str]
    ) -> None:
        super().__init__(options, destination, columns)
        # Kept with the pickled writer, so that a commit that is tried again is the same one.
        self.once = f"once/{uuid4().hex}"

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Put all rows in; nothing where a write of the same option ``query`` was done before."""
        known = _known(messages)
        named = self.options.get("query")
        if named is None:
            return self._commit(known, self.once, 0)
        # In foreachBatch each batch is another write of the same name.
        of_stream = next((message for message in known if message.query is not None), None)
        if of_stream is None:
            return self._commit(known, named, 0)
        return self._commit(known, f"{of_stream.query}/{named}", of_stream.batch or 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Throw away what tasks have staged."""
        self._abort(messages)


class MessagesStreamWriter(_Stager, DataSourceStreamArrowWriter):
    """Writes the batches of a stream, each of them once for its checkpoint."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Put the rows of a batch in; nothing where that was done before."""
        known = _known(messages)
        query = next((m.query for m in known if m.query is not None), self.options.get("query"))
        if query is None:
            raise OptionRefused("Spark tells no query's id here: name one with the option query")
        self._commit(known, query, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Throw away what tasks have staged."""
        self._abort(messages)


def _known(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    """Leave out the tasks that failed, of which an abort has no message."""
    return [message for message in messages if isinstance(message, Staged)]


def _prepared(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> tuple[dict[str, str], Destination, list[str]]:
    if overwrite:
        raise OptionRefused(
            "what was published cannot be overwritten: write with"
            ' .mode("append"), and a stream with .outputMode("append")'
        )
    given = lowered(options)
    refuse_unknown(set(given) - _OF_SPARK, OPTIONS)
    to = _destination(given)
    check(schema, QUEUE_COLUMNS if to.is_queue else TOPIC_COLUMNS)
    Desk(given, to).check()
    return given, to, schema.fieldNames()


def _destination(options: Mapping[str, str]) -> Destination:
    topic, queue = destination(options)
    return Destination(topic or queue or "", queue is not None, options.get("client") or "pipeline")
