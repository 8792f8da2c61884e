"""Sink: writes rows of Spark to a topic or queue exactly once, even after crashes.

Each task copies its rows into messages.staged. One call commits a batch: it checks the rules, moves
the rows and stores (query, batch). If the batch is stored already, the call only deletes the rows.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from psqlmessages.pipeline.database import DSN_OPTION
from psqlmessages.pipeline.errors import ColumnRefused, OptionRefused
from psqlmessages.pipeline.source_options import lower_names, refuse_unknown, topic_or_queue
from psqlmessages.pipeline.staging import SinkDestination, StagingClient, stage, unstage
from psqlmessages.wire import BASE64

# Columns that the sink accepts, by kind of destination.
TOPIC_COLUMNS: Final = ("body", "enc")
QUEUE_COLUMNS: Final = ("body", "enc", "headers", "key")

_ARRAY_COLUMNS: Final = {"body": "bodies", "enc": "encs", "headers": "headers", "key": "keys"}
# A staged row has at most _CHUNK_ROWS bodies, and fewer if they would exceed _CHUNK_BYTES. For
# bodies of 200 bytes, this takes a third less server time than single bodies.
_CHUNK_ROWS, _CHUNK_BYTES = 200, 64 * 1024


def check_columns(schema: types.StructType, known: Sequence[str]) -> None:
    """Raise ColumnRefused if the sink cannot write a DataFrame of this schema."""
    names = schema.fieldNames()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ColumnRefused(
            f"cannot write column {', '.join(unknown)}. Known columns: {', '.join(known)}."
            ' Select them, for example df.select("body", "enc")'
        )
    if "body" not in names:
        raise ColumnRefused(
            'the column body is missing: add it, for example df.selectExpr("… AS body")'
        )
    if len(names) != len(set(names)):
        raise ColumnRefused(f"a column appears twice: {', '.join(names)}")
    for field in schema.fields:
        _check_type(field.name, field.dataType)
    if "enc" in names and isinstance(schema["body"].dataType, types.BinaryType):
        raise ColumnRefused("a binary body is stored as b64: remove the column enc")


def _check_type(name: str, type_: types.DataType) -> None:
    allowed = types.StringType | types.BinaryType if name == "body" else types.StringType
    if isinstance(type_, allowed):
        return
    problem = f"the column {name} is of type {type_.simpleString()}"
    if isinstance(type_, types.StructType | types.MapType | types.ArrayType | types.VariantType):
        hint = f"write it as JSON: to_json({name}) AS {name}"
        raise ColumnRefused(f"{problem}: {hint}" + (", 'json' AS enc" if name == "body" else ""))
    expected = "a string or binary" if name == "body" else "a string"
    raise ColumnRefused(f"{problem}, not {expected}: cast it, for example CAST({name} AS string)")


def to_staged_rows(
    batches: Iterator[pa.RecordBatch], names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Convert rows to rows of the table messages.staged, each with arrays of many bodies.

    Binary bodies become base64, and null bodies become empty. The column ``place`` numbers the
    staged rows from 0. The column ``staging`` is added later.
    """
    place = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        # Match columns by position: Spark does not guarantee their names.
        columns = dict(zip(names, batch.columns, strict=True))
        body = columns["body"]
        if pa.types.is_binary(body.type) or pa.types.is_large_binary(body.type):
            body = pa.array([b64encode(v or b"").decode() for v in body.to_pylist()], pa.string())
            columns["enc"] = pa.repeat(BASE64, batch.num_rows)
        # Like publish and push, store null as empty.
        body = columns["body"] = body.fill_null("")
        rows = batch.num_rows
        rows_in_chunk_bytes = _CHUNK_BYTES * rows // max(body.nbytes, 1)
        chunk_rows = max(1, min(_CHUNK_ROWS, rows_in_chunk_bytes))
        bounds = pa.array([*range(0, rows, chunk_rows), rows], pa.int32())
        arrays = {
            _ARRAY_COLUMNS[name]: pa.ListArray.from_arrays(bounds, column)
            for name, column in columns.items()
        }
        count = len(bounds) - 1
        arrays["place"] = pa.array(range(place, place + count), pa.int64())
        place += count
        yield pa.RecordBatch.from_pydict(arrays)


