"""Staging: tasks COPY rows to messages.staged, and one call commits them."""

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
    MOST_KEPT,
    ArrowConnections,
    DriverError,
    sentence,
)
from psqlmessages.pipeline.database import (
    NO_RETRY,
    TRANSIENT,
    Database,
    OutageRetry,
    connectable,
    dsn,
    note_reached,
)
from psqlmessages.pipeline.reader import freeze_modules

# A task buffers this much until it is committed, so that it can copy it again.
_HELD_BYTES: Final = 16 * 1024 * 1024

# Spark's workers run one task at a time, and are reused.
_connections: Final = ArrowConnections()


def stage(
    options: Mapping[str, str], batches: Iterator[pa.RecordBatch]
) -> tuple[tuple[str, ...], int]:
    """Copy batches into messages.staged; return the names of the rows, and the number of bodies.

    Does not connect if there are no rows. Retries if the database is down, also between rows. If
    reading the batches raises an error, deletes the rows staged before and raises that error.
    Raises MessagesError with PostgreSQL's message.
    """
    freeze_modules()
    task = _Task(connectable(dsn(options)), batches)
    try:
        for batch in batches:
            task.stage_from(batch)
    except BaseException:
        unstage(options, [*task.names, *task.abandoned])
        raise
    # The connection broke before the answer, so these may or may not be staged.
    unstage(options, task.abandoned)
    return tuple(task.names), task.rows


def unstage(options: Mapping[str, str], names: Sequence[str]) -> None:
    """Delete staged rows if possible now; otherwise housekeeping deletes them after a day."""
    if not names:
        return
    quoted = ", ".join(literals.text(name) for name in names)

    def attempt() -> None:
        connection = _connections.get(address)
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT messages.unstage({quoted})")
                cursor.fetchall()
        except DriverError as error:
            raise _connections.failed(address, error) from None

    with suppress(MessagesError, DriverError):
        address = connectable(dsn(options))
        OutageRetry(NO_RETRY).call(attempt)


class _Task:
    """The rows of a task, and the names under which they were staged, in order."""

    def __init__(self, address: str, batches: Iterator[pa.RecordBatch]) -> None:
        self._address = address
        self._batches = batches
        self._held: list[pa.RecordBatch] = []
        self._error: BaseException | None = None
        self.names: list[str] = []
        self.abandoned: list[str] = []
        self.rows = 0

    def stage_from(self, batch: pa.RecordBatch) -> None:
        """Copy a batch and those after it, up to the limit, in one transaction."""
        self._held = [batch]
        name = OutageRetry().call(self._attempt)
        if self._error is not None:
            # The driver's error has only its text.
            raise self._error
        self.names.append(name)
        self.rows += sum(len(batch.column("bodies").flatten()) for batch in self._held)

    def _attempt(self) -> str:
        # A new name for each attempt: one whose connection broke may have been committed.
        staging = uuid4()
        connection = _connections.get(self._address)
        try:
            with connection.cursor() as cursor:
                cursor.adbc_ingest(
                    "staged",
                    pa.RecordBatchReader.from_batches(
                        _named(self._held[0], staging).schema, self._some(staging)
                    ),
                    mode="append",
                    db_schema_name="messages",
                )
        except BaseException as error:
            if self._error is not None or not isinstance(error, DriverError):
                _connections.drop(self._address)
            if self._error is not None:
                return ""
            if not isinstance(error, DriverError):
                raise
            found = _connections.failed(self._address, error)
            if isinstance(found, TRANSIENT):
                self.abandoned.append(str(staging))
                raise found from None
            text = sentence(error).rpartition("ERROR:")[2].strip()
            raise MessagesError(f"the rows cannot be staged: {text}") from error
        return str(staging)

    def _some(self, staging: UUID) -> Iterator[pa.RecordBatch]:
        """Yield the batches that earlier attempts have read, then more, up to the limit."""
        size = 0
        for batch in self._held:
            size += batch.nbytes
            yield _named(batch, staging)
        while size < _HELD_BYTES:
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            except BaseException as error:
                self._error = error
                raise
            self._held.append(batch)
            size += batch.nbytes
            yield _named(batch, staging)


def _named(batch: pa.RecordBatch, staging: UUID) -> pa.RecordBatch:
    column = pa.repeat(pa.scalar(staging.bytes, pa.binary()), batch.num_rows)
    return batch.append_column("staging", column)


# Committing: one call moves staged rows to a topic or queue, once per batch of a query.

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


# Cached per process as for staging: Spark reuses its planning processes too.
_databases: dict[str, Database] = {}
_checked_at: dict[tuple[str, SinkDestination], float] = {}


class StagingClient:
    """Calls the SQL functions that check and commit staged rows, on a cached connection.

    Each call retries if the database is down, in any process.
    """

    def __init__(self, options: Mapping[str, str], destination: SinkDestination) -> None:
        self._destination = destination
        self._address = connectable(dsn(options))
        if self._address not in _databases:
            if len(_databases) >= MOST_KEPT:
                close()
            _databases[self._address] = Database(options)
        self._database = _databases[self._address]

    def check(self) -> None:
        """Raise MessagesError if the rules do not allow the write, before anything is staged."""
        key = (self._address, self._destination)
        if monotonic() - _checked_at.get(key, float("-inf")) < _CHECK_SECONDS:
            return
        self._call(None, 0, (), 0)
        # Again: the file may have been cleaned up since.
        note_reached(self._address)
        _checked_at[key] = monotonic()

    def commit(self, query: str, number: int, names: Sequence[str], rows: int) -> None:
        """Commit the staged rows of a batch; if that was done before, only delete them.

        If the connection breaks, the result is unknown. The call is then repeated until the outage
        timeout, and does nothing if an earlier attempt has committed. Raises MessagesError.
        """
        self._call(query, number, names, rows)

    def _call(self, query: str | None, number: int, names: Sequence[str], rows: int) -> None:
        to = self._destination
        arguments = (to.client, to.name, query, number, list(names), rows)
        self._database.ask(_PUSH if to.is_queue else _PUBLISH, arguments)


def close() -> None:
    """Close the cached connections of this process, and clear the cache of permission checks."""
    _checked_at.clear()
    _connections.close()
    while _databases:
        _databases.popitem()[1].close()
