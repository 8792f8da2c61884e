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
from psqlmessages.pipeline.arrow_connections import ArrowConnections, DriverError
from psqlmessages.pipeline.columns import cast_batch
from psqlmessages.pipeline.database import TRANSIENT, OutageRetry, add_defaults, dsn
from psqlmessages.pipeline.errors import ReadBroken


@cache
def exclude_modules_from_gc() -> None:
    """Exclude the existing objects of a Spark worker from garbage collection, once per process.

    Spark collects garbage after each task. Nearly all objects belong to modules, and scanning them
    took 40 ms of CPU time in each worker, while the next stage was running.
    """
    # Spark's process that forks the workers has no task: exclude nothing there.
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()


# Size of the batches that ADBC returns. Larger batches are slower: those of 16 MB by a tenth.
_BATCH_BYTES: Final = 1024 * 1024
# Rows are buffered, and returned when the buffer exceeds this size. While no row has been returned,
# every read can be repeated, also without `is_repeatable`.
_BUFFER_BYTES: Final = 16 * 1024 * 1024

_STATEMENT_OPTIONS: Final = {
    adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)
}

# Arguments: the JSON result, and whether an earlier attempt of the read has returned rows.
OnResult = Callable[[Mapping[str, Any], bool], None]

# Shared by all tasks of a worker, which Spark reuses.
_connections: Final = ArrowConnections()


@dataclass(frozen=True)
class ReadStatement:
    """A query. ``constants`` are columns that the query omits, each with its value in all rows.

    ``sql`` selects the other columns of the reader's schema first, and columns that are not in the
    schema last. ``on_batch`` gets each batch before the cast. If ``is_internal``, the reader does
    not return the rows.
    """

    sql: str
    constants: Mapping[str, str | None] = field(default_factory=dict)
    on_batch: Callable[[pa.RecordBatch], None] | None = None
    is_internal: bool = False


def read_batches(
    dsn_options: Mapping[str, str],
    statements: Iterable[ReadStatement],
    schema: StructType,
    *,
    final_query: tuple[str, OnResult] | None = None,
    is_repeatable: bool = False,
    row_count: int = 0,
) -> Iterator[pa.RecordBatch]:
    """Run statements on an executor; yield their rows in batches, cast to the schema.

    Takes each statement from the iterator after reading the rows of the previous one. Runs
    ``final_query`` last: its SQL returns JSON as text, and its function gets the parsed JSON.

    After an error of TRANSIENT, retries all statements, and skips the rows already returned. If
    errors last longer than OUTAGE_TIMEOUT, raises ServerUnreachable, or the error itself if it is
    one of CONFLICTS.

    If rows were returned before the error, raises ReadBroken if ``is_repeatable`` is false: only a
    repeatable read returns the same rows in the same order. Also raises ReadBroken if the retry
    returns fewer rows than before, or fewer than ``row_count`` (0: unknown).
    """
    exclude_modules_from_gc()
    retry = OutageRetry()
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    returned = 0
    while True:
        buffered: list[pa.RecordBatch] = []
        size = 0
        is_resumed = returned > 0
        to_skip = returned
        try:
            for received in _read_once(
                dsn_options, statements, arrow_schema, final_query, is_resumed=is_resumed
            ):
                skipped = min(to_skip, received.num_rows)
                to_skip -= skipped
                batch = received.slice(skipped)
                if not batch.num_rows:
                    continue
                buffered.append(batch)
                size += batch.nbytes
                if size > _BUFFER_BYTES:
                    # New rows have arrived, so an earlier outage is over.
                    retry.reset()
                    returned += sum(each.num_rows for each in buffered)
                    yield from buffered
                    buffered.clear()
        except TRANSIENT as error:
            if returned and not is_repeatable:
                raise ReadBroken(f"the read broke after it had returned rows: {error}") from None
            retry.wait_after(error)
            continue
        retry.reset()
        count = returned + sum(each.num_rows for each in buffered)
        if to_skip or (is_resumed and count < row_count):
            raise ReadBroken("the read broke, and rows were removed before it was repeated")
        yield from buffered
        return


def _read_once(
    dsn_options: Mapping[str, str],
    statements: Iterable[ReadStatement],
    schema: pa.Schema,
    final_query: tuple[str, OnResult] | None,
    *,
    is_resumed: bool,
) -> Iterator[pa.RecordBatch]:
    address = add_defaults(dsn(dsn_options))
    connection = _connections.get(address)
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.adbc_statement.set_options(**_STATEMENT_OPTIONS)
                cursor.execute(statement.sql)
                # Do not use `fetch_record_batch`: the errors of its reader have no SQLSTATE.
                for batch in cursor._results.reader:
                    if statement.on_batch is not None:
                        statement.on_batch(batch)
                    if not statement.is_internal:
                        yield cast_batch(batch, schema, statement.constants)
            if final_query is not None:
                sql, on_result = final_query
                cursor.execute(sql)
                (answer,) = cursor.fetchone()
                on_result(calls.raise_for_error(json.loads(answer)), is_resumed)
    except DriverError as error:
        raise _connections.drop_and_translate(address, error) from None
    except BaseException:
        # GeneratorExit too: if Spark stops reading early, the connection's COPY is unfinished.
        _connections.drop(address)
        raise
