"""Staging: tasks copy rows to messages.staged, and one call per batch commits them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final
from uuid import UUID, uuid4

import pyarrow as pa

from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline import literals
from psqlmessages.pipeline.arrow_connections import (
    MAX_CONNECTIONS,
    ArrowConnections,
    DriverError,
    first_line,
)
from psqlmessages.pipeline.database import (
    NO_RETRY,
    TRANSIENT,
    Database,
    OutageRetry,
    add_defaults,
    dsn,
    record_reached,
)
from psqlmessages.pipeline.reader import freeze_modules

# A task copies this much in one transaction, and buffers it so that it can repeat the copy.
_BUFFER_BYTES: Final = 16 * 1024 * 1024

# Safe to share: Spark's workers run one task at a time. Spark reuses them for later tasks.
_connections: Final = ArrowConnections()


def stage(
    options: Mapping[str, str], batches: Iterator[pa.RecordBatch]
) -> tuple[tuple[str, ...], int]:
    """Copy batches into messages.staged; return the names of the rows, and the number of bodies.

    Retries if the database is down. After another error, deletes the staged rows and raises the
    error of reading the batches, or MessagesError with PostgreSQL's message.
    """
    freeze_modules()
    task = _StagingTask(add_defaults(dsn(options)), batches)
    try:
        for batch in batches:
            task.stage_from(batch)
    except BaseException:
        unstage(options, [*task.names, *task.uncertain_names])
        raise
    unstage(options, task.uncertain_names)
    return tuple(task.names), task.rows


def unstage(options: Mapping[str, str], names: Sequence[str]) -> None:
    """Delete staged rows if possible now; otherwise housekeeping deletes them after a day."""
    if not names:
        return
    with suppress(MessagesError, DriverError):
        address = add_defaults(dsn(options))
        OutageRetry(NO_RETRY).call(lambda: _delete_staged(address, names))


def _delete_staged(address: str, names: Sequence[str]) -> None:
    quoted = ", ".join(literals.text(name) for name in names)
    connection = _connections.get(address)
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT messages.unstage({quoted})")
            cursor.fetchall()
    except DriverError as error:
        raise _connections.drop_and_translate(address, error) from None


class _StagingTask:
    """Stages the rows of a task. ``names`` are the names under which it staged them, in order.

    The rows of ``uncertain_names`` may have been staged or not: the connection broke.
    """

    def __init__(self, address: str, batches: Iterator[pa.RecordBatch]) -> None:
        self._address = address
        self._batches = batches
        self._buffer: list[pa.RecordBatch] = []
        self._read_error: BaseException | None = None
        self.names: list[str] = []
        self.uncertain_names: list[str] = []
        self.rows = 0

    def stage_from(self, batch: pa.RecordBatch) -> None:
        """Copy a batch and the batches after it, up to _BUFFER_BYTES, in one transaction."""
        self._buffer = [batch]
        name = OutageRetry().call(self._attempt)
        if self._read_error is not None:
            # Raise the original error: the driver's error has only its text.
            raise self._read_error
        self.names.append(name)
        self.rows += sum(len(batch.column("bodies").flatten()) for batch in self._buffer)

    def _attempt(self) -> str:
        # A new name for each attempt: an earlier attempt may have been committed.
        staging = uuid4()
        connection = _connections.get(self._address)
        schema = _add_name(self._buffer[0], staging).schema
        rows = pa.RecordBatchReader.from_batches(schema, self._batches_to_copy(staging))
        try:
            with connection.cursor() as cursor:
                cursor.adbc_ingest("staged", rows, mode="append", db_schema_name="messages")
        except BaseException as error:
            if self._read_error is not None:
                # Do not retry: `stage_from` raises the error.
                _connections.drop(self._address)
                return ""
            if not isinstance(error, DriverError):
                _connections.drop(self._address)
                raise
            translated = _connections.drop_and_translate(self._address, error)
            if isinstance(translated, TRANSIENT):
                self.uncertain_names.append(str(staging))
                raise translated from None
            text = first_line(error).rpartition("ERROR:")[2].strip()
            raise MessagesError(f"the rows cannot be staged: {text}") from error
        return str(staging)

    def _batches_to_copy(self, staging: UUID) -> Iterator[pa.RecordBatch]:
        """Yield the buffered batches, then more, up to the limit of the buffer."""
        size = 0
        for batch in self._buffer:
            size += batch.nbytes
            yield _add_name(batch, staging)
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
            yield _add_name(batch, staging)


def _add_name(batch: pa.RecordBatch, staging: UUID) -> pa.RecordBatch:
    column = pa.repeat(pa.scalar(staging.bytes, pa.binary()), batch.num_rows)
    return batch.append_column("staging", column)


# How long a permission check is cached. The commit itself checks again.
_CHECK_SECONDS: Final = 60.0

_PUBLISH: Final = "SELECT messages.publish_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_PUSH: Final = "SELECT messages.push_staged(%s, %s, %s, %s, %s::uuid[], %s)"


@dataclass(frozen=True, slots=True)
class SinkDestination:
    """The topic or queue to write to, and the node that writes."""

    name: str
    is_queue: bool
    client: str


# Cached like _connections: Spark also reuses the processes that commit.
_databases: dict[str, Database] = {}
_checked_at: dict[tuple[str, SinkDestination], float] = {}


class StagingClient:
    """Checks and commits staged rows on a cached connection; retries if the database is down."""

    def __init__(self, options: Mapping[str, str], destination: SinkDestination) -> None:
        self._destination = destination
        self._address = add_defaults(dsn(options))
        if self._address not in _databases:
            if len(_databases) >= MAX_CONNECTIONS:
                close()
            _databases[self._address] = Database(options)
        self._database = _databases[self._address]

    def check(self) -> None:
        """Raise MessagesError if the rules do not allow the write."""
        key = (self._address, self._destination)
        if monotonic() - _checked_at.get(key, float("-inf")) < _CHECK_SECONDS:
            return
        self.commit(None, 0, (), 0)
        # Connecting has recorded this too, but the file may have been deleted since.
        record_reached(self._address)
        _checked_at[key] = monotonic()

    def commit(self, query: str | None, batch: int, names: Sequence[str], rows: int) -> None:
        """Commit the staged rows of a batch; if the batch was committed before, only delete them.

        Without ``query``, only checks the permission. Raises MessagesError.
        """
        destination = self._destination
        arguments = (destination.client, destination.name, query, batch, list(names), rows)
        self._database.call(_PUSH if destination.is_queue else _PUBLISH, arguments)


def close() -> None:
    """Close the cached connections of this process, and clear the cache of permission checks."""
    _checked_at.clear()
    _connections.close()
    while _databases:
        _databases.popitem()[1].close()
