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
# It waits for nobody: while rules are being changed, or the queue is made, loops look instead.
_LOOKING_SECONDS: Final = 1.0
_LISTEN: Final = """
    SELECT messages.queue_listen(%s, %s) FROM set_config('lock_timeout', '500ms', true)
"""


class QueueState(NamedTuple):
    """What is known of a queue; times are of ``monotonic``.

    ``next_at``: when the next element becomes available, if there is one. ``again_at``: when to
    ask again, since pushes notify for a limited time only. ``is_new``: what was pushed before now
    may have notified nobody.
    """

    next_at: float | None
    is_paused: bool
    again_at: float
    is_new: bool

    def is_stale(self, now: float) -> bool:
        """Whether it is time to ask anew."""
        is_due = self.next_at is not None and self.next_at <= now and not self.is_paused
        return is_due or self.again_at <= now


class QueueListener:
    """Hears of what is pushed to the queues of one database, for all loops of this process."""

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
        """Let ``wake`` be called when there may be something in a queue."""
        self._waiters[queue].add(wake)

    def remove(self, queue: str, wake: Callable[[], None]) -> None:
        """Let it be called no more."""
        self._waiters[queue].discard(wake)

    async def follow(self, ident: str, queue: str) -> QueueState:
        """Listen to a queue for a while, and tell what is known of it. Raises what SQL does."""
        async with self._turns:
            await self._connect()
            # psycopg waits on the same socket, and a loop knows one reader of each.
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
        """Wake all: they ask anew, and so connect anew."""
        self._deafen()
        if self._connection is not None:
            # Not its close(), which is to be awaited: nothing is to be said to the server any more.
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
                # Anybody who knows the channel's name may notify it, and nobody else does.
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
