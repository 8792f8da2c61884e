"""Queue listener: one listening connection for the queues of a database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any, Final

import psycopg
from psycopg import sql

from psqlmessages.client.calls import raise_for_error, translate_error
from psqlmessages.client.connect import connect_async, host_and_port, refuse_shared_connections
from psqlmessages.client.connection import AsyncConnection, NotificationBuffer, is_broken
from psqlmessages.client.options import complete_conninfo
from psqlmessages.client.wakeups import MOVED, QueueState
from psqlmessages.exceptions import ConnectionShared
from psqlmessages.retry import RateLimitedLogger
from psqlmessages.wire import MalformedPayload, parse

logger: Final = logging.getLogger("psqlmessages")
log: Final = RateLimitedLogger(logger, timedelta(hours=1))

ANSWER_SECONDS: Final = 10.0
# All queues share the connection, so a wait for a lock delays all of them. Creating a queue and
# changing rules take such locks: stop waiting after 100 ms, and retry after a second.
_LISTEN: Final = """
    SELECT messages.queue_listen(%s, %s) FROM set_config('lock_timeout', '100ms', true)
"""
_LOCKED_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 60.0
# Through a pooler that shares connections no notification arrives, so poll every second. After a
# minute try again to listen.
_POLL_SECONDS: Final = 1.0
_POLLING_PERIOD_SECONDS: Final = 60.0


class QueueListener:
    """Listens to queues of one database; calls callbacks when a queue may have new elements.

    The connection is open while there are callbacks, and a minute longer. With ``may_poll``, a
    pooler that shares connections is no error, and ``listen`` returns when to poll.
    """

    def __init__(self, dsn: str, name: str, *, may_poll: bool = False) -> None:
        self._dsn, self._name = dsn, name
        self._may_poll = may_poll
        self._poll_until = -inf
        self._connection: AsyncConnection | None = None
        self._buffer: NotificationBuffer | None = None
        self._descriptor = -1
        self._lock = asyncio.Lock()
        self._callbacks: dict[str, set[Callable[[], None]]] = {}
        # The channel of each queue, and the time until which pushes notify that channel.
        self._channels: dict[str, tuple[str, float]] = {}
        self._channels_to_unlisten: set[str] = set()
        self._idle_timer: asyncio.TimerHandle | None = None

    def add(self, queue: str, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever a queue may have new elements, and if the connection is lost."""
        self._callbacks.setdefault(queue, set()).add(wake)

    def remove(self, queue: str, wake: Callable[[], None]) -> None:
        """Stop calling ``wake`` for a queue."""
        self._callbacks[queue].discard(wake)
        if not self._callbacks[queue]:
            del self._callbacks[queue]
            self._close_later()

    async def listen(self, ident: str, queue: str) -> QueueState:
        """Listen to a queue as the node ``ident``; return its state, with ``listen_again_at``.

        If a lock or a pooler prevents listening, ``listen_again_at`` is the time of the next poll.
        Raises psycopg.Error or MessagesError for other causes, such as a missing rule.
        """
        async with self._lock:
            if self._connection is None and not await self._connect_or_poll():
                return QueueState(None, monotonic() + _POLL_SECONDS)
            for unused_queue in self._channels.keys() - self._callbacks.keys() - {queue}:
                self._forget(unused_queue)
            for channel in tuple(self._channels_to_unlisten):
                await self._execute(sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
                self._channels_to_unlisten.discard(channel)
            started_at = monotonic()
            try:
                ((row,),) = await self._execute(_LISTEN, (ident, queue))
            except psycopg.errors.LockNotAvailable:
                return QueueState(None, monotonic() + _LOCKED_SECONDS)
            answer, now = raise_for_error(row), monotonic()
            channel, seconds, next_seconds = answer["Channel"], answer["Seconds"], answer["Next"]
            _, listened_until = self._channels.get(queue, ("", -inf))
            self._channels[queue] = channel, started_at + seconds
            self._channels_to_unlisten.discard(channel)
        return QueueState(
            next_at=None if answer["Paused"] or next_seconds is None else now + next_seconds,
            listen_again_at=now + seconds / 2,
            is_listening=True,
            is_new=listened_until < started_at,
        )

    async def close(self) -> None:
        """Disconnect."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._drop_connection()

    async def _connect_or_poll(self) -> bool:
        """Connect; return False if the caller must poll because a pooler shares connections."""
        if monotonic() < self._poll_until:
            return False
        connection = await connect_async(
            self._dsn, self._name, answer_seconds=ANSWER_SECONDS, statement_seconds=ANSWER_SECONDS
        )
        try:
            if connection.is_pooled:
                address = host_and_port(connection)
                conninfo = complete_conninfo(self._dsn, self._name)
                await asyncio.to_thread(refuse_shared_connections, conninfo, address)
        except BaseException as error:
            await connection.close()
            if not (self._may_poll and isinstance(error, ConnectionShared)):
                raise
            log.warning("polling instead of listening: %s", error)
            self._poll_until = monotonic() + _POLLING_PERIOD_SECONDS
            return False
        self._connection = connection
        self._buffer = NotificationBuffer(connection.pgconn)
        return True

    async def _execute(
        self, query: sql.Composed | str, params: tuple[str, ...] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a query, then process the notifications that arrived during it."""
        connection = self._connection
        if connection is None:
            raise psycopg.OperationalError("the connection was lost")
        # psycopg waits on the same socket, and asyncio allows one reader per descriptor.
        self._stop_reading()
        try:
            cursor = await connection.execute(query, params)
            return await cursor.fetchall() if params else []
        except psycopg.Error as error:
            is_lost = is_broken(connection, error)
            if is_lost:
                self._drop_connection()
            raise translate_error(error, is_broken=is_lost) from error
        except BaseException:
            self._drop_connection()
            raise
        finally:
            if self._connection is not None:
                self._descriptor = connection.fileno()
                asyncio.get_running_loop().add_reader(self._descriptor, self._read)
                self._process_notifications()

    def _read(self) -> None:
        if self._buffer is None:
            return
        try:
            self._buffer.read()
        except psycopg.OperationalError:
            self._drop_connection()
        self._process_notifications()

    def _process_notifications(self) -> None:
        notifications = self._buffer.take() if self._buffer is not None else []
        for _, payload in notifications:
            # Anyone who knows the channel can send a malformed payload.
            with suppress(MalformedPayload):
                header = parse(payload).header
                queue = str(header.get("Queue"))
                if header.get("Evt") == MOVED:
                    self._forget(queue)
                self._wake(queue)

    def _wake(self, queue: str) -> None:
        for wake in tuple(self._callbacks.get(queue, ())):
            wake()

    def _forget(self, queue: str) -> None:
        """Forget a queue; the next ``listen`` of any queue unlistens from its channel."""
        if queue in self._channels:
            self._channels_to_unlisten.add(self._channels.pop(queue)[0])

    def _stop_reading(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = -1

    def _drop_connection(self) -> None:
        """Close the connection and call all callbacks: the next ``listen`` reconnects."""
        self._stop_reading()
        if self._connection is not None:
            # The connection's close() must be awaited, which callers of this method cannot.
            self._connection.pgconn.finish()
        self._connection = self._buffer = None
        self._channels.clear()
        self._channels_to_unlisten.clear()
        for queue in tuple(self._callbacks):
            self._wake(queue)

    def _close_later(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        loop = asyncio.get_running_loop()
        self._idle_timer = loop.call_later(_IDLE_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._lock.locked():
            self._close_later()
        elif not self._callbacks:
            self._drop_connection()
