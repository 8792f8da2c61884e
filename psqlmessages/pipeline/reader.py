"""Reader: statements run with ADBC, as Arrow batches."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from pyspark import TaskContext

from psqlmessages.client import calls
from psqlmessages.exceptions import ConnectionLost
from psqlmessages.pipeline.arrow_connections import ArrowConnections, DriverError
from psqlmessages.pipeline.columns import fitted
from psqlmessages.pipeline.database import OutageRetry, connectable, dsn
from psqlmessages.pipeline.errors import ReadBroken

# Collecting: Spark's workers look through all objects for garbage after each task; not ours.


@cache
def spare_what_is_loaded() -> None:
    """Let collections pass over the objects that this worker has by now; once, and only there.

    Nearly all belong to modules, and stay. Looking at them took 40 ms of processor time after each
    task, in all workers at once, while the next stage was running.
    """
    # Workers are forked before they run anything: elsewhere this is not a process of Spark's.
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()


# Larger batches are slower: 16 MB ones by a tenth.
_BATCH_BYTES: Final = 1024 * 1024
# A read buffers this much. One that breaks before it has returned any of it begins again.
_HELD_BYTES: Final = 16 * 1024 * 1024

_ROWS_WENT: Final = (
    "the connection broke in a read, and rows that it had to read were removed before it was back"
)
_OPTIONS: Final = {
    adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)
}

# Called with the answer, and whether an earlier attempt has returned rows.
Answered = Callable[[Mapping[str, Any], bool], None]

# A reused worker need not connect for each task.
_connections: Final = ArrowConnections()


@dataclass(frozen=True)
class ReadStatement:
    """A query, and the columns that it leaves out since all of its rows have the same there.

    Columns that the schema does not have come last. ``note`` is called with each batch as read.
    ``is_returned``: its rows belong to what is read; else they are only noted.
    """

    sql: str
    constants: Mapping[str, str | None] = field(default_factory=dict)
    note: Callable[[pa.RecordBatch], None] | None = None
    is_returned: bool = True


@dataclass(frozen=True)
class Read:
    """What to read: statements, each taken when the one before has been read.

    If a read begins again, it begins with the first one. ``after`` is a statement that runs when
    all is read, and answers JSON as text. ``is_repeatable``: each read returns the same rows in the
    same order, and ``rows`` of them, if that is known.
    """

    statements: Iterable[ReadStatement]
    after: str | None = None
    is_repeatable: bool = False
    rows: int | None = None


class RangeReader:
    """Runs reads on the cached connection of its process, and waits for a database that is away.

    It runs on executors: their driver has reached the database when it planned the read.
    """

    def __init__(self, address: Mapping[str, str]) -> None:
        self._address = address
        self._waiting = OutageRetry()

    def batches(
        self, read: Read, schema: pa.Schema, answered: Answered | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read, and cast each batch; call ``answered`` with the answer of ``read.after``.

        If the connection breaks, the read begins again and skips the rows that it has returned.
        Raises ReadBroken if it has returned rows and is not repeatable.
        """
        spare_what_is_loaded()
        handed = 0
        while True:
            held: list[pa.RecordBatch] = []
            size = 0
            is_resumed = handed > 0
            try:
                for batch in self._rest(read, schema, answered, handed):
                    held.append(batch)
                    size += batch.nbytes
                    if size > _HELD_BYTES:
                        # Rows that are new: an earlier failure is over, however long this takes.
                        self._waiting.over()
                        handed += sum(one.num_rows for one in held)
                        yield from held
                        held.clear()
            except ConnectionLost as error:
                if handed and not read.is_repeatable:
                    raise ReadBroken(f"the connection broke in a read: {error.text}") from None
                self._waiting.after(error)
                continue
            self._waiting.over()
            count = handed + sum(one.num_rows for one in held)
            if is_resumed and read.rows is not None and count < read.rows:
                raise ReadBroken(_ROWS_WENT)
            yield from held
            return

    def _rest(
        self, read: Read, schema: pa.Schema, answered: Answered | None, handed: int
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows that follow those already returned."""
        left = handed
        for batch in self._attempt(read, schema, answered, is_resumed=handed > 0):
            if left < batch.num_rows:
                yield batch.slice(left)
            left = max(0, left - batch.num_rows)
        if left:
            raise ReadBroken(_ROWS_WENT)

    def _attempt(
        self, read: Read, schema: pa.Schema, answered: Answered | None, *, is_resumed: bool
    ) -> Iterator[pa.RecordBatch]:
        address = connectable(dsn(self._address))
        connection = _connections.get(address)
        is_whole = False
        try:
            with connection.cursor() as cursor:
                yield from _rows(cursor, read, schema)
                if read.after is not None and answered is not None:
                    answered(calls.raise_for_error(_answer(cursor, read.after)), is_resumed)
            is_whole = True
        except DriverError as error:
            raise _connections.failed(address, error) from None
        except OSError as error:
            # Within a result pyarrow raises it for every error of the driver, with the text only.
            raise _connections.failed_amid(address, error) from None
        finally:
            # Also if Spark wants no more rows: the COPY is unfinished.
            if not is_whole:
                _connections.drop(address)


def _rows(cursor: dbapi.Cursor, read: Read, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for statement in read.statements:
        cursor.adbc_statement.set_options(**_OPTIONS)
        cursor.execute(statement.sql)
        for batch in cursor.fetch_record_batch():
            if statement.note is not None:
                statement.note(batch)
            if statement.is_returned:
                yield fitted(batch, schema, statement.constants)


def _answer(cursor: dbapi.Cursor, statement: str) -> Any:
    cursor.execute(statement)
    row = cursor.fetchone()
    return json.loads(row[0]) if row else None


def disconnect() -> None:
    """Close the connections that this process keeps; whoever reads on connects again."""
    _connections.close()
