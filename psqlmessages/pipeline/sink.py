"""Sink: writes rows of Spark to a topic or queue exactly once, even if tasks or drivers are killed.

Each task copies its rows into messages.staged. One call commits a batch: it checks the rules, moves
the rows and stores (query, batch). If Spark writes the batch again, the call does nothing.
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

from psqlmessages.pipeline.database import OPTION as DSN_FILE
from psqlmessages.pipeline.errors import ColumnRefused, OptionRefused
from psqlmessages.pipeline.source_options import destination, lowered, refuse_unknown
from psqlmessages.pipeline.staging import SinkDestination, StagingClient, stage, unstage
from psqlmessages.wire import BASE64

# Columns that the sink accepts, and their conversion to columns of messages.staged. Pure functions.

# The stored columns of a topic and of a queue.
TOPIC_COLUMNS: Final = ("body", "enc")
QUEUE_COLUMNS: Final = ("body", "enc", "headers", "key")

_ARRAYS: Final = {"body": "bodies", "enc": "encs", "headers": "headers", "key": "keys"}
# For bodies of 200 bytes, arrays of 200 take a third less server time than single bodies.
_CHUNK_ROWS: Final = 200
_CHUNK_BYTES: Final = 64 * 1024


def check(schema: types.StructType, known: Sequence[str]) -> None:
    """Raise ColumnRefused, with the remedy, if a DataFrame cannot be written."""
    names = schema.fieldNames()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ColumnRefused(
            f"cannot write column {', '.join(unknown)}. Known columns: {', '.join(known)}."
            ' Select them, for example df.select("body", "enc")'
        )
    if "body" not in names:
        raise ColumnRefused(
            'the column body is missing: name it, for example df.selectExpr("… AS body")'
        )
    if len(names) != len(set(names)):
        raise ColumnRefused(f"a column appears twice: {', '.join(names)}")
    for field in schema.fields:
        _check_type(field.name, field.dataType)
    if "enc" in names and isinstance(schema["body"].dataType, types.BinaryType):
        raise ColumnRefused("a binary body is stored as b64: remove the column enc")


def _check_type(name: str, kind: types.DataType) -> None:
    allowed = types.StringType | types.BinaryType if name == "body" else types.StringType
    if isinstance(kind, allowed):
        return
    problem = f"the column {name} is of type {kind.simpleString()}"
    if isinstance(kind, types.StructType | types.MapType | types.ArrayType | types.VariantType):
        hint = f"write it as JSON: to_json({name}) AS {name}"
        raise ColumnRefused(f"{problem}: {hint}" + (", 'json' AS enc" if name == "body" else ""))
    wanted = "a string or binary" if name == "body" else "a string"
    raise ColumnRefused(f"{problem}, not {wanted}: cast it, for example CAST({name} AS string)")


def staged(batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Convert rows to rows of messages.staged (without the name), each with arrays of bodies.

    Binary bodies become base64, and null bodies become empty. Places count from 0 over all batches.
    Batches without rows are skipped.
    """
    place = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        # By position, because Spark does not guarantee the names.
        columns = dict(zip(names, batch.columns, strict=True))
        body = columns["body"]
        if pa.types.is_binary(body.type) or pa.types.is_large_binary(body.type):
            body = pa.array([b64encode(v or b"").decode() for v in body.to_pylist()], pa.string())
            columns["enc"] = pa.repeat(BASE64, batch.num_rows)
        # Like publish and push.
        body = columns["body"] = body.fill_null("")
        rows = batch.num_rows
        step = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES * rows // max(body.nbytes, 1)))
        bounds = pa.array([*range(0, rows, step), rows], pa.int32())
        arrays = {
            _ARRAYS[name]: pa.ListArray.from_arrays(bounds, column)
            for name, column in columns.items()
        }
        count = len(bounds) - 1
        arrays["place"] = pa.array(range(place, place + count), pa.int64())
        place += count
        yield pa.RecordBatch.from_pydict(arrays)


OPTIONS: Final = ("topic", "queue", "client", "query", DSN_FILE)
# Spark passes its own options to every sink.
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})

# Spark's local properties of a task: the ids of its streaming query and batch.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class StagedCommit(WriterCommitMessage):
    """The staged rows of a task, and the query and batch of its stream, if there is one."""

    stagings: tuple[str, ...]
    rows: int
    query: str | None
    batch: int | None


class _Stager:
    """The common part of both writers. It is pickled, so it has no connection and no address."""

    def __init__(
        self, options: Mapping[str, str], schema: types.StructType, *, overwrite: bool
    ) -> None:
        """Check everything, also the permissions, before any work.

        Raises OptionRefused, ColumnRefused, or the error of the permission check.
        """
        if overwrite:
            raise OptionRefused(
                'published messages cannot be overwritten: use .mode("append"),'
                ' or .outputMode("append") for a stream'
            )
        self.options = lowered(options)
        refuse_unknown(set(self.options) - _OF_SPARK, OPTIONS)
        topic, queue = destination(self.options)
        check(schema, TOPIC_COLUMNS if queue is None else QUEUE_COLUMNS)
        client = self.options.get("client") or "pipeline"
        self.destination = SinkDestination(topic or queue or "", queue is not None, client)
        self.columns = schema.fieldNames()
        # Pickled with the writer, so that a repeated commit has the same name.
        self.once = f"once/{uuid4().hex}"
        StagingClient(self.options, self.destination).check()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedCommit:
        """Stage the rows of one task attempt under new names."""
        names, rows = stage(self.options, staged(iterator, self.columns))
        task = TaskContext.get()
        query = task.getLocalProperty(_QUERY_ID) if task else None
        batch = task.getLocalProperty(_BATCH_ID) if task else None
        return StagedCommit(names, rows, query, None if batch is None else int(batch))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803
        """Delete the rows that tasks have staged."""
        unstage(self.options, [name for each in _known(messages) for name in each.stagings])

    def _commit(self, messages: list[StagedCommit], query: str, number: int) -> None:
        names = [name for message in messages for name in message.stagings]
        if names:
            rows = sum(message.rows for message in messages)
            StagingClient(self.options, self.destination).commit(query, number, names, rows)


class MessagesWriter(_Stager, DataSourceArrowWriter):
    """Writes one DataFrame: commits all rows together or none."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit all rows, unless a write with the same option ``query`` was committed before."""
        known = _known(messages)
        named = self.options.get("query")
        if named is None:
            return self._commit(known, self.once, 0)
        # In foreachBatch, each batch is a separate write with the same name.
        of_stream = next((message for message in known if message.query is not None), None)
        if of_stream is None:
            return self._commit(known, named, 0)
        return self._commit(known, f"{of_stream.query}/{named}", of_stream.batch or 0)


class MessagesStreamWriter(_Stager, DataSourceStreamArrowWriter):
    """Writes the batches of a stream, each once per checkpoint. Spark makes one for each batch."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the rows of a batch, unless that was done before."""
        known = _known(messages)
        query = next((m.query for m in known if m.query is not None), self.options.get("query"))
        if query is None:
            raise OptionRefused("Spark provides no query id here: name one with the option query")
        self._commit(known, query, batchId)


def _known(messages: list[WriterCommitMessage | None]) -> list[StagedCommit]:
    """Filter out failed tasks: an abort has no message from them."""
    return [message for message in messages if isinstance(message, StagedCommit)]
