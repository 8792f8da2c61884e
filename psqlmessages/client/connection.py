"""psycopg connections with prepared statements, and with a time limit for answers."""

from __future__ import annotations

import json
import re
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from time import monotonic
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from psycopg import errors, generators, pq
from psycopg.abc import PQGen

# Prepared statements for hot calls, with libpq's own functions.
#
# A psycopg cursor handles rows of any type and number, which takes as long as a short round trip.
# These calls return one row of one column; their parameters are sent as text or arrays of text.

# The most frequent answer; it needs no JSON parser.
_SUCCESS: Final = b'{"Err":"0"}'
_JSON_OID: Final = 114
_TEXT_OID: Final = 25
_PLACEHOLDER: Final = re.compile("%[sb]")
# Head of a binary array: number of dimensions, has nulls, element type, length, first index.
_ARRAY_HEAD: Final = struct.Struct("!5i")
_LENGTH: Final = struct.Struct("!i")
_NULL: Final = _LENGTH.pack(-1)
# The prepared statement no longer exists, or its result type has changed: prepare it again.
_STALE_SQLSTATES: Final = (b"26000", b"0A000")


class PreparedStatement(NamedTuple):
    """A statement that a connection has prepared: its name, SQL and parameter formats."""

    name: bytes
    sql: bytes
    formats: tuple[pq.Format, ...]

    @classmethod
    def of(cls, sql: str, number: int) -> PreparedStatement:
        """Create the statement from SQL with placeholders: %s for text, %b for arrays of text."""
        placeholders = _PLACEHOLDER.findall(sql)
        pieces = _PLACEHOLDER.split(sql)
        numbered = "".join(f"{piece}${n}" for n, piece in enumerate(pieces[:-1], 1)) + pieces[-1]
        formats = tuple(
            pq.Format.BINARY if placeholder == "%b" else pq.Format.TEXT
            for placeholder in placeholders
        )
        return cls(f"psqlmessages_{number}".encode(), numbered.encode(), formats)


def encode_params(params: Sequence[Any]) -> list[bytes | None]:
    """Encode parameters: lists (of str or None) as binary arrays, other values as text."""
    return [
        None if value is None else _array(value) if isinstance(value, list) else str(value).encode()
        for value in params
    ]


def _array(texts: list[str | None]) -> bytes:
    """Encode a binary array of text."""
    if not texts:
        return struct.pack("!3i", 0, 0, _TEXT_OID)
    pieces = [_ARRAY_HEAD.pack(1, None in texts, _TEXT_OID, len(texts), 1)]
    pack = _LENGTH.pack
    for text in texts:
        if text is None:
            pieces.append(_NULL)
        else:
            body = text.encode()
            pieces += (pack(len(body)), body)
    return b"".join(pieces)


def first_value(result: pq.abc.PGresult) -> Any:
    """Return the first column of the first row, JSON or text; None for null or no row."""
    value = result.get_value(0, 0) if result.ntuples else None
    if value is None:
        return None
    if value == _SUCCESS:
        return {"Err": "0"}
    return json.loads(value) if result.ftype(0) == _JSON_OID else value.decode()


