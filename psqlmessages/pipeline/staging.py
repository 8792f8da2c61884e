"""Staging: tasks COPY rows to messages.staged, and one call commits them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final
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
from psqlmessages.pipeline.database import PASSING, Database, OutageRetry, connectable, dsn
from psqlmessages.pipeline.reader import spare_what_is_loaded

__all__ = ["MOST_KEPT", "Stagings", "close", "context"]

# A task buffers this much until it is committed, so that it can copy it again.
_HELD_BYTES: Final = 16 * 1024 * 1024

# Spark's workers run one task at a time, and are reused.
_connections: Final = ArrowConnections()


@dataclass(frozen=True, slots=True)
class Stagings:
    """The names under which a task has staged rows, in order, and the number of bodies."""

    names: tuple[str, ...]
    rows: int


def context(dsn: str, batches: Iterator[pa.RecordBatch]) -> Stagings:
    """Copy batches into messages.staged.

    Does not connect if there are no rows. Retries if the database is down, also between rows. If
    reading the batches raises an error, deletes the rows staged before and raises that error.
    Raises MessagesError with PostgreSQL's message.
    """
    spare_what_is_loaded()
    task = _Task(connectable(dsn), batches)
    try:
        while task.has_more():
            task.stage_some()
    except BaseException:
        task.unstage([*task.names, *task.abandoned])
        raise
    # The connection broke before the answer, so these may or may not be staged.
    task.unstage(task.abandoned)
    return Stagings(tuple(task.names), task.rows)


def close() -> None:
    """Close the cached connections of this process."""
    _connections.close()


class _Task:
    """The rows of a task, and the names under which they were staged."""

    def __init__(self, address: str, batches: Iterator[pa.RecordBatch]) -> None:
        self._address = address
        self._batches = batches
        self._held: list[pa.RecordBatch] = []
        self._error: BaseException | None = None
        self.names: list[str] = []
        self.abandoned: list[str] = []
        self.rows = 0

    def has_more(self) -> bool:
        """Read the next batch; return False if there is none."""
        self._held = list(_first_of(self._batches))
        return bool(self._held)

    def stage_some(self) -> None:
        """Copy the buffered batches and more, up to the limit, in one transaction."""
        name = OutageRetry().call(self._attempt)
        if self._error is not None:
            # The driver's error has only its text.
            raise self._error
        self.names.append(name)
        self.rows += sum(len(batch.column("bodies").flatten()) for batch in self._held)

    def unstage(self, names: list[str]) -> None:
        """Delete rows if possible now; otherwise housekeeping deletes them after a day."""
        if names:
            quoted = ", ".join(literals.text(name) for name in names)
            with suppress(MessagesError, DriverError):
                connection = _connections.get(self._address)
                with connection.cursor() as cursor:
                    cursor.execute(f"SELECT messages.unstage({quoted})")
                    cursor.fetchall()

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
            if isinstance(found, PASSING):
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


def _first_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        return


def _named(batch: pa.RecordBatch, staging: UUID) -> pa.RecordBatch:
    column = pa.repeat(pa.scalar(staging.bytes, pa.binary()), batch.num_rows)
    return batch.append_column("staging", column)


# Committing: one call moves staged rows to a topic or queue, once per batch of a query.

# How long a permission check is cached. The commit itself checks again.
BELIEVED_SECONDS: Final = 60.0

_PUBLISH: Final = "SELECT messages.publish_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_PUSH: Final = "SELECT messages.push_staged(%s, %s, %s, %s, %s::uuid[], %s)"
_UNSTAGE: Final = "SELECT messages.unstage(VARIADIC %s::text[])"


@dataclass(frozen=True, slots=True)
class SinkDestination:
    """The topic or queue to write to, and the node that writes."""

    name: str
    is_queue: bool
    client: str

    @property
    def kind(self) -> str:
        """The kind of destination: "queue" or "topic"."""
        return "queue" if self.is_queue else "topic"


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """A batch of a query to commit once, and the names of its staged rows, in order."""

    query: str
    number: int
    stagings: tuple[str, ...]
    rows: int


# Cached per process as for staging: Spark reuses its planning processes too.
_kept: dict[str, Database] = {}
_believed: dict[tuple[str, SinkDestination], float] = {}


class StagingClient:
    """Calls the SQL functions that check, commit and delete staged rows, on a cached connection.

    Each call retries if the database is down, in any process.
    """

    def __init__(self, options: Mapping[str, str], destination: SinkDestination) -> None:
        self.destination = destination
        self._options = options
        self._address = connectable(dsn(options))

    def check(self) -> None:
        """Raise MessagesError if the rules do not allow the write, before anything is staged."""
        believed = (self._address, self.destination)
        if monotonic() - _believed.get(believed, float("-inf")) < BELIEVED_SECONDS:
            return
        self._database.ask(self._statement, self._arguments(None))
        self._database.note_reached()
        _believed[believed] = monotonic()

    def commit(self, batch: CommitBatch) -> None:
        """Commit a batch; if it was committed before, only delete its staged rows.

        If the connection breaks, the result is unknown. The call is then repeated until the outage
        timeout, and does nothing if an earlier attempt has committed. Raises MessagesError.
        """
        self._database.ask(self._statement, self._arguments(batch))

    def unstage(self, stagings: Sequence[str]) -> None:
        """Delete staged rows. If that fails, housekeeping deletes them after a day."""
        if stagings:
            self._database.ask(_UNSTAGE, (list(stagings),))

    @property
    def _statement(self) -> str:
        return _PUSH if self.destination.is_queue else _PUBLISH

    def _arguments(self, batch: CommitBatch | None) -> tuple[Any, ...]:
        names = (self.destination.client, self.destination.name)
        if batch is None:
            return (*names, None, 0, [], 0)
        return (*names, batch.query, batch.number, list(batch.stagings), batch.rows)

    @property
    def _database(self) -> Database:
        if self._address not in _kept:
            if len(_kept) >= MOST_KEPT:
                _disconnect()
            _kept[self._address] = Database(self._options)
        return _kept[self._address]


def close_clients() -> None:
    """Close the cached connections of this process, and clear the cache of permission checks."""
    _believed.clear()
    _disconnect()


def _disconnect() -> None:
    while _kept:
        _, database = _kept.popitem()
        database.close()
