"""Source of queues, for batch and streaming reads.

A stream reserves elements, reads them, and commits them when Spark has processed their batch. An
offset stores the leases of its batch, so a batch that is repeated after a crash has the same
elements, except those whose lease has expired: they are available again.
"""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from math import ceil
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, literals, reader
from psqlmessages.pipeline.database import Database, RenewalThread, logger
from psqlmessages.pipeline.reader import ReadStatement
from psqlmessages.pipeline.source_options import SourceOptions

_SIZES: Final = "SELECT messages.sizes(%s, %s)"


class QueueBatchReader(DataSourceReader):
    """Reads all elements of a queue in one snapshot, without taking them."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.column_names(schema, columns.QUEUE_SCHEMA)
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition; raises MessagesError if the queue or permission is missing."""
        with closing(Database(self._options.dsn_options)) as database:
            database.call(_SIZES, (self._options.client, self._options.queue))
        return [InputPartition(self._options.queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the queue, on an executor."""
        statement = (
            f"SELECT {', '.join(self._columns)} FROM messages.peek("  # noqa: S608
            f"{literals.text(self._options.client)}, {literals.text(partition.value)}, NULL,"
            f" {str('body' in self._columns).lower()})"
        )
        statements = [ReadStatement(statement)]
        return reader.read_batches(self._options.dsn_options, statements, self._schema)


_LEASES_PER_CALL: Final = 4096  # The limit of the SQL functions.
# The id of the element, and the secret of its lease.
_LEASE_FORMAT: Final = struct.Struct(">q16s")


def pack_leases(leases: Iterable[str]) -> str:
    """Encode leases ("id.uuid", about 50 characters) as 32 characters each."""
    parts = (lease.partition(".") for lease in leases)
    binary_leases = (_LEASE_FORMAT.pack(int(id_), UUID(secret).bytes) for id_, _, secret in parts)
    return base64.b64encode(b"".join(binary_leases)).decode()


def unpack_leases(text: str) -> list[str]:
    """Decode the result of :func:`pack_leases`."""
    parts = _LEASE_FORMAT.iter_unpack(base64.b64decode(text, validate=True))
    return [f"{id_}.{UUID(bytes=secret)}" for id_, secret in parts]


def split_leases(leases: Sequence[str], size: int = _LEASES_PER_CALL) -> Iterator[Sequence[str]]:
    """Split leases into parts of at most ``size``, by default as many as one call accepts."""
    for first in range(0, len(leases), size):
        yield leases[first : first + size]


_RESERVE: Final = "SELECT lease FROM messages.reserve(%s, %s, %s::int, %s::float8)"
_RENEW: Final = "SELECT count(*) FROM messages.renew(%s, %s, %s::float8, VARIADIC %s::text[])"
_COMMIT: Final = "SELECT messages.commit(%s, VARIADIC %s::text[])"


class QueueLeases:
    """The driver side of a queue stream: reserves elements, renews their leases, commits them.

    If the connection breaks during `reserve`, the new leases may be lost. The elements are then
    available again when these leases expire.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._database = Database(options.dsn_options)
        self._lock = threading.RLock()
        self._leases: Sequence[str] = ()
        self._committed_batch = 0
        self._renewal = RenewalThread(self._renew, options.timeout)

    def available(self) -> int:
        """Return the number of available elements."""
        options = self._options
        answer = self._database.call(_SIZES, (options.client, options.queue))
        return int(answer["Available"])

    def reserve(self, max_count: int) -> list[str]:
        """Reserve up to ``max_count`` elements, oldest first; return their leases."""
        options = self._options
        leases: list[str] = []
        while len(leases) < max_count:
            count = min(_LEASES_PER_CALL, max_count - len(leases))
            arguments = (options.client, options.queue, count, options.timeout)
            rows = self._database.fetch_rows(_RESERVE, arguments)
            leases += [lease for (lease,) in rows]
            if len(rows) < count:
                break
        return leases

    def start_renewing(self, leases: Sequence[str]) -> None:
        """Renew these leases from now on, and stop renewing earlier ones."""
        with self._lock:
            self._leases = leases
        self._renewal.start()

    def commit(self, batch: int, leases: Sequence[str]) -> None:
        """Commit the elements of a batch, unless this instance has committed it before."""
        with self._lock:
            if batch <= self._committed_batch:
                return
            is_first = self._committed_batch == 0
            lost = 0
            for part in split_leases(leases):
                answer = self._database.call(_COMMIT, (self._options.client, list(part)))
                lost += answer["Done"].count(False)
            self._committed_batch, self._leases = batch, ()
        # No warning for the first batch: before a restart, the previous run may have committed it.
        if lost and not is_first:
            logger.warning(
                "%d of %d elements of batch %d could not be committed, because their leases had"
                " expired: they will be read again", lost, len(leases), batch,
            )  # fmt: skip

    def close(self) -> None:
        """Close the connection; elements stay reserved until their leases expire."""
        self._renewal.stop()
        self._database.close()

    def _renew(self) -> None:
        options = self._options
        with self._lock:
            for part in split_leases(self._leases):
                self._database.fetch_rows(
                    _RENEW, (options.client, options.queue, options.timeout, list(part))
                )


# Maximum number of elements of a batch if Spark sets none.
_MAX_ELEMENTS: Final = 1_000_000

# Columns that need SQL other than their name.
_COLUMN_SQL: Final = {"headers": "headers::text AS headers", "state": "'reserved'::text AS state"}


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Takes elements of a queue in batches; commits a batch when Spark has processed it."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._queue = options.queue or ""
        self._columns = columns.column_names(schema, columns.QUEUE_SCHEMA)
        self._schema = schema
        self._remaining: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset before the first batch."""
        return {"batch": 0, "leases": ""}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxRowsPerTrigger."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit the query to as many elements as are available now."""
        self._remaining = self._leases.available()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Commit the previous batch and reserve the next; return ``start`` if there is none."""
        # Spark calls this as soon as a batch is done, but calls commit() only with the next batch.
        self._leases.commit(start["batch"], unpack_leases(start["leases"]))
        max_count = limit.max_rows if isinstance(limit, ReadMaxRows) else _MAX_ELEMENTS
        if self._remaining is not None:
            max_count = min(max_count, self._remaining)
        leases = self._leases.reserve(max_count)
        if not leases:
            return start
        if self._remaining is not None:
            self._remaining -= len(leases)
        self._leases.start_renewing(leases)
        return {"batch": start["batch"] + 1, "leases": pack_leases(leases)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split the elements of a batch into partitions, and renew their leases from now on."""
        if start["batch"] == end["batch"]:
            return []
        leases = unpack_leases(end["leases"])
        # Spark repeats a batch that was running when the query stopped, without latestOffset().
        self._leases.start_renewing(leases)
        size = ceil(len(leases) / self._options.partitions)
        return [InputPartition(part) for part in split_leases(leases, size)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the elements that are still reserved, and renew their leases."""
        leases: Sequence[str] = partition.value
        statements = [ReadStatement(self._statement(part)) for part in split_leases(leases)]
        count = 0
        # A repeated read returns the same elements in the same order, unless a lease has expired.
        for batch in reader.read_batches(
            self._options.dsn_options,
            statements,
            self._schema,
            is_repeatable=True,
            row_count=len(leases),
        ):
            count += batch.num_rows
            yield batch
        if count < len(leases):
            logger.warning(
                "%d of %d elements of queue %s are missing in this batch: their leases had expired",
                len(leases) - count, len(leases), self._queue,
            )  # fmt: skip

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the elements of a batch."""
        self._leases.commit(end["batch"], unpack_leases(end["leases"]))

    def stop(self) -> None:
        """Close the connection."""
        if "_leases" in self.__dict__:
            self._leases.close()

    @cached_property
    def _leases(self) -> QueueLeases:
        # Created on first use: executors have a copy of this reader but take no leases.
        return QueueLeases(self._options)

    def _statement(self, leases: Sequence[str]) -> str:
        queue = literals.text(self._queue)
        column_sql = {**_COLUMN_SQL, "queue": f"{queue}::text AS queue"}
        names = ", ".join(column_sql.get(name, name) for name in self._columns)
        quoted = ", ".join(literals.text(lease) for lease in leases)
        return (
            f"SELECT {names} FROM messages.renew({literals.text(self._options.client)}, {queue},"  # noqa: S608
            f" {self._options.timeout}, VARIADIC ARRAY[{quoted}]::text[])"
        )
