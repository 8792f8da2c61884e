"""Streams of queues: elements are reserved, read, and committed with Spark's checkpoint.

An offset holds the leases of its batch: a batch that is read again after a crash has the same
elements. One whose lease was lost meanwhile is left out, and comes again in another batch.
"""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from psqlmessages.pipeline import columns, literals
from psqlmessages.pipeline.database import Database, KeepAliveThread, logger
from psqlmessages.pipeline.reader import RangeReader, Read, ReadStatement
from psqlmessages.pipeline.source_options import SourceOptions

# Batch reads of queues: a look at their elements, which stay as they are.


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
        reader = RangeReader(self._options.address)
        return reader.batches(Read((ReadStatement(statement),)), columns.arrow_schema(self._schema))


# Leases as an offset holds them: one text, as short as their secrets allow. Pure functions.

# That many a call takes.
MOST: Final = 4096

_FORM: Final = struct.Struct(">q16s")


def packed(leases: Iterable[str]) -> str:
    """Write leases as 32 characters each, where their own form has some 50."""
    return base64.b64encode(b"".join(_FORM.pack(*_parts(lease)) for lease in leases)).decode()


def unpacked(text: str) -> list[str]:
    """Read what :func:`packed` wrote."""
    found = _FORM.iter_unpack(base64.b64decode(text, validate=True))
    return [f"{id_}.{UUID(bytes=secret)}" for id_, secret in found]


def in_calls(leases: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut leases into as many as one call takes."""
    for first in range(0, len(leases), MOST):
        yield leases[first : first + MOST]


def in_parts(leases: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Cut leases into parts of about equal size, none of them empty."""
    size = -(-len(leases) // max(1, parts))
    return [leases[first : first + size] for first in range(0, len(leases), size or 1)]


def _parts(lease: str) -> tuple[int, bytes]:
    id_, _, secret = lease.partition(".")
    return int(id_), UUID(secret).bytes


# Holding: a stream's elements, reserved until the batch they are read in is committed.

_RESERVE: Final = "SELECT lease FROM messages.reserve(%s, %s, %s::int, %s::float8)"
_RENEW: Final = "SELECT count(*) FROM messages.renew(%s, %s, %s::float8, VARIADIC %s::text[])"
_COMMIT: Final = "SELECT messages.commit(%s, VARIADIC %s::text[])"


class LeaseKeeper:
    """The driver's side of a stream of a queue. Leases last ``timeout`` seconds, and are renewed.

    A call whose answer was lost with the connection leaves elements that nobody holds: they can be
    taken again when the timeout is over.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._database = Database(options.address)
        self._lock = threading.RLock()
        self._held: Sequence[str] = ()
        self._settled = 0
        self._pinging = KeepAliveThread(self._renew, options.timeout)

    def available(self) -> int:
        """Return how many elements can be taken now."""
        options = self._options
        answer = self._database.ask(
            "SELECT messages.sizes(%s, %s)", (options.client, options.queue)
        )
        return int(answer["Available"])

    def reserve(self, most: int) -> list[str]:
        """Reserve elements, the oldest first; their leases."""
        options = self._options
        taken: list[str] = []
        while len(taken) < most:
            count = min(MOST, most - len(taken))
            rows = self._database.rows(
                _RESERVE, (options.client, options.queue, count, options.timeout)
            )
            taken += [lease for (lease,) in rows]
            if len(rows) < count:
                break
        return taken

    def hold(self, held: Sequence[str]) -> None:
        """Renew these leases from now on, in place of others."""
        with self._lock:
            self._held = held
        self._pinging.start()

    def settle(self, batch: int, done: Sequence[str]) -> None:
        """Commit the elements of a batch, where that was not done yet."""
        with self._lock:
            if batch <= self._settled:
                return
            is_first = self._settled == 0
            lost = 0
            for some in in_calls(done):
                answer = self._database.ask(_COMMIT, (self._options.client, list(some)))
                lost += answer["Done"].count(False)
            self._settled, self._held = batch, ()
        # After a restart they may have been committed by the run before.
        if lost and not is_first:
            logger.warning(
                "%d of %d elements of batch %d were lost to it before they could be committed:"
                " they are read once more",
                lost,
                len(done),
                batch,
            )

    def close(self) -> None:
        """Disconnect; what is held stays so until its lease ends."""
        self._pinging.stop()
        self._database.close()

    def _renew(self) -> None:
        options = self._options
        with self._lock:
            for some in in_calls(self._held):
                self._database.rows(
                    _RENEW, (options.client, options.queue, options.timeout, list(some))
                )


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
        self._holding: LeaseKeeper | None = None
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
        holding.settle(start["batch"], unpacked(start["leases"]))
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else _ALL
        if self._left is not None:
            most = min(most, self._left)
        taken = holding.reserve(most)
        if not taken:
            return start
        if self._left is not None:
            self._left -= len(taken)
        holding.hold(taken)
        return {"batch": start["batch"] + 1, "leases": packed(taken)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share out the elements of a batch."""
        if start["batch"] == end["batch"]:
            return []
        held = unpacked(end["leases"])
        # Also those of a batch that was under way when the query ended.
        self._hold().hold(held)
        return [InputPartition(part) for part in in_parts(held, self._options.partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the elements that are still held, and hold them for another timeout."""
        held: Sequence[str] = partition.value
        statements = tuple(ReadStatement(self._statement(some)) for some in in_calls(held))
        # Read again, elements come in the same order, unless a lease was lost meanwhile.
        read = Read(statements, is_repeatable=True, rows=len(held))
        reader = RangeReader(self._options.address)
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
        self._hold().settle(end["batch"], unpacked(end["leases"]))

    def stop(self) -> None:
        """Disconnect."""
        if self._holding is not None:
            self._holding.close()

    def _hold(self) -> LeaseKeeper:
        # Late: executors have a copy of this reader, and hold nothing.
        if self._holding is None:
            self._holding = LeaseKeeper(self._options)
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
