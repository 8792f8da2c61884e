"""Staging: tasks copy rows to messages.staged, and one call per batch commits them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa

from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline import literals
from psqlmessages.pipeline.arrow_connections import (
    ArrowConnections,
    DriverError,
    error_text,
    is_full,
)
from psqlmessages.pipeline.database import (
    NO_RETRY,
    TRANSIENT,
    Database,
    OutageRetry,
    add_defaults,
    dsn,
    record_reached_address,
)
from psqlmessages.pipeline.reader import exclude_modules_from_gc

# A task copies about this size in one transaction. It buffers these rows to repeat a failed copy.
_BUFFER_BYTES: Final = 16 * 1024 * 1024

# Shared by the tasks of a worker: Spark reuses a worker, and runs one task at a time in the worker.
_connections: Final = ArrowConnections()


def stage(
    options: Mapping[str, str], batches: Iterator[pa.RecordBatch]
) -> tuple[tuple[str, ...], int]:
    """Copy batches into messages.staged; return the staging ids, and the number of bodies.

    Retries if the database is down. If ``batches`` raises an error, or the copy raises
    MessagesError, calls `unstage`.
    """
    exclude_modules_from_gc()
    task = _StagingTask(add_defaults(dsn(options)), batches)
    try:
        for batch in batches:
            task.stage_from(batch)
    except BaseException:
        unstage(options, [*task.staging_ids, *task.uncertain_ids])
        raise
    unstage(options, task.uncertain_ids)
    return tuple(task.staging_ids), task.rows


def unstage(options: Mapping[str, str], staging_ids: Sequence[str]) -> None:
    """Try once to delete staged rows. If this fails, housekeeping deletes them after a day."""
    if not staging_ids:
        return
    with suppress(MessagesError, psycopg.Error, DriverError):
        address = add_defaults(dsn(options))
        OutageRetry(NO_RETRY).call(lambda: _delete_staged(address, staging_ids))


def _delete_staged(address: str, staging_ids: Sequence[str]) -> None:
    quoted = ", ".join(literals.text(staging_id) for staging_id in staging_ids)
    connection = _connections.get(address)
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT messages.unstage({quoted})")
            cursor.fetchall()
    except DriverError as error:
        raise _connections.drop_and_translate(address, error) from None


class _StagingTask:
    """Stages the rows of a task, with a new staging id for each transaction.

    ``staging_ids`` are the ids of committed transactions, in order. ``uncertain_ids`` are the ids
    of transactions that failed with an error of TRANSIENT: they may be committed.
    """

    def __init__(self, address: str, batches: Iterator[pa.RecordBatch]) -> None:
        self._address = address
        self._batches = batches
        self._buffer: list[pa.RecordBatch] = []
        self._read_error: BaseException | None = None
        self.staging_ids: list[str] = []
        self.uncertain_ids: list[str] = []
        self.rows = 0

    def stage_from(self, batch: pa.RecordBatch) -> None:
        """Copy a batch and the next ones, until they exceed _BUFFER_BYTES, in one transaction."""
        self._buffer = [batch]
        staging_id = OutageRetry().call(self._attempt)
        if self._read_error is not None:
            # Raise the original error: the driver's error has only its text.
            raise self._read_error
        self.staging_ids.append(staging_id)
        self.rows += sum(len(batch.column("bodies").flatten()) for batch in self._buffer)

    def _attempt(self) -> str:
        # A new id for each attempt: an earlier attempt may have been committed.
        staging_id = uuid4()
        connection = _connections.get(self._address)
        schema = _add_staging_id(self._buffer[0], staging_id).schema
        rows = pa.RecordBatchReader.from_batches(schema, self._batches_to_copy(staging_id))
        try:
            with connection.cursor() as cursor:
                cursor.adbc_ingest("staged", rows, mode="append", db_schema_name="messages")
        except BaseException as error:
            if self._read_error is not None:
                # Reading `_batches` failed. An exception might cause a retry, so return:
                # `stage_from` raises the error.
                _connections.drop(self._address)
                return ""
            if not isinstance(error, DriverError):
                _connections.drop(self._address)
                raise
            translated = _connections.drop_and_translate(self._address, error)
            if isinstance(translated, TRANSIENT):
                self.uncertain_ids.append(str(staging_id))
                raise translated from None
            raise MessagesError(f"the rows cannot be staged: {error_text(error)}") from error
        return str(staging_id)

    def _batches_to_copy(self, staging_id: UUID) -> Iterator[pa.RecordBatch]:
        """Yield the buffered batches, then buffer and yield more, until the buffer is full."""
        size = 0
        for batch in self._buffer:
            size += batch.nbytes
            yield _add_staging_id(batch, staging_id)
        while size < _BUFFER_BYTES:
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            except BaseException as error:
                self._read_error = error
                raise
            self._buffer.append(batch)
            size += batch.nbytes
            yield _add_staging_id(batch, staging_id)


def _add_staging_id(batch: pa.RecordBatch, staging_id: UUID) -> pa.RecordBatch:
    column = pa.repeat(pa.scalar(staging_id.bytes, pa.binary()), batch.num_rows)
    return batch.append_column("staging", column)


# How long a successful permission check is cached. The commit itself checks again.
_CHECK_SECONDS: Final = 60.0

_PUBLISH: Final = "SELECT messages.publish_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_PUSH: Final = "SELECT messages.push_staged(%s, %s, %s, %s, %s::uuid[], %s)"


@dataclass(frozen=True, slots=True)
class SinkDestination:
    """The topic or queue to write to, and the node that writes."""

    name: str
    is_queue: bool
    client: str


# Databases by process and address, as in _connections: Spark also reuses processes that commit.
_databases: dict[tuple[int, str], Database] = {}
_checked_at: dict[tuple[str, SinkDestination], float] = {}


class StagingClient:
    """Checks permissions and commits staged rows, on a cached connection; retries in an outage."""

    def __init__(self, options: Mapping[str, str], destination: SinkDestination) -> None:
        self._destination = destination
        self._address = add_defaults(dsn(options))
        key = (os.getpid(), self._address)
        if key not in _databases:
            if is_full(_databases):
                close()
            _databases[key] = Database(options)
        self._database = _databases[key]

    def check(self) -> None:
        """Raise MessagesError unless the rules allow the write; do not check again for a minute."""
        key = (self._address, self._destination)
        if monotonic() - _checked_at.get(key, float("-inf")) < _CHECK_SECONDS:
            return
        self.commit(None, 0, (), 0)
        # A new connection records the address too, but its file may have been deleted since.
        record_reached_address(self._address)
        _checked_at[key] = monotonic()

    def commit(self, query: str | None, batch: int, staging_ids: Sequence[str], rows: int) -> None:
        """Commit the staged rows of a batch; if the batch is committed already, only delete them.

        ``rows`` counts bodies. Without ``query``, only checks the permission. Raises MessagesError.
        """
        destination = self._destination
        arguments = (destination.client, destination.name, query, batch, list(staging_ids), rows)
        self._database.call(_PUSH if destination.is_queue else _PUBLISH, arguments)


def close() -> None:
    """Close the cached connections of this process, and clear the cache of permission checks."""
    _checked_at.clear()
    _connections.close()
    for pid, address in list(_databases):
        if pid == os.getpid():
            _databases.pop((pid, address)).close()
