"""Streams of queues: elements are reserved, read, and committed with Spark's checkpoint.

An offset holds the leases of its batch: a batch that is read again after a crash has the same
elements. One whose lease was lost meanwhile is left out, and comes again in another batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, leases, literals
from psqlmessages.pipeline.holding import Holding
from psqlmessages.pipeline.options import SourceOptions
from psqlmessages.pipeline.reading import Read, Reader, Statement
from psqlmessages.pipeline.waiting import logger

# What Spark asks for where it wants all there is.
_ALL: Final = 1_000_000

_SPECIAL: Final = {"headers": "headers::text AS headers", "state": "'reserved'::text AS state"}


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Takes elements of a queue in batches, and commits each when Spark has."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._queue = options.queue or ""
        self._columns = columns.chosen(schema, columns.QUEUE)
        self._schema = schema
        self._holding: Holding | None = None
        self._left: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset before the first batch."""
        return {"batch": 0, "leases": ""}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxRowsPerTrigger."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Take no more than can be taken at this moment."""
        self._left = self._hold().available()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Commit the batch before, and reserve the next; ``start`` where nothing is there."""
        # Spark asks for more when a batch is done, but tells commit() of it only with the next.
        holding = self._hold()
        holding.settle(start["batch"], leases.unpacked(start["leases"]))
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else _ALL
        if self._left is not None:
            most = min(most, self._left)
        taken = holding.reserve(most)
        if not taken:
            return start
        if self._left is not None:
            self._left -= len(taken)
        holding.hold(taken)
        return {"batch": start["batch"] + 1, "leases": leases.packed(taken)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share out the elements of a batch."""
        if start["batch"] == end["batch"]:
            return []
        held = leases.unpacked(end["leases"])
        # Also those of a batch that was under way when the query ended.
        self._hold().hold(held)
        return [InputPartition(part) for part in leases.in_parts(held, self._options.partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the elements that are still held, and hold them for another timeout."""
        held: Sequence[str] = partition.value
        statements = tuple(Statement(self._statement(some)) for some in leases.in_calls(held))
        # Read again, elements come in the same order, unless a lease was lost meanwhile.
        read = Read(statements, is_repeatable=True, rows=len(held))
        reader = Reader(self._options.address)
        count = 0
        for batch in reader.batches(read, columns.arrow_schema(self._schema)):
            count += batch.num_rows
            yield batch
        if count < len(held):
            logger.warning(
                "%d of %d elements of queue %s are left out of this batch, which lost them",
                len(held) - count,
                len(held),
                self._queue,
            )

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the elements of a batch."""
        self._hold().settle(end["batch"], leases.unpacked(end["leases"]))

    def stop(self) -> None:
        """Disconnect."""
        if self._holding is not None:
            self._holding.close()

    def _hold(self) -> Holding:
        # Late: executors have a copy of this reader, and hold nothing.
        if self._holding is None:
            self._holding = Holding(self._options)
        return self._holding

    def _statement(self, held: Sequence[str]) -> str:
        queue = literals.text(self._queue)
        special = {**_SPECIAL, "queue": f"{queue}::text AS queue"}
        names = ", ".join(special.get(name, name) for name in self._columns)
        quoted = ", ".join(literals.text(lease) for lease in held)
        return (
            f"SELECT {names} FROM messages.renew({literals.text(self._options.client)}, {queue},"  # noqa: S608
            f" {self._options.timeout}, VARIADIC ARRAY[{quoted}]::text[])"
        )
