"""Reading: statements run with ADBC, as Arrow batches cast to the declared schema."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import adbc_driver_manager
import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_postgresql import dbapi

from psqlmessages.client import calls
from psqlmessages.exceptions import ConnectionLost, error_for
from psqlmessages.pipeline.collecting import spare_what_is_loaded
from psqlmessages.pipeline.columns import fitted
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.errors import ReadBroken
from psqlmessages.pipeline.waiting import Waiting

# Larger batches are slower: 16 MB ones by a tenth.
_BATCH_BYTES: Final = 1024 * 1024
# So much is held back until a read has ended: one that breaks before that begins anew.
_HELD_BYTES: Final = 16 * 1024 * 1024

_OPTIONS: Final = {
    adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)
}

Answered = Callable[[Mapping[str, Any]], None]

# One connection for each process and address: a reused worker need not connect for each task.
_kept: dict[tuple[int, str], dbapi.Connection] = {}


@dataclass(frozen=True)
class Statement:
    """A query, and the columns that it leaves out since all of its rows have the same there."""

    sql: str
    constants: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Read:
    """What to read: statements, in one transaction where something goes before them.

    ``after`` is asked when all is read, and answers JSON as text.
    """

    before: tuple[str, ...]
    statements: tuple[Statement, ...]
    after: str | None = None


class Reader:
    """Runs reads on the connection that its process keeps."""

    def __init__(self, address: Mapping[str, str], patience: timedelta) -> None:
        self._address = address
        self._waiting = Waiting(patience)

    def batches(
        self, read: Read, schema: pa.Schema, answered: Answered | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read, and cast each batch. ``answered`` is told what the statement after it answers.

        While nothing was handed on yet, a read whose connection breaks begins anew; raises
        ReadBroken afterwards. One that was kept may be long dead: that asks for no patience.
        """
        spare_what_is_loaded()
        while True:
            was_kept = (os.getpid(), connectable(dsn(self._address))) in _kept
            held: list[pa.RecordBatch] = []
            size = 0
            try:
                for batch in self._attempt(read, schema, answered):
                    held.append(batch)
                    size += batch.nbytes
                    if size > _HELD_BYTES:
                        yield from held
                        held.clear()
            except ConnectionLost as error:
                if size > _HELD_BYTES:
                    raise ReadBroken(f"the connection broke amid a read: {error.text}") from None
                if not was_kept:
                    self._waiting.after(error.text)
                continue
            self._waiting.over()
            yield from held
            return

    def _attempt(
        self, read: Read, schema: pa.Schema, answered: Answered | None
    ) -> Iterator[pa.RecordBatch]:
        address = connectable(dsn(self._address))
        connection = _connection(address)
        is_whole = False
        try:
            with connection.cursor() as cursor:
                yield from _transaction(cursor, read, schema)
                if read.after is not None and answered is not None:
                    answered(calls.checked(_answer(cursor, read.after)))
            is_whole = True
        except adbc_driver_manager.Error as error:
            raise _translated(error) from None
        finally:
            # Also where Spark wants no more rows: a COPY amid which nobody reads on.
            if not is_whole:
                _drop(address)


def _transaction(cursor: dbapi.Cursor, read: Read, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if read.before:
        cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    for preparation in read.before:
        cursor.execute(preparation)
    for statement in read.statements:
        cursor.adbc_statement.set_options(**_OPTIONS)
        cursor.execute(statement.sql)
        for batch in cursor.fetch_record_batch():
            yield fitted(batch, schema, statement.constants)
    if read.before:
        cursor.execute("COMMIT")


def _answer(cursor: dbapi.Cursor, statement: str) -> Any:
    cursor.execute(statement)
    row = cursor.fetchone()
    return json.loads(row[0]) if row else None


def _connection(address: str) -> dbapi.Connection:
    key = (os.getpid(), address)
    if key not in _kept:
        try:
            _kept[key] = dbapi.connect(address, autocommit=True)
        except adbc_driver_manager.Error as error:
            raise ConnectionLost(_text(error)) from None
    return _kept[key]


def disconnect() -> None:
    """Close the connections that this process keeps; who reads on connects again."""
    for _, address in list(_kept):
        _drop(address)


def _drop(address: str) -> None:
    connection = _kept.pop((os.getpid(), address), None)
    if connection is not None:
        with suppress(adbc_driver_manager.Error):
            connection.close()


def _translated(error: adbc_driver_manager.Error) -> Exception:
    state = error.sqlstate or ""
    if state.startswith("PM") and state[2:].isdecimal():
        return error_for(int(state[2:]), _text(error))
    is_io = error.status_code == adbc_driver_manager.AdbcStatusCode.IO
    is_lost = state[:2] == "08" or state[:3] == "57P" or (is_io and not state)
    return ConnectionLost(_text(error)) if is_lost else error


def _text(error: adbc_driver_manager.Error) -> str:
    return str(error).strip().partition("\n")[0]
