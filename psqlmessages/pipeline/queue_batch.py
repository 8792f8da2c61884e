"""Batch reads of queues: a look at their elements, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, literals
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.options import SourceOptions
from psqlmessages.pipeline.reading import Read, Reader, Statement


class QueueBatchReader(DataSourceReader):
    """Reads the elements that a queue holds at one moment, be they available or not."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.chosen(schema, columns.QUEUE)
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition: one snapshot; raises what is wrong with the queue or the right."""
        database = Database(self._options.address)
        try:
            database.ask(
                "SELECT messages.sizes(%s, %s)", (self._options.client, self._options.queue)
            )
        finally:
            database.close()
        return [InputPartition(self._options.queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the queue; on an executor."""
        statement = (
            f"SELECT {', '.join(self._columns)} FROM messages.peek("  # noqa: S608
            f"{literals.text(self._options.client)}, {literals.text(partition.value)}, NULL,"
            f" {str('body' in self._columns).lower()})"
        )
        reader = Reader(self._options.address)
        return reader.batches(Read((Statement(statement),)), columns.arrow_schema(self._schema))
