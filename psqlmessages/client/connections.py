"""Connections: psycopg's, with a limit on waiting for answers and notifications kept raw."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen

from psqlmessages.client.prepared import Prepared

T = TypeVar("T")
Raw = tuple[bytes, bytes]

# poll is cheaper to set up than epoll, and knows no limit of 1,024 descriptors as select does.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
# What ends the session, as PostgreSQL says: a shutdown, a time-out of what is idle, …
_ENDS = ("FATAL", "PANIC")
_LONGEST_WAIT = 24 * 60 * 60.0


class AnswerTimeout(psycopg.OperationalError):
    """The server answered nothing in time; the connection is of no use any more."""


def is_broken(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], error: psycopg.Error
) -> bool:
    """Whether the connection cannot be used after this error."""
    # The FATAL message of a server that ends may be read before the end of the stream is.
    severity = error.diag.severity_nonlocalized or error.diag.severity
    return connection.closed or isinstance(error, AnswerTimeout) or severity in _ENDS


def bounded(generator: PQGen[T], seconds: float) -> Generator[Any, Any, T]:
    """Run a generator of psycopg's protocol, but give up after some seconds without its end."""
    deadline = monotonic() + seconds
    try:
        wanted = next(generator)
        while True:
            # psycopg resumes its generators at least ten times a second, with 0 for "not yet".
            ready = yield wanted
            if not ready and monotonic() > deadline:
                raise AnswerTimeout(f"no answer from the server within {seconds:g} s")
            wanted = generator.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


class Inlet:
    """Where a connection's notifications gather, whether they come in a wait or during a query.

    psycopg's ``notifies()`` generator is not used, nor its handlers: both decode, and what came
    with an answer while the generator was off is kept by some versions of psycopg 3.2 only.
    """

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = pgconn
        self._raw: deque[Raw] = deque()
        pgconn.notify_handler = self._keep

    def _keep(self, notification: pq.PGnotify) -> None:
        self._raw.append((notification.relname, notification.extra))

    def read(self) -> None:
        """Read what the socket has; raises OperationalError where the connection is gone."""
        self._pgconn.consume_input()
        while (notification := self._pgconn.notifies()) is not None:
            self._keep(notification)

    def take(self) -> list[tuple[str, str]]:
        """Take the channels and payloads that came so far, in their order."""
        raw, taken = self._raw, []
        while raw:
            channel, payload = raw.popleft()
            taken.append((channel.decode(errors="replace"), payload.decode(errors="replace")))
        return taken

    def __bool__(self) -> bool:
        return bool(self._raw)


def is_readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether there is something to read within some time, be it the end of the stream."""
    with _Selector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(seconds))


class Waker:
    """A wait on a file descriptor that another thread, or a signal handler, can end at once."""

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def open(self) -> None:
        """Make the sockets, unless they are there; until then a wait is not woken."""
        if self._sockets is None:
            self._sockets = socket.socketpair()
            for one in self._sockets:
                one.setblocking(False)

    def wake(self) -> None:
        """End the wait under way, or the next one."""
        if self._sockets is not None:
            # Full means that it will wake anyway; closed, that nobody waits any more.
            with suppress(OSError):
                self._sockets[0].send(b"\0")

    def wait(self, descriptor: int | None, seconds: float) -> bool:
        """Wait; True where the descriptor has something to read."""
        wakeable = self._sockets[1] if self._sockets is not None else None
        with _Selector() as selector:
            for source in (wakeable, descriptor):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            events = selector.select(max(0.0, min(seconds, _LONGEST_WAIT)))
        ready = [key.fileobj for key, _ in events]
        if wakeable is not None and wakeable in ready:
            # A signal handler may have closed it meanwhile.
            with suppress(OSError):
                wakeable.recv(4096)
        return descriptor in ready

    def close(self) -> None:
        """Close the sockets; waking a closed one does nothing."""
        for one in self._sockets or ():
            one.close()
        self._sockets = None


class Patience:
    """How long a connection waits for answers."""

    answer_seconds = 60.0

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Wait no longer than so for the answers of some statements."""
        usual, self.answer_seconds = self.answer_seconds, min(seconds, self.answer_seconds)
        try:
            yield
        finally:
            self.answer_seconds = usual


class Connection(Patience, psycopg.Connection[tuple[Any, ...]]):
    """A connection for messages only, used by one :class:`Node`."""

    _hot_calls: Prepared | None = None

    def ask(self, sql: str, params: tuple[Any, ...]) -> Any:
        """Run a prepared statement with one row of JSON or text; psycopg's errors."""
        if self._hot_calls is None:
            self._hot_calls = Prepared()
        return self.wait(self._hot_calls.ask(self.pgconn, sql, params))

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Drive psycopg's generator, as each of its methods does, for a limited time."""
        return super().wait(bounded(gen, self.answer_seconds), *args, **kwargs)


class AsyncConnection(Patience, psycopg.AsyncConnection[tuple[Any, ...]]):
    """The same for an :class:`AsyncNode`."""

    _hot_calls: Prepared | None = None

    async def ask(self, sql: str, params: tuple[Any, ...]) -> Any:
        """See :meth:`Connection.ask`."""
        if self._hot_calls is None:
            self._hot_calls = Prepared()
        return await self.wait(self._hot_calls.ask(self.pgconn, sql, params))

    async def ask_many(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run a prepared statement for many rows of parameters, in one transaction."""
        if self._hot_calls is None:
            self._hot_calls = Prepared()
        return await self.wait(self._hot_calls.ask_many(self.pgconn, sql, rows))

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """See :meth:`Connection.wait`."""
        return await super().wait(bounded(gen, self.answer_seconds), *args, **kwargs)
