"""Reader: runs statements with ADBC and returns Arrow batches."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import adbc_driver_postgresql
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from psqlmessages.client import calls
from psqlmessages.exceptions import ConnectionLost
from psqlmessages.pipeline.arrow_connections import ArrowConnections, DriverError
from psqlmessages.pipeline.columns import fitted
from psqlmessages.pipeline.database import OutageRetry, connectable, dsn
from psqlmessages.pipeline.errors import ReadBroken

# Garbage collection: Spark's workers run it after each task; exclude the objects of modules.


@cache
def freeze_modules() -> None:
    """Exclude the existing objects of a Spark worker from garbage collection, once per process.

    Nearly all belong to modules and live as long as the process. Scanning them took 40 ms of CPU
    time after each task, in all workers at the same time, while the next stage was running.
    """
    # Only in a worker: Spark forks workers before they run a task.
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()


# Larger batches are slower: batches of 16 MB by a tenth.
_BATCH_BYTES: Final = 1024 * 1024
# A read buffers this much. If it breaks before any of it was returned, it starts again.
_HELD_BYTES: Final = 16 * 1024 * 1024

_OPTIONS: Final = {
    adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)
}

# Called with the JSON result, and whether an earlier attempt has returned rows.
Answered = Callable[[Mapping[str, Any], bool], None]

# Shared by all tasks of a worker, so that a reused worker need not reconnect.
_connections: Final = ArrowConnections()


@dataclass(frozen=True)
class ReadStatement:
    """A query, and the columns that it omits because their value is the same in all rows.

    Columns that are not in the schema come last. ``note`` is called with each batch as read. If
    ``is_returned`` is false, the rows are only passed to ``note``.
    """

    sql: str
    constants: Mapping[str, str | None] = field(default_factory=dict)
    note: Callable[[pa.RecordBatch], None] | None = None
    is_returned: bool = True


def batches(
    address: Mapping[str, str],
    statements: Iterable[ReadStatement],
    schema: StructType,
    *,
    after: tuple[str, Answered] | None = None,
    is_repeatable: bool = False,
    rows: int = 0,
) -> Iterator[pa.RecordBatch]:
    """Read, and cast each batch to the schema.

    Each statement is taken when the previous one has been read. ``after`` is a statement that runs
    at the end and returns JSON as text, and what is called with the result. It runs on executors,
    on the cached connection of the process, and retries if the database is down: the driver has
    reached it before, when it planned the read.

    If the connection breaks, begin again with the first statement and skip the rows already
    returned; raise ReadBroken if this cannot be done. ``is_repeatable``: each attempt returns the
    same rows in the same order. ``rows`` is their number, if known.
    """
    freeze_modules()
    retry = OutageRetry()
    # The schema that Spark expects the batches to have.
    fields = to_arrow_schema(schema, timezone="UTC")
    returned = 0
    while True:
        buffered: list[pa.RecordBatch] = []
        size = 0
        is_resumed = returned > 0
        to_skip = returned
        try:
            for whole in _attempt(address, statements, fields, after, is_resumed=is_resumed):
                batch = whole.slice(to_skip)
                to_skip -= whole.num_rows - batch.num_rows
                if not batch.num_rows:
                    continue
                buffered.append(batch)
                size += batch.nbytes
                if size > _HELD_BYTES:
                    # New rows have arrived: an earlier outage is over, even if this takes long.
                    retry.over()
                    returned += sum(each.num_rows for each in buffered)
                    yield from buffered
                    buffered.clear()
        except ConnectionLost as error:
            if returned and not is_repeatable:
                raise ReadBroken(f"the connection broke while reading: {error.text}") from None
            retry.after(error)
            continue
        retry.over()
        count = returned + sum(each.num_rows for each in buffered)
        if to_skip or (is_resumed and count < rows):
            raise ReadBroken(
                "the connection broke while reading, and rows were removed before it was restored"
            )
        yield from buffered
        return


def _attempt(
    options: Mapping[str, str],
    statements: Iterable[ReadStatement],
    schema: pa.Schema,
    after: tuple[str, Answered] | None,
    *,
    is_resumed: bool,
) -> Iterator[pa.RecordBatch]:
    address = connectable(dsn(options))
    connection = _connections.get(address)
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.adbc_statement.set_options(**_OPTIONS)
                cursor.execute(statement.sql)
                for batch in cursor.fetch_record_batch():
                    if statement.note is not None:
                        statement.note(batch)
                    if statement.is_returned:
                        yield fitted(batch, schema, statement.constants)
            if after is not None:
                sql, answered = after
                cursor.execute(sql)
                (answer,) = cursor.fetchone()
                answered(calls.raise_for_error(json.loads(answer)), is_resumed)
    except DriverError as error:
        raise _connections.failed(address, error) from None
    except OSError as error:
        # Within a result, pyarrow raises OSError for any driver error, with the text only.
        raise _connections.failed_amid(address, error) from None
    except BaseException:
        # Also if Spark stops reading early: the COPY is unfinished.
        _connections.drop(address)
        raise


def disconnect() -> None:
    """Close the cached connections of this process; the next read reconnects."""
    _connections.close()
