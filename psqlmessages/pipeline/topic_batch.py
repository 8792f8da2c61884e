"""Batch reads of topics: what is kept of them, in parts of about equal size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, density, horizons, ranges
from psqlmessages.pipeline.database import Database
from psqlmessages.pipeline.filters import Condition, bounded, condition, topics_left
from psqlmessages.pipeline.options import SourceOptions
from psqlmessages.pipeline.ranges import Range
from psqlmessages.pipeline.reading import Read, Reader
from psqlmessages.pipeline.stream_calls import StreamCalls


class TopicBatchReader(DataSourceReader):
    """Reads what is kept of topics and visible when the read is planned.

    Each partition reads in a transaction of its own: a message committed meanwhile, whose id is
    lower than another's, may be seen or not.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.chosen(schema, columns.TOPIC)
        self._schema = schema
        self._conditions: list[Condition] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Cut the topics into ranges of ids with about as many messages each."""
        options = self._options
        database = Database(options.address)
        try:
            found = horizons.ask(database, options.client, options.topics).topics
            names = topics_left(found, self._conditions)
            wholes = [
                Range(name, *bounded(found[name].removed, found[name].newest, self._conditions))
                for name in names
            ]
            weighed = density.weighed(database, options.client, wholes)
            parts = ranges.shared_out(weighed, options.partitions)
        finally:
            database.close()
        # Spark takes an empty list for one partition of nothing it knows.
        return [InputPartition(part) for part in parts or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition; on an executor."""
        if not partition.value:
            return iter(())
        conditions = [c.sql for c in self._conditions if not c.is_by_range]
        reads = StreamCalls(self._options.client, partition.value, self._columns, conditions)
        reader = Reader(self._options.address)
        return reader.batches(Read(reads), columns.arrow_schema(self._schema))


class FilteredTopicBatchReader(TopicBatchReader):
    """The same, with filters: Spark refuses such a one where its pushdown is switched off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take on what PostgreSQL judges as Spark does, and return the rest."""
        for filter_ in filters:
            pushed = condition(filter_, self._schema)
            if pushed is None:
                yield filter_
            else:
                self._conditions.append(pushed)
