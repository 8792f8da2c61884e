"""Queue listener: one connection per database for all waiting requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import psycopg
from psycopg import sql

from psqlmessages.client.calls import raise_for_error, translate_error
from psqlmessages.client.connect import address_of, bound, refuse_shared
from psqlmessages.client.connection import AsyncConnection, NotificationBuffer, is_broken
from psqlmessages.exceptions import ConnectionShared
from psqlmessages.rest.pool import ANSWER_SECONDS, connected
from psqlmessages.retry import RateLimitedLogger
from psqlmessages.wire import MalformedPayload, parse

logger: Final = logging.getLogger("psqlmessages.rest")
log: Final = RateLimitedLogger(logger, timedelta(hours=1))
_IDLE_SECONDS: Final = 60.0
# Without notifications an answer is valid for this long: readers poll after half of it.
_LOOKING_SECONDS: Final = 2.0
# All queues share the connection, so waiting for the lock of one delays the others.
_PATIENCE: Final = "SET lock_timeout = '100ms'"
_MOVED: Final = "moved"


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """The result of queue_listen: for how long it is valid, and when to take next.

    ``next`` is the time in seconds until an element becomes available; None if only a
    notification can announce one.
    """

    seconds: float
    next: float | None


class RestQueueListener:
    """Listens to the queues of a namespace, on a connection that is open while there are any.

    ``on_event`` gets the queue, and whether its channel has changed. ``on_connection_lost`` is
    called if the connection is lost: call :meth:`listen` again for every queue.
    """

    def __init__(
        self,
        dsn: str,
        name: str,
        on_event: Callable[[str, bool], None],
        on_connection_lost: Callable[[], None],
    ) -> None:
        self._dsn = dsn
        self._name = name
        self._on_event = on_event
        self._on_connection_lost = on_connection_lost
        self._connection: AsyncConnection | None = None
        self._buffer: NotificationBuffer | None = None
        self._descriptor = -1
        self._is_own = True
        self._turn = asyncio.Lock()
        self._queues: dict[str, str] = {}  # by channel
        self._left: set[str] = set()
        self._resting: asyncio.TimerHandle | None = None

    async def listen(self, ident: str, queue: str) -> QueueEvent:
        """Listen to a queue as a node; raises the error if a rule is missing.

        Raises LockNotAvailable if another transaction locks the queue because it creates the queue
        or changes rules.
        """
        async with self._turn:
            if self._resting is not None:
                self._resting.cancel()
            connection = self._connection or await self._connect()
            if not self._is_own:
                return QueueEvent(_LOOKING_SECONDS, None)
            await self._unlisten(connection)
            query = "SELECT messages.queue_listen(%s, %s)"
            answer = raise_for_error((await self._asked(connection, query, (ident, queue)))[0][0])
        channel = answer["Channel"]
        self.forget(queue)
        self._queues[channel] = queue
        self._left.discard(channel)
        following = None if answer.get("Paused") else answer["Next"]
        return QueueEvent(float(answer["Seconds"]), following)

    async def _connect(self) -> AsyncConnection:
        connection = await connected(self._dsn, self._name)
        try:
            is_bound = await bound(connection, ANSWER_SECONDS)
            self._is_own = is_bound or await self._can_listen(connection)
            if is_bound:
                await connection.execute(_PATIENCE)
        except BaseException:
            # The check failed: repeat it on another connection.
            await connection.close()
            raise
        self._buffer = NotificationBuffer(connection.pgconn)
        self._descriptor = connection.fileno()
        self._connection = connection
        return connection

    async def _can_listen(self, connection: AsyncConnection) -> bool:
        """Check whether notifications arrive through a pooler."""
        try:
            await asyncio.to_thread(refuse_shared, self._dsn, address_of(connection))
        except ConnectionShared as error:
            log.warning("%s: polling instead of listening: %s", self._name, error)
            return False
        return True

    def forget(self, queue: str) -> None:
        """Stop listening to a queue; the next call of :meth:`listen` sends the UNLISTEN."""
        self._left.update(name for name, each in self._queues.items() if each == queue)
        if self._left.issuperset(self._queues):
            loop = asyncio.get_running_loop()
            if self._resting is not None:
                self._resting.cancel()
            self._resting = loop.call_later(_IDLE_SECONDS, self._rest)

    async def _unlisten(self, connection: AsyncConnection) -> None:
        for channel in list(self._left):
            await self._asked(connection, sql.SQL("UNLISTEN {}").format(sql.Identifier(channel)))
            self._left.discard(channel)
            self._queues.pop(channel, None)

    async def _asked(
        self, connection: AsyncConnection, query: Any, params: tuple[str, ...] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a query, then process notifications that arrived during it."""
        loop = asyncio.get_running_loop()
        # psycopg waits on the same descriptor.
        loop.remove_reader(self._descriptor)
        try:
            cursor = await connection.execute(query, params)
            rows = await cursor.fetchall() if params is not None else []
        except psycopg.Error as error:
            if broken := is_broken(connection, error):
                self._drop(connection)
            raise translate_error(error, is_broken=broken) from error
        except BaseException:
            self._drop(connection)
            raise
        finally:
            if self._connection is connection:
                loop.add_reader(self._descriptor, self._read)
                self._tell()
        return rows

    # Notifications

    def _read(self) -> None:
        connection, buffer = self._connection, self._buffer
        if connection is None or buffer is None:
            return
        try:
            buffer.read()
        except psycopg.OperationalError:
            self._drop(connection)
        self._tell()

    def _tell(self) -> None:
        for channel, payload in self._buffer.take() if self._buffer is not None else ():
            if (queue := self._queues.get(channel)) is not None:
                self._on_event(queue, _is_moved(payload))

    # Closing the connection

    def _drop(self, connection: AsyncConnection) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        connection.pgconn.finish()
        self._connection = self._buffer = None
        self._queues.clear()
        self._left.clear()
        self._on_connection_lost()

    def _rest(self) -> None:
        if self._connection is not None and not self._turn.locked():
            self._drop(self._connection)


def _is_moved(payload: str) -> bool:
    try:
        return parse(payload).header.get("Evt") == _MOVED
    except MalformedPayload:
        # The notification still makes the readers look.
        return False
