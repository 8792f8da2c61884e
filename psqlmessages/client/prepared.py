"""Prepared: hot calls as prepared statements, by libpq's own functions.

A cursor of psycopg adapts, describes and collects for any type and number of rows; that takes as
long as a short round trip. Here are one row, one column, and parameters that travel as text or as
arrays of text.
"""

from __future__ import annotations

import json
import re
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from psycopg import errors, generators, pq
from psycopg.abc import PQGen

_SUCCESS: Final = b'{"Err":"0"}'
_JSON_OID: Final = 114
_TEXT_OID: Final = 25
_PLACEHOLDER: Final = re.compile("%[sb]")
_ARRAY_HEAD: Final = struct.Struct("!5i")
_LENGTH: Final = struct.Struct("!i")
_NULL: Final = _LENGTH.pack(-1)
# A statement is not there any more, or does not fit to what it calls.
_LOST: Final = (b"26000", b"0A000")


class Statement(NamedTuple):
    """A statement that a connection has prepared: its name, and the formats of its parameters."""

    name: bytes
    sql: bytes
    formats: tuple[pq.Format, ...]

    @classmethod
    def of(cls, sql: str, number: int) -> Statement:
        """Translate psycopg's placeholders: %s for text, %b for arrays of text."""
        found = _PLACEHOLDER.findall(sql)
        pieces = _PLACEHOLDER.split(sql)
        numbered = "".join(f"{piece}${n}" for n, piece in enumerate(pieces[:-1], 1)) + pieces[-1]
        formats = tuple(pq.Format.BINARY if kind == "%b" else pq.Format.TEXT for kind in found)
        return cls(f"psqlmessages_{number}".encode(), numbered.encode(), formats)


def encoded(params: Sequence[Any]) -> list[bytes | None]:
    """Write parameters as they travel: None, a list of str and None, or what has a text."""
    return [
        value.encode() if isinstance(value, str) else None if value is None else _other(value)
        for value in params
    ]


def _other(value: Any) -> bytes:
    """Write a list, or a number or time as text, whose type the server knows."""
    return _array(value) if isinstance(value, list) else str(value).encode()


def _array(texts: list[str | None]) -> bytes:
    if not texts:
        return struct.pack("!3i", 0, 0, _TEXT_OID)
    pieces = [_ARRAY_HEAD.pack(1, None in texts, _TEXT_OID, len(texts), 1)]
    pack = _LENGTH.pack
    for text in texts:
        if text is None:
            pieces.append(_NULL)
            continue
        body = text.encode()
        pieces.append(pack(len(body)))
        pieces.append(body)
    return b"".join(pieces)


def first_value(result: pq.abc.PGresult) -> Any:
    """Read the first column of the first row, which is JSON or text."""
    value = result.get_value(0, 0) if result.ntuples else None
    if value is None:
        return None
    if value == _SUCCESS:
        return {"Err": "0"}
    return json.loads(value) if result.ftype(0) == _JSON_OID else value.decode()


class Prepared:
    """The statements of one connection, each prepared when it is asked for the first time.

    All is sent within the generators that psycopg's ``wait`` drives, so that Ctrl-C leaves no
    answer that nobody waits for.
    """

    def __init__(self) -> None:
        self._statements: dict[str, Statement] = {}
        # A name once given may be there still, though its statement is of no use any more.
        self._ever = 0

    def ask(self, pgconn: pq.abc.PGconn, sql: str, params: Sequence[Any]) -> PQGen[Any]:
        """Run a statement with one row of JSON or text; raises psycopg's errors."""
        result = yield from self._execute(pgconn, sql, params)
        if result.error_field(pq.DiagnosticField.SQLSTATE) in _LOST:
            self._statements.clear()
            result = yield from self._execute(pgconn, sql, params)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise errors.error_from_result(result)
        return first_value(result)

    def ask_many(
        self, pgconn: pq.abc.PGconn, sql: str, rows: Sequence[Sequence[Any]]
    ) -> PQGen[list[Any]]:
        """Run a statement for each of these rows, in one round trip and one transaction.

        Raises psycopg's error for the first that failed, or for the commit; none is done then.
        """
        # psycopg's own pipelines are of no use any more once a commit has failed.
        results = yield from self._pipe(pgconn, sql, rows)
        if results[-1].error_field(pq.DiagnosticField.SQLSTATE) in _LOST:
            self._statements.clear()
            results = yield from self._pipe(pgconn, sql, rows)
        if results[-1].status != pq.ExecStatus.TUPLES_OK:
            raise errors.error_from_result(results[-1])
        return [first_value(result) for result in results]

    def _execute(
        self, pgconn: pq.abc.PGconn, sql: str, params: Sequence[Any]
    ) -> PQGen[pq.abc.PGresult]:
        statement = yield from self._prepare(pgconn, sql)
        if not isinstance(statement, Statement):
            return statement
        pgconn.send_query_prepared(statement.name, encoded(params), statement.formats)
        return _last((yield from generators.execute(pgconn)))

    def _prepare(self, pgconn: pq.abc.PGconn, sql: str) -> PQGen[Statement | pq.abc.PGresult]:
        statement = self._statements.get(sql)
        if statement is None:
            statement = Statement.of(sql, self._ever)
            self._ever += 1
            pgconn.send_prepare(statement.name, statement.sql)
            result = _last((yield from generators.execute(pgconn)))
            if result.status != pq.ExecStatus.COMMAND_OK:
                return result
            self._statements[sql] = statement
        return statement

    def _pipe(
        self, pgconn: pq.abc.PGconn, sql: str, rows: Sequence[Sequence[Any]]
    ) -> PQGen[list[pq.abc.PGresult]]:
        """Give a result for each row, or those up to the first error."""
        statement = yield from self._prepare(pgconn, sql)
        if not isinstance(statement, Statement):
            return [statement]
        name, _, formats = statement
        commands: deque[Callable[[], None]] = deque(
            partial(pgconn.send_query_prepared, name, encoded(row), formats) for row in rows
        )
        commands.append(pgconn.pipeline_sync)
        pgconn.enter_pipeline_mode()
        groups = yield from generators.pipeline_communicate(pgconn, commands)
        while not groups or groups[-1][-1].status != pq.ExecStatus.PIPELINE_SYNC:
            groups.append((yield from generators.fetch_many(pgconn)))
        pgconn.exit_pipeline_mode()
        # Those that came with the last results: nothing on the socket tells of them any more.
        while pgconn.notify_handler and (notification := pgconn.notifies()):
            pgconn.notify_handler(notification)
        results = [_last(group) for group in groups[:-1]]
        failed = [n for n, got in enumerate(results) if got.status != pq.ExecStatus.TUPLES_OK]
        return results[: failed[0] + 1] if failed else results


def _last(results: list[pq.abc.PGresult]) -> pq.abc.PGresult:
    """Take the last: what fails at the commit comes after the row."""
    return results[-1]
