"""Connection of an AsyncPubSub, and the task that reads and reconnects it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.calls import translate_error
from psqlmessages.client.connect import address_of, refuse_shared
from psqlmessages.client.connection import bounded, is_broken, is_readable
from psqlmessages.client.options import Options, conninfo
from psqlmessages.exceptions import ConnectionLost, MessagesError, NodeClosed, ServerUnreachable
from psqlmessages.pubsub.bus_state import (
    BusNotifications,
    Event,
    Handler,
    Script,
    Subscriptions,
    carry_out,
    conninfo_of,
    is_closed_by_owner,
    logger,
)

T = TypeVar("T")
MakeScript = Callable[[BusNotifications], Script[T]]

_CLOSING_SECONDS = 5.0
# How soon to retry while the owner is using the connection.
_BUSY_SECONDS = 0.05
_STALE_SECONDS = 1.0
# The server's last data may arrive before the end of the stream.
_STALE_READS = 3
_LONGEST_WAIT = 24 * 60 * 60.0


class AsyncBusConnection:
    """The connection of an :class:`AsyncPubSub`; tasks may share it.

    Lock order: ``_io``, then the connection's own lock, which its owner uses too.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any] | str,
        subscriptions: Subscriptions,
        options: Options,
    ) -> None:
        self._given = None if isinstance(connection, str) else connection
        self._dsn = conninfo(connection, "PubSub") if isinstance(connection, str) else ""
        self._subscriptions = subscriptions
        self._options = options
        self.connection: psycopg.AsyncConnection[Any] | None = None
        self._buffer: BusNotifications | None = None
        self._io = asyncio.Lock()
        self._kick = asyncio.Event()
        self._closed = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._used_at = 0.0
        self._is_delivering = False
        self._is_broken_amid_transaction = False
        # Whether the pooler is known to give each client its own backend.
        self._is_trusted = False
        self.ended = asyncio.Event()

    # Open and close

    async def open(self) -> None:
        """Connect, unless already connected; raises errors immediately."""
        async with self._io:
            await self._open()

    async def _open(self) -> None:
        self._refuse_closed()
        if self._subscriptions.has_been_connected:
            return
        if self._given is not None:
            self._adopt(self._given)
        else:
            await self._connect()

    def watch(self) -> None:
        """Start the receiving task, unless it is running."""
        if self._worker is None and not self._closed.is_set():
            self._worker = asyncio.create_task(self._work(), name="psqlmessages bus")

    async def close(self) -> None:
        """Release the connection and end the task."""
        self._closed.set()
        self._kick.set()
        try:
            await self._end_worker()
            async with self._io:
                await self._leave()
        finally:
            # Also if the closing task was cancelled, as when an event loop ends.
            await self._finish()

    async def _end_worker(self) -> None:
        if self._worker is None or self._worker is asyncio.current_task():
            return
        if self.connection is None and not self._is_delivering:
            self._worker.cancel()
        _, unfinished = await asyncio.wait({self._worker}, timeout=_CLOSING_SECONDS)
        for worker in unfinished:
            worker.cancel()
            await asyncio.wait({worker})

    async def _leave(self) -> None:
        connection, buffer = self.connection, self._buffer
        if connection is None or buffer is None or connection is not self._given:
            return
        try:
            if not connection.closed:
                script = self._subscriptions.closing()
                # The owner may use the connection for longer.
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await self._drive(connection, buffer, script, _CLOSING_SECONDS)
        except (psycopg.Error, TimeoutError) as error:
            logger.debug("PubSub was closed without UNLISTEN: %s", error)

    async def _finish(self) -> None:
        self.ended.set()
        connection, buffer = self.connection, self._buffer
        self.connection = self._buffer = None
        self._subscriptions.is_connected = False
        self._kick.set()
        if buffer is not None:
            self._detach(buffer)
        if connection is not None and connection is not self._given:
            await connection.close()

    @staticmethod
    def _detach(buffer: BusNotifications) -> None:
        # Before the descriptor is closed: the next connection may get the same number.
        asyncio.get_running_loop().remove_reader(buffer.descriptor)
        buffer.close()

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise NodeClosed("the bus is closed")

    # Called by tasks

    async def run(self, make: MakeScript[T]) -> T:
        """Run a script. While disconnected, wait up to ``reconnect_wait`` for the connection."""
        async with self._io:
            connection, buffer = await self._connected()
            try:
                limit = self._options.answer_timeout.total_seconds()
                return await self._drive(connection, buffer, make(buffer), limit)
            except psycopg.Error as error:
                if broken := is_broken(connection, error):
                    await self._drop_connection(error)
                raise translate_error(error, is_broken=broken) from error
            finally:
                self._used_at = monotonic()
                self._take_in()

    async def require_own_backend(self) -> None:
        """Raise ConnectionShared if a pooler shares the connection: nothing would arrive."""
        if await self.run(BusNotifications.identifying) and not self._is_trusted:
            await asyncio.to_thread(refuse_shared, self._dsn, address_of(self.connection))
            self._is_trusted = True

    @staticmethod
    async def _drive(
        connection: psycopg.AsyncConnection[Any],
        buffer: BusNotifications,
        script: Script[T],
        limit: float,
    ) -> T:
        async with connection.lock:
            try:
                statement = next(script)
                while True:
                    steps = carry_out(connection.pgconn, statement, buffer.encoding)
                    statement = script.send(await connection.wait(bounded(steps, limit)))
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                script.close()

    async def _connected(self) -> tuple[psycopg.AsyncConnection[Any], BusNotifications]:
        await self._open()
        if monotonic() - self._used_at > _STALE_SECONDS:
            # A cheap check whether the server has closed the connection, before anything is sent.
            for _ in range(_STALE_READS):
                if self._buffer is not None and is_readable(self._buffer.descriptor):
                    await self._read_now()
        self._refuse_broken_transaction()
        deadline = monotonic() + self._options.reconnect_wait.total_seconds()
        while self.connection is None or self._buffer is None:
            self._refuse_closed()
            pause = self._subscriptions.next_at() - monotonic()
            if monotonic() + pause > deadline:
                raise ConnectionLost("the bus is not connected")
            if pause > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), pause)
            await self._return_if_due()
        return self.connection, self._buffer

    def _refuse_broken_transaction(self) -> None:
        if self._is_broken_amid_transaction:
            self._is_broken_amid_transaction = False
            raise ConnectionLost("the connection was lost during a transaction: run it again")

    # The task

    async def _work(self) -> None:
        while not self._closed.is_set():
            try:
                await self._turn()
            except Exception as error:  # noqa: BLE001 - logged; the bus continues
                logger.exception("unexpected error in PubSub: reconnecting")
                async with self._io:
                    await self._drop_connection(error)
                    self._subscriptions.backoff.failed(monotonic())

    async def _turn(self) -> None:
        async with self._io:
            if self._closed.is_set():
                return
            until = await self._maintain()
        await self._deliver()
        if until is None:
            await self._pause(monotonic() + _BUSY_SECONDS, None)
        else:
            await self._pause(until, self._buffer)

    async def _maintain(self) -> float | None:
        """Read and do what is due; return the time of the next turn, None if the owner is busy."""
        if self.connection is None:
            await self._return_if_due()
        elif not await self._read_now():
            return None
        await self._keep_alive_if_due()
        return self._subscriptions.next_at()

    async def _pause(self, until: float, buffer: BusNotifications | None) -> None:
        """Wait for a call, the close, the given time or readable data."""
        loop = asyncio.get_running_loop()
        seconds = max(0.0, min(until - monotonic(), _LONGEST_WAIT))
        timer = loop.call_later(seconds, self._kick.set)
        if buffer is not None:
            loop.add_reader(buffer.descriptor, self._kick.set)
        try:
            await self._kick.wait()
        finally:
            timer.cancel()
            if buffer is not None and buffer is self._buffer:
                loop.remove_reader(buffer.descriptor)
        self._kick.clear()

    async def _read_now(self) -> bool:
        """Read available data; False if the owner is using the connection."""
        connection, buffer = self.connection, self._buffer
        if connection is None or buffer is None:
            return True
        try:
            async with asyncio.timeout(_BUSY_SECONDS):
                await connection.lock.acquire()
        except TimeoutError:
            return False
        try:
            if not buffer.is_touchable:
                return False
            was_in_transaction = buffer.is_in_transaction
            buffer.read()
        except psycopg.OperationalError as error:
            self._is_broken_amid_transaction = was_in_transaction
            await self._drop_connection(error)
        finally:
            connection.lock.release()
        self._take_in()
        return True

    def _take_in(self) -> None:
        if (buffer := self._buffer) is None:
            return
        for notification in buffer.take():
            self._subscriptions.feed(notification, buffer.encoding, buffer.process_id)
        if self._subscriptions.inbox:
            self._kick.set()

    async def _keep_alive_if_due(self) -> None:
        connection, buffer = self.connection, self._buffer
        if connection is None or buffer is None:
            return
        if not (buffer.is_idle and self._subscriptions.keep_alive_due(monotonic())):
            return
        limit = self._options.probe_timeout.total_seconds()
        try:
            await self._drive(connection, buffer, self._subscriptions.keeping_alive(), limit)
        except psycopg.Error as error:
            if is_broken(connection, error):
                await self._drop_connection(error)
            else:
                self._subscriptions.log.warning("PubSub keep-alive failed: %s", error)
        self._take_in()

    async def _deliver(self) -> None:
        self._is_delivering = True
        try:
            for handler, event in self._subscriptions.deliveries():
                await self._call(handler, event)
                if self._closed.is_set():
                    return
        finally:
            self._is_delivering = False

    async def _call(self, handler: Handler, event: Event) -> None:
        try:
            result = handler(event)
            if inspect.isawaitable(result):
                await result
        except asyncio.CancelledError as error:
            # Raised by an awaitable of the handler, unless the bus itself is being cancelled.
            if self._worker is None or self._worker.cancelling():
                raise
            self._subscriptions.handler_failed(event, error)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self._subscriptions.handler_failed(event, error)

    # Connecting

    def _adopt(self, given: psycopg.AsyncConnection[Any]) -> None:
        if given.closed:
            raise NodeClosed("the connection given to the bus is closed")
        self._dsn = conninfo(conninfo_of(given), "PubSub")
        self._use(given, BusNotifications(given, self._subscriptions.wants))

    async def _connect(self) -> None:
        try:
            connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        buffer = BusNotifications(connection, self._subscriptions.wants)
        try:
            limit = self._options.answer_timeout.total_seconds()
            await self._drive(connection, buffer, buffer.identifying(), limit)
            await self._drive(connection, buffer, self._subscriptions.opening(), limit)
        except BaseException:
            buffer.close()
            await connection.close()
            raise
        self._use(connection, buffer)

    def _use(self, connection: psycopg.AsyncConnection[Any], buffer: BusNotifications) -> None:
        self.connection, self._buffer = connection, buffer
        self._subscriptions.on_connected(monotonic())
        self._take_in()
        self._kick.set()

    async def _return_if_due(self) -> None:
        if self._subscriptions.next_at() > monotonic():
            return
        try:
            await self._connect()
        except (MessagesError, psycopg.Error) as error:
            self._subscriptions.could_not_return(error, monotonic())

    async def _drop_connection(self, reason: object) -> None:
        connection, buffer = self.connection, self._buffer
        if connection is None or buffer is None:
            return
        if is_closed_by_owner(connection):
            # The owner closed the connection given to the bus, so do not open another one.
            self._closed.set()
            await self._finish()
            return
        self.connection = self._buffer = None
        self._detach(buffer)
        await connection.close()
        self._subscriptions.on_connection_lost(reason, monotonic())
        self._kick.set()
