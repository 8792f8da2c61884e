"""Streams of queues: elements are reserved, read, and committed with Spark's checkpoint.

An offset stores the leases of its batch, so a batch that is read again after a crash has the same
elements. An element whose lease has expired by then is skipped, and comes in a later batch.
"""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, literals, reader
from psqlmessages.pipeline.database import Database, KeepAliveThread, logger
from psqlmessages.pipeline.reader import ReadStatement
from psqlmessages.pipeline.source_options import SourceOptions

_SIZES: Final = "SELECT messages.sizes(%s, %s)"

# Batch reads of queues: read the elements without taking them.


class QueueBatchReader(DataSourceReader):
    """Reads the elements of a queue at one moment, available or not."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns.chosen(schema, columns.QUEUE)
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition (one snapshot); raises the errors of the queue or permission."""
        with closing(Database(self._options.address)) as database:
            database.ask(_SIZES, (self._options.client, self._options.queue))
        return [InputPartition(self._options.queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the queue, on an executor."""
        statement = (
            f"SELECT {', '.join(self._columns)} FROM messages.peek("  # noqa: S608
            f"{literals.text(self._options.client)}, {literals.text(partition.value)}, NULL,"
            f" {str('body' in self._columns).lower()})"
        )
        return reader.batches(self._options.address, [ReadStatement(statement)], self._schema)


# Leases in an offset: one text, as short as their secrets allow. Pure functions.

_LEASES_PER_CALL: Final = 4096
_FORM: Final = struct.Struct(">q16s")


def packed(leases: Iterable[str]) -> str:
    """Encode leases as 32 characters each; their own form has about 50."""
    parts = (lease.partition(".") for lease in leases)
    packed_leases = (_FORM.pack(int(id_), UUID(secret).bytes) for id_, _, secret in parts)
    return base64.b64encode(b"".join(packed_leases)).decode()


def unpacked(text: str) -> list[str]:
    """Decode the result of :func:`packed`."""
    found = _FORM.iter_unpack(base64.b64decode(text, validate=True))
    return [f"{id_}.{UUID(bytes=secret)}" for id_, secret in found]


def split(leases: Sequence[str], size: int = _LEASES_PER_CALL) -> Iterator[Sequence[str]]:
    """Split leases into parts of at most ``size``, by default those that fit in one call."""
    for first in range(0, len(leases), size):
        yield leases[first : first + size]


# Leases: elements of a stream stay reserved until their batch is committed.

_RESERVE: Final = "SELECT lease FROM messages.reserve(%s, %s, %s::int, %s::float8)"
_RENEW: Final = "SELECT count(*) FROM messages.renew(%s, %s, %s::float8, VARIADIC %s::text[])"
_COMMIT: Final = "SELECT messages.commit(%s, VARIADIC %s::text[])"


class LeaseKeeper:
    """The driver side of a queue stream: takes leases of ``timeout`` seconds and renews them.

    If the connection breaks before a call returns, no one renews the leases that it took: their
    elements become available again after the timeout.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._database = Database(options.address)
        self._lock = threading.RLock()
        self._held: Sequence[str] = ()
        self._settled = 0
        self._keep_alive = KeepAliveThread(self._renew, options.timeout)

    def available(self) -> int:
        """Return the number of available elements."""
        options = self._options
        answer = self._database.ask(_SIZES, (options.client, options.queue))
        return int(answer["Available"])

    def reserve(self, most: int) -> list[str]:
        """Reserve elements, oldest first; return their leases."""
        options = self._options
        taken: list[str] = []
        while len(taken) < most:
            count = min(_LEASES_PER_CALL, most - len(taken))
            rows = self._database.rows(
                _RESERVE, (options.client, options.queue, count, options.timeout)
            )
            taken += [lease for (lease,) in rows]
            if len(rows) < count:
                break
        return taken

    def hold(self, held: Sequence[str]) -> None:
        """Renew these leases from now on instead of the previous ones."""
        with self._lock:
            self._held = held
        self._keep_alive.start()

    def settle(self, batch: int, done: Sequence[str]) -> None:
        """Commit the elements of a batch, unless that was done before."""
        with self._lock:
            if batch <= self._settled:
                return
            is_first = self._settled == 0
            lost = 0
            for some in split(done):
                answer = self._database.ask(_COMMIT, (self._options.client, list(some)))
                lost += answer["Done"].count(False)
            self._settled, self._held = batch, ()
        # After a restart, the previous run may have committed them.
        if lost and not is_first:
            logger.warning(
                "%d of %d elements of batch %d could not be committed, because their leases had"
                " expired: they will be read again", lost, len(done), batch,
            )  # fmt: skip

    def close(self) -> None:
        """Close the connection; elements stay reserved until their leases expire."""
        self._keep_alive.stop()
        self._database.close()

    def _renew(self) -> None:
        options = self._options
        with self._lock:
            for some in split(self._held):
                self._database.rows(
                    _RENEW, (options.client, options.queue, options.timeout, list(some))
                )


# The limit if Spark wants all available elements.
_ALL: Final = 1_000_000

_SPECIAL: Final = {"headers": "headers::text AS headers", "state": "'reserved'::text AS state"}


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Takes elements of a queue in batches, and commits each batch after Spark has."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._queue = options.queue or ""
        self._columns = columns.chosen(schema, columns.QUEUE)
        self._schema = schema
        self._left: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset before the first batch."""
        return {"batch": 0, "leases": ""}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxRowsPerTrigger."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit the query to the elements that are available now."""
        self._left = self._leases.available()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Commit the previous batch and reserve the next; return ``start`` if there is none."""
        # Spark calls this when a batch is done, but calls commit() only with the next batch.
        self._leases.settle(start["batch"], unpacked(start["leases"]))
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else _ALL
        if self._left is not None:
            most = min(most, self._left)
        taken = self._leases.reserve(most)
        if not taken:
            return start
        if self._left is not None:
            self._left -= len(taken)
        self._leases.hold(taken)
        return {"batch": start["batch"] + 1, "leases": packed(taken)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split the elements of a batch into partitions."""
        if start["batch"] == end["batch"]:
            return []
        held = unpacked(end["leases"])
        # This includes a batch that was running when the query stopped.
        self._leases.hold(held)
        size = -(-len(held) // self._options.partitions)
        return [InputPartition(part) for part in split(held, size)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the elements that are still reserved, and renew their leases."""
        held: Sequence[str] = partition.value
        address = self._options.address
        statements = [ReadStatement(self._statement(some)) for some in split(held)]
        count = 0
        # A repeated read returns the elements in the same order, unless a lease has expired.
        for batch in reader.batches(
            address, statements, self._schema, is_repeatable=True, rows=len(held)
        ):
            count += batch.num_rows
            yield batch
        if count < len(held):
            logger.warning(
                "%d of %d elements of queue %s are missing in this batch: their leases had expired",
                len(held) - count, len(held), self._queue,
            )  # fmt: skip

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the elements of a batch."""
        self._leases.settle(end["batch"], unpacked(end["leases"]))

    def stop(self) -> None:
        """Close the connection."""
        if "_leases" in self.__dict__:
            self._leases.close()

    @cached_property
    def _leases(self) -> LeaseKeeper:
        # Created late: executors have a copy of this reader but take no leases.
        return LeaseKeeper(self._options)

    def _statement(self, held: Sequence[str]) -> str:
        queue = literals.text(self._queue)
        special = {**_SPECIAL, "queue": f"{queue}::text AS queue"}
        names = ", ".join(special.get(name, name) for name in self._columns)
        quoted = ", ".join(literals.text(lease) for lease in held)
        return (
            f"SELECT {names} FROM messages.renew({literals.text(self._options.client)}, {queue},"  # noqa: S608
            f" {self._options.timeout}, VARIADIC ARRAY[{quoted}]::text[])"
        )