OPTIONS: Final = ("topic", "queue", "client", "query", DSN_OPTION)
# Spark passes its own options to every sink.
_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname"})

# Properties of a Spark task: the ids of its streaming query and batch.
_QUERY_PROPERTY: Final = "sql.streaming.queryId"
_BATCH_PROPERTY: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class StagedCommit(WriterCommitMessage):
    """A task's message to the driver: the rows that the task has staged, their query and batch.

    ``staging_ids`` are values of the column staging of messages.staged, one per transaction.
    ``query`` and ``batch`` are None if the task does not belong to a stream.
    """

    staging_ids: tuple[str, ...]
    rows: int
    query: str | None
    batch: int | None


class _StagingWriter:
    """The common part of both writers. Spark pickles writers, so they have no connection."""

    def __init__(
        self, options: Mapping[str, str], schema: types.StructType, *, overwrite: bool
    ) -> None:
        """Check options, columns and permissions; raise MessagesError before any row is read."""
        if overwrite:
            raise OptionRefused(
                'published messages cannot be overwritten: use .mode("append"),'
                ' or .outputMode("append") for a stream'
            )
        self.options = lower_names(options)
        refuse_unknown(set(self.options) - _SPARK_OPTIONS, OPTIONS)
        topic, queue = topic_or_queue(self.options)
        check_columns(schema, TOPIC_COLUMNS if queue is None else QUEUE_COLUMNS)
        client = self.options.get("client") or "pipeline"
        self.destination = SinkDestination(topic or queue or "", queue is not None, client)
        self.columns = schema.fieldNames()
        # Pickled with the writer, so that a repeated commit has the same query name.
        self.default_query = f"once/{uuid4().hex}"
        StagingClient(self.options, self.destination).check()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedCommit:
        """Stage the rows of one task attempt."""
        staging_ids, rows = stage(self.options, to_staged_rows(iterator, self.columns))
        query = batch = None
        if task := TaskContext.get():
            query = task.getLocalProperty(_QUERY_PROPERTY)
            batch = task.getLocalProperty(_BATCH_PROPERTY)
        return StagedCommit(staging_ids, rows, query, None if batch is None else int(batch))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803
        """Delete the rows that tasks have staged, as `unstage` does."""
        unstage(self.options, _staging_ids(_staged_commits(messages)))

    def _commit(self, tasks: list[StagedCommit], query: str, batch: int) -> None:
        if ids := _staging_ids(tasks):
            rows = sum(task.rows for task in tasks)
            StagingClient(self.options, self.destination).commit(query, batch, ids, rows)


class MessagesWriter(_StagingWriter, DataSourceArrowWriter):
    """Writes one DataFrame: commits all rows together or none."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit all rows, unless a write with the same option ``query`` is committed already."""
        tasks, batch = _staged_commits(messages), 0
        query = self.options.get("query")
        if query is None:
            query = self.default_query
        elif stream_task := next((task for task in tasks if task.query is not None), None):
            # In foreachBatch, each batch is a separate write with the same option.
            query, batch = f"{stream_task.query}/{query}", stream_task.batch or 0
        self._commit(tasks, query, batch)


class MessagesStreamWriter(_StagingWriter, DataSourceStreamArrowWriter):
    """Writes a batch of a stream once per checkpoint. Spark creates a writer for each batch."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the rows of a batch, unless the batch is committed already."""
        tasks = _staged_commits(messages)
        query = next((t.query for t in tasks if t.query is not None), self.options.get("query"))
        if query is None:
            raise OptionRefused("Spark provides no query id: name the query by the option query")
        self._commit(tasks, query, batchId)


def _staged_commits(messages: list[WriterCommitMessage | None]) -> list[StagedCommit]:
    """Return the messages of succeeded tasks: for failed tasks, Spark passes None."""
    return [message for message in messages if isinstance(message, StagedCommit)]


def _staging_ids(tasks: list[StagedCommit]) -> list[str]:
    return [staging_id for task in tasks for staging_id in task.staging_ids]