class StatementCache:
    """The statements of one connection, each prepared at its first use.

    Its methods are generators for psycopg's ``wait``. After Ctrl-C, ``wait`` cancels the query and
    reads its answer, so the connection remains usable.
    """

    def __init__(self) -> None:
        self._statements: dict[str, PreparedStatement] = {}
        # Part of the next name. No name is used twice, because the server may still have statements
        # that were removed here.
        self._prepared_count = 0

    def execute(self, pgconn: pq.abc.PGconn, sql: str, params: Sequence[Any]) -> PQGen[Any]:
        """Run a statement that returns one row of JSON or text; raise psycopg's errors."""
        result = yield from self._execute(pgconn, sql, params)
        if result.error_field(pq.DiagnosticField.SQLSTATE) in _STALE_SQLSTATES:
            self._statements.clear()
            result = yield from self._execute(pgconn, sql, params)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise errors.error_from_result(result)
        return first_value(result)

    def execute_many(
        self, pgconn: pq.abc.PGconn, statements: Sequence[tuple[str, Sequence[Any]]]
    ) -> PQGen[list[Any]]:
        """Run statements, each with its parameters, in one round trip and one transaction.

        If one of them or the commit fails, all are rolled back. Raises psycopg's error of the first
        failure.
        """
        # psycopg's own pipelines are unusable after a failed commit.
        results = yield from self._execute_many(pgconn, statements)
        if results[-1].error_field(pq.DiagnosticField.SQLSTATE) in _STALE_SQLSTATES:
            self._statements.clear()
            results = yield from self._execute_many(pgconn, statements)
        if results[-1].status != pq.ExecStatus.TUPLES_OK:
            raise errors.error_from_result(results[-1])
        return [first_value(result) for result in results]

    def _execute(
        self, pgconn: pq.abc.PGconn, sql: str, params: Sequence[Any]
    ) -> PQGen[pq.abc.PGresult]:
        name, _, formats = yield from self._prepare(pgconn, sql)
        pgconn.send_query_prepared(name, encode_params(params), formats)
        results: list[pq.abc.PGresult] = yield from generators.execute(pgconn)
        # If the commit failed, its error follows the row.
        return results[-1]

    def _prepare(self, pgconn: pq.abc.PGconn, sql: str) -> PQGen[PreparedStatement]:
        statement = self._statements.get(sql)
        if statement is None:
            statement = PreparedStatement.of(sql, self._prepared_count)
            self._prepared_count += 1
            pgconn.send_prepare(statement.name, statement.sql)
            result = (yield from generators.execute(pgconn))[-1]
            if result.status != pq.ExecStatus.COMMAND_OK:
                raise errors.error_from_result(result)
            self._statements[sql] = statement
        return statement

    def _execute_many(
        self, pgconn: pq.abc.PGconn, statements: Sequence[tuple[str, Sequence[Any]]]
    ) -> PQGen[list[pq.abc.PGresult]]:
        """Run statements in a pipeline; return their results up to the first error."""
        commands: deque[Callable[[], None]] = deque()
        for sql, params in statements:
            name, _, formats = yield from self._prepare(pgconn, sql)
            commands.append(
                partial(pgconn.send_query_prepared, name, encode_params(params), formats)
            )
        commands.append(pgconn.pipeline_sync)
        pgconn.enter_pipeline_mode()
        # A list of results for each command; the last one belongs to pipeline_sync.
        result_lists = yield from generators.pipeline_communicate(pgconn, commands)
        while not result_lists or result_lists[-1][-1].status != pq.ExecStatus.PIPELINE_SYNC:
            result_lists.append((yield from generators.fetch_many(pgconn)))
        pgconn.exit_pipeline_mode()
        # libpq has read the notifications that came with the last results. The socket will not
        # become readable for them.
        while pgconn.notify_handler and (notification := pgconn.notifies()):
            pgconn.notify_handler(notification)
        results = []
        for command_results in result_lists[:-1]:
            results.append(command_results[-1])
            if results[-1].status != pq.ExecStatus.TUPLES_OK:
                break
        return results


T = TypeVar("T")

# poll is cheaper to set up than epoll, and has no limit of 1,024 descriptors as select has.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
# Severities of errors that end the session: a shutdown, an idle timeout, …
_SESSION_ENDING_SEVERITIES = ("FATAL", "PANIC")
# The longest single wait: poll's milliseconds overflow after 24 days.
MAX_WAIT_SECONDS = 24 * 60 * 60.0
# After this time without a call, check whether the server has closed the connection.
CLOSED_CHECK_SECONDS = 1.0
# The first reads of a closed connection may return the server's last messages, such as a FATAL
# error; the next one fails.
CLOSED_CHECK_READS = 3


class AnswerTimeout(psycopg.OperationalError):
    """The server did not answer in time; the connection is unusable."""


def is_broken(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], error: psycopg.Error
) -> bool:
    """Return whether the connection is unusable after this error."""
    # The FATAL message of a backend that exits may be read before the end of the stream.
    severity = error.diag.severity_nonlocalized or error.diag.severity
    return (
        connection.closed
        or isinstance(error, AnswerTimeout)
        or severity in _SESSION_ENDING_SEVERITIES
    )


def with_check(generator: PQGen[T], check: Callable[[object], None]) -> Generator[Any, Any, T]:
    """Run a psycopg generator; call ``check`` whenever psycopg resumes the generator.

    psycopg does this at least ten times a second. The argument is false if no data has arrived.
    """
    try:
        wait_for = next(generator)
        while True:
            ready = yield wait_for
            check(ready)
            wait_for = generator.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


def with_time_limit(generator: PQGen[T], seconds: float) -> Generator[Any, Any, T]:
    """Run a psycopg generator; raise AnswerTimeout if it does not finish within ``seconds``."""
    deadline = monotonic() + seconds

    def check_deadline(ready: object) -> None:
        if not ready and monotonic() > deadline:
            raise AnswerTimeout(f"no answer from the server within {seconds:g} s")

    return with_check(generator, check_deadline)


