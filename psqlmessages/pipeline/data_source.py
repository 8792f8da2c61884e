"""Spark data source `format("psqlmessages")`."""

from __future__ import annotations

import sys
from typing import Final

from pyspark.sql import datasource
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns
from psqlmessages.pipeline.queue_source import QueueBatchReader, QueueStreamReader
from psqlmessages.pipeline.sink import MessagesStreamWriter, MessagesWriter
from psqlmessages.pipeline.source_options import SourceOptions
from psqlmessages.pipeline.topic_source import (
    FilteredTopicBatchReader,
    TopicBatchReader,
    TopicStreamReader,
)

_PUSHDOWN_MODULE: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class MessagesSource(datasource.DataSource):
    """Creates the readers and writers of topics and queues."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "psqlmessages"

    def schema(self) -> StructType:
        """Return all columns of a topic or queue; raises OptionRefused."""
        is_topic = SourceOptions.of(self.options).queue is None
        return columns.TOPIC_SCHEMA if is_topic else columns.QUEUE_SCHEMA

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        """Return the reader of ``spark.read``."""
        options = SourceOptions.of(self.options)
        if options.queue is not None:
            return QueueBatchReader(options, schema)
        reader = FilteredTopicBatchReader if _is_pushdown_worker() else TopicBatchReader
        return reader(options, schema)

    def streamReader(self, schema: StructType) -> datasource.DataSourceStreamReader:  # noqa: N802
        """Return the reader of ``spark.readStream``."""
        options = SourceOptions.of(self.options)
        reader = TopicStreamReader if options.queue is None else QueueStreamReader
        return reader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> MessagesWriter:
        """Return the writer of ``df.write``."""
        return MessagesWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> MessagesStreamWriter:  # noqa: N802
        """Return the writer of ``df.writeStream``."""
        return MessagesStreamWriter(self.options, schema, overwrite=overwrite)


def _is_pushdown_worker() -> bool:
    """Return whether this is the worker process in which Spark pushes filters down.

    Spark starts such a process only if filter pushdown is enabled. If it is not, Spark rejects
    readers that accept filters. A worker cannot read the setting itself.
    """
    main_spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_MODULE in sys.modules or getattr(main_spec, "name", None) == _PUSHDOWN_MODULE
