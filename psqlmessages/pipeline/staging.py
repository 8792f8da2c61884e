"""Staging: a task's rows go to messages.staged by COPY, in one transaction: all of them or none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

import pyarrow as pa
from adbc_driver_manager import Error as DriverError
from adbc_driver_postgresql import dbapi

from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline.collecting import spare_what_is_loaded
from psqlmessages.pipeline.dsn import connectable
from psqlmessages.pipeline.waiting import Waiting

# One for each address: the workers of Spark run one task at a time, and are used again. They are
# forked before they run anything, so no other process inherits a connection.
_kept: dict[str, dbapi.Connection] = {}
MOST_KEPT: Final = 4


def stage(dsn: str, batches: Iterator[pa.RecordBatch]) -> int:
    """Copy batches into messages.staged; return the number of bodies, which is committed then.

    No rows: no connection is made. What reading the batches raises comes through, and then nothing
    is staged. A database that is away is waited for, unless it goes amid the copy. Raises
    MessagesError, with what PostgreSQL says.
    """
    first = next(batches, None)
    if first is None:
        return 0
    spare_what_is_loaded()
    address = connectable(dsn)
    source = _Source(chain((first,), batches))
    connection = _connected(address)
    try:
        with connection.cursor() as cursor:
            cursor.adbc_ingest(
                "staged",
                pa.RecordBatchReader.from_batches(first.schema, source),
                mode="append",
                db_schema_name="messages",
            )
        connection.commit()
    except BaseException as error:
        close()
        if source.error is not None:
            # The driver knows it as a text only.
            raise source.error from None
        if isinstance(error, DriverError):
            raise MessagesError(f"the rows cannot be staged: {_sentence(error)}") from error
        raise
    return source.rows


def close() -> None:
    """Close the connections that this process keeps."""
    while _kept:
        _, connection = _kept.popitem()
        connection.close()


class _Source:
    """Batches that count the bodies in them, and remember the error that ended them."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.rows = 0
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise
        self.rows += len(batch.column("bodies").flatten())
        return batch


def _connected(address: str) -> dbapi.Connection:
    """Give the kept connection, where it still answers, or a new one: making one takes 40 ms."""
    connection = _kept.get(address)
    if connection is not None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
                cursor.fetchone()
        except DriverError:
            close()
        else:
            return connection
    if len(_kept) >= MOST_KEPT:
        close()
    # Nothing is read yet, so a database that is away can be waited for.
    waiting = Waiting()
    while True:
        try:
            connection = _kept[address] = dbapi.connect(address)
        except DriverError as error:
            waiting.after(_sentence(error))
        else:
            waiting.over()
            return connection


def _sentence(error: DriverError) -> str:
    """Give the first line of what the driver says, which is PostgreSQL's message."""
    text = str(error).partition("\n")[0]
    return text.rpartition("ERROR:")[2].strip()
