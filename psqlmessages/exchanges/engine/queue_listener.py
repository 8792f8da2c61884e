"""Queue listener: one listening connection for each source database."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from time import monotonic
from typing import Final, NamedTuple

import psycopg

from psqlmessages.client.calls import raise_for_error
from psqlmessages.client.connect import require_own
from psqlmessages.client.connection import AsyncConnection, NotificationBuffer
from psqlmessages.exchanges.engine.sql import Query, ReconnectingConnection
from psqlmessages.wire import MalformedPayload, parse

ANSWER_SECONDS: Final = 10
# Wait only briefly for locks: while a transaction changes rules or creates the queue, poll instead.
_LOOKING_SECONDS: Final = 1.0
_LISTEN: Final = """
    SELECT messages.queue_listen(%s, %s) FROM set_config('lock_timeout', '500ms', true)
"""


class QueueState(NamedTuple):
    """State of a queue; times are those of ``monotonic``.

    ``next_at``: when the next element becomes available, if there is one. ``again_at``: when to ask
    again, because pushes send notifications for a limited time only. ``is_new``: earlier pushes may
    have sent no notification.
    """

    next_at: float | None
    is_paused: bool
    again_at: float
    is_new: bool

    def is_stale(self, now: float) -> bool:
        """Whether the state must be read again."""
        is_due = self.next_at is not None and self.next_at <= now and not self.is_paused
        return is_due or self.again_at <= now


class QueueListener:
    """Receives notifications of pushes to the queues of one database, for all consumers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._line = ReconnectingConnection(address, ANSWER_SECONDS)
        self._connection: AsyncConnection | None = None
        self._buffer: NotificationBuffer | None = None
        self._descriptor = -1
        self._turns = asyncio.Lock()
        self._waiters: dict[str, set[Callable[[], None]]] = defaultdict(set)
        self._followed: set[tuple[str, str]] = set()
        self.lost_connections = 0

    def add(self, queue: str, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever a queue may have elements."""
        self._waiters[queue].add(wake)

    def remove(self, queue: str, wake: Callable[[], None]) -> None:
        """Stop calling ``wake`` for a queue."""
        self._waiters[queue].discard(wake)

    async def follow(self, ident: str, queue: str) -> QueueState:
        """Listen to a queue for a while, and return its state.

        Raise psycopg.Error or MessagesError if the queue cannot be watched.
        """
        async with self._turns:
            await self._connect()
            # psycopg waits on the same socket, and asyncio allows one reader per descriptor.
            self._deafen()
            try:
                ((row,),) = await self._line.ask(Query(_LISTEN, (ident, queue)))
            except psycopg.errors.LockNotAvailable:
                again_at = monotonic() + _LOOKING_SECONDS
                return QueueState(None, is_paused=False, again_at=again_at, is_new=False)
            except psycopg.Error:
                await self._line.reset()
                raise
            finally:
                await self._listen()
        answer = raise_for_error(row[0])
        now = monotonic()
        is_new = (ident, queue) not in self._followed
        self._followed.add((ident, queue))
        seconds = answer["Next"]
        return QueueState(
            next_at=None if seconds is None else now + seconds,
            is_paused=answer["Paused"],
            again_at=now + answer["Seconds"] / 2,
            is_new=is_new,
        )

    async def close(self) -> None:
        """Disconnect."""
        self._deafen()
        await self._line.close()

    async def _connect(self) -> None:
        if self._connection is not None and self._line.is_open:
            return
        self._deafen()
        self._connection = None
        connection = await self._line.open()
        try:
            await require_own(connection, self._address)
        except BaseException:
            await self._line.close()
            raise
        self._connection = connection
        self._buffer = NotificationBuffer(self._connection.pgconn)
        self._followed.clear()

    def _deafen(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = -1

    async def _listen(self) -> None:
        self._take_in()
        if self._connection is not None and self._line.is_open:
            self._descriptor = self._connection.fileno()
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        else:
            self._drop_connection()

    def _read(self) -> None:
        if self._buffer is None:
            return
        try:
            self._buffer.read()
        except psycopg.OperationalError:
            self._drop_connection()
        self._take_in()

    def _drop_connection(self) -> None:
        """Drop the connection and wake all consumers: their next call reconnects."""
        self._deafen()
        if self._connection is not None:
            # Not close(), which must be awaited: there is nothing left to send to the server.
            self._connection.pgconn.finish()
            self._connection = None
            self.lost_connections += 1
        self._followed.clear()
        for queue in list(self._waiters):
            self._wake(queue)

    def _take_in(self) -> None:
        for _, payload in self._buffer.take() if self._buffer is not None else ():
            try:
                header = parse(payload).header
            except MalformedPayload:
                # From a foreign client that knows the name of the channel.
                continue
            queue = header.get("Queue")
            if not isinstance(queue, str):
                continue
            if header.get("Evt") == "moved":
                self._followed = {each for each in self._followed if each[1] != queue}
            self._wake(queue)

    def _wake(self, queue: str) -> None:
        for wake in tuple(self._waiters.get(queue, ())):
            wake()