class NotificationBuffer:
    """Buffer for the notifications that a connection receives during queries and while it is idle.

    psycopg's handlers and its ``notifies()`` generator are not used: both raise an error for a
    payload that is not valid UTF-8. Also, some versions of psycopg 3.2 lose a notification that
    arrives with an answer while the generator is not running.
    """

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = pgconn
        # Pairs of channel and payload.
        self._undecoded: deque[tuple[bytes, bytes]] = deque()
        pgconn.notify_handler = self._append

    def _append(self, notification: pq.PGnotify) -> None:
        self._undecoded.append((notification.relname, notification.extra))

    def read(self) -> None:
        """Read the data that has arrived; raise OperationalError if the connection is lost."""
        self._pgconn.consume_input()
        while (notification := self._pgconn.notifies()) is not None:
            self._append(notification)

    def take(self) -> list[tuple[str, str]]:
        """Remove and return the buffered notifications as (channel, payload), oldest first."""
        notifications = []
        while self._undecoded:
            channel, payload = self._undecoded.popleft()
            notifications.append(
                (channel.decode(errors="replace"), payload.decode(errors="replace"))
            )
        return notifications

    def __bool__(self) -> bool:
        return bool(self._undecoded)


def is_readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Return whether data, or the end of the stream, arrives within ``seconds``."""
    with _Selector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(seconds))


class Waker:
    """Waits on a file descriptor; other threads and signal handlers can end the wait."""

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def open(self) -> None:
        """Create the sockets if there are none; until then ``wake`` does nothing."""
        if self._sockets is None:
            self._sockets = socket.socketpair()
            for end in self._sockets:
                end.setblocking(False)

    def wake(self) -> None:
        """End the current wait, or the next one."""
        if self._sockets is not None:
            # A full socket already ends the wait. If the socket is closed, there is no wait.
            with suppress(OSError):
                self._sockets[0].send(b"\0")

    def wait(self, descriptor: int | None, seconds: float) -> bool:
        """Wait for ``wake``, data on the descriptor, or a timeout; return whether there is data."""
        wake_socket = self._sockets[1] if self._sockets is not None else None
        with _Selector() as selector:
            for source in (wake_socket, descriptor):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            events = selector.select(max(0.0, min(seconds, MAX_WAIT_SECONDS)))
        ready = [key.fileobj for key, _ in events]
        if wake_socket is not None and wake_socket in ready:
            # A signal handler may have closed the socket.
            with suppress(OSError):
                wake_socket.recv(4096)
        return descriptor in ready

    def close(self) -> None:
        """Close the sockets; after that ``wake`` does nothing."""
        for end in self._sockets or ():
            end.close()
        self._sockets = None


class PreparedCallsMixin:
    """Prepared statements of a connection, and its time limit for answers (``answer_seconds``)."""

    answer_seconds = 60.0

    @cached_property
    def _statements(self) -> StatementCache:
        return StatementCache()

    @contextmanager
    def limit_answer_time(self, seconds: float) -> Iterator[None]:
        """Wait at most ``seconds`` for each answer within this context."""
        outer_limit = self.answer_seconds
        self.answer_seconds = min(seconds, outer_limit)
        try:
            yield
        finally:
            self.answer_seconds = outer_limit


class Connection(PreparedCallsMixin, psycopg.Connection[tuple[Any, ...]]):
    """A connection that prepares its statements and limits the time for each answer."""

    def execute_prepared(self, sql: str, params: tuple[Any, ...]) -> Any:
        """Run a prepared statement that returns one row of JSON or text; raise psycopg's errors."""
        return self.wait(self._statements.execute(self.pgconn, sql, params))

    def execute_prepared_many(self, statements: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Run prepared statements in one transaction; see :meth:`execute_prepared`."""
        return self.wait(self._statements.execute_many(self.pgconn, statements))

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Run a psycopg generator, as each psycopg method does, with a time limit."""
        return super().wait(with_time_limit(gen, self.answer_seconds), *args, **kwargs)


class AsyncConnection(PreparedCallsMixin, psycopg.AsyncConnection[tuple[Any, ...]]):
    """The same as :class:`Connection`, for asyncio.

    ``is_pooled``: a pooler is between us and PostgreSQL. ``connect`` sets it.
    """

    is_pooled = False

    async def execute_prepared(self, sql: str, params: tuple[Any, ...]) -> Any:
        """See :meth:`Connection.execute_prepared`."""
        return await self.wait(self._statements.execute(self.pgconn, sql, params))

    async def execute_prepared_many(
        self, statements: Sequence[tuple[str, tuple[Any, ...]]]
    ) -> list[Any]:
        """See :meth:`Connection.execute_prepared_many`."""
        return await self.wait(self._statements.execute_many(self.pgconn, statements))

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """See :meth:`Connection.wait`."""
        return await super().wait(with_time_limit(gen, self.answer_seconds), *args, **kwargs)
