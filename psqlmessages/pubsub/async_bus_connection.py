"""Connection of an AsyncPubSub, and the task that reads and reconnects it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.calls import translate_error
from psqlmessages.client.connect import address_of, refuse_shared
from psqlmessages.client.connection import (
    STALE_READS,
    STALE_SECONDS,
    bounded,
    is_broken,
    is_readable,
)
from psqlmessages.client.options import Options
from psqlmessages.client.transactions import drive_async
from psqlmessages.exceptions import ConnectionLost, MessagesError, NodeClosed, ServerUnreachable
from psqlmessages.pubsub.bus_state import (
    BUSY_SECONDS,
    BusConnectionBase,
    BusNotifications,
    BusStatement,
    Event,
    Handler,
    MakeScript,
    Script,
    Subscriptions,
    logger,
)

T = TypeVar("T")
Buffer = BusNotifications[psycopg.AsyncConnection[Any]]
_CLOSING_SECONDS = 5.0
_LONGEST_WAIT = 24 * 60 * 60.0


class AsyncBusConnection(BusConnectionBase[psycopg.AsyncConnection[Any]]):
    """The connection of an :class:`AsyncPubSub`; tasks may share it.

    Lock order: ``_io``, then the connection's own lock, which its owner uses too.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any] | str,
        subscriptions: Subscriptions,
        options: Options,
    ) -> None:
        super().__init__(connection, subscriptions, options)
        self._io = asyncio.Lock()
        self._wakeup = asyncio.Event()
        self._closed = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._is_delivering = False
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
            self._use(self._adopt(self._given))
        else:
            await self._connect()

    def watch(self) -> None:
        """Start the receiving task, unless it is running."""
        if self._worker is None and not self._closed.is_set():
            self._worker = asyncio.create_task(self._work(), name="psqlmessages bus")

    async def close(self) -> None:
        """Release the connection and end the task."""
        self._closed.set()
        self._wakeup.set()
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
        if self._buffer is None and not self._is_delivering:
            self._worker.cancel()
        _, unfinished = await asyncio.wait({self._worker}, timeout=_CLOSING_SECONDS)
        for worker in unfinished:
            worker.cancel()
            await asyncio.wait({worker})

    async def _leave(self) -> None:
        buffer = self._buffer
        if buffer is None or buffer.connection is not self._given or self._given.closed:
            return
        try:
            # The owner may use the connection for longer.
            async with asyncio.timeout(_CLOSING_SECONDS):
                await self._drive(buffer, self._subscriptions.closing(), _CLOSING_SECONDS)
        except (psycopg.Error, TimeoutError) as error:
            logger.debug("PubSub was closed without UNLISTEN: %s", error)

    async def _finish(self) -> None:
        self.ended.set()
        buffer, self._buffer = self._buffer, None
        self._subscriptions.is_connected = False
        self._wakeup.set()
        if buffer is not None:
            self._detach(buffer)
            if buffer.connection is not self._given:
                await buffer.connection.close()

    @staticmethod
    def _detach(buffer: Buffer) -> None:
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
            buffer = await self._connected()
            try:
                limit = self._options.answer_timeout.total_seconds()
                return await self._drive(buffer, make(buffer), limit)
            except psycopg.Error as error:
                if broken := is_broken(buffer.connection, error):
                    await self._drop_connection(error)
                raise translate_error(error, is_broken=broken) from error
            finally:
                self._used_at = monotonic()
                self._process_notifications()

    async def require_own_backend(self) -> None:
        """Raise ConnectionShared if a pooler shares the connection: nothing would arrive."""
        if await self.run(BusNotifications.identifying) and not self._is_trusted:
            await asyncio.to_thread(refuse_shared, self._dsn, address_of(self.connection))
            self._is_trusted = True

    @staticmethod
    async def _drive(buffer: Buffer, script: Script[T], limit: float) -> T:
        connection = buffer.connection

        def execute(statement: BusStatement) -> Awaitable[list[str]]:
            return connection.wait(bounded(buffer.execute(statement), limit))

        async with connection.lock:
            return await drive_async(script, execute)

    async def _connected(self) -> Buffer:
        await self._open()
        if monotonic() - self._used_at > STALE_SECONDS:
            # A cheap check whether the server has closed the connection, before anything is sent.
            for _ in range(STALE_READS):
                if self._buffer is not None and is_readable(self._buffer.descriptor):
                    await self._read_now()
        self._subscriptions.raise_if_transaction_lost()
        deadline = monotonic() + self._options.reconnect_wait.total_seconds()
        while self._buffer is None:
            self._refuse_closed()
            pause = self._subscriptions.next_at() - monotonic()
            if monotonic() + pause > deadline:
                raise ConnectionLost("the bus is not connected")
            if pause > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), pause)
            await self._reconnect_if_due()
        return self._buffer

    # The task

    async def _work(self) -> None:
        while not self._closed.is_set():
            try:
                await self._run_once()
            except Exception as error:  # noqa: BLE001 - logged; the bus continues
                logger.exception("unexpected error in PubSub: reconnecting")
                async with self._io:
                    await self._drop_connection(error)
                    self._subscriptions.backoff.failed(monotonic())

    async def _run_once(self) -> None:
        async with self._io:
            if self._closed.is_set():
                return
            until = await self._maintain()
        await self._deliver()
        if until is None:
            await self._pause(monotonic() + BUSY_SECONDS, None)
        else:
            await self._pause(until, self._buffer)

    async def _maintain(self) -> float | None:
        """Read and do what is due; return the time of the next turn, None if the owner is busy."""
        if self._buffer is None:
            await self._reconnect_if_due()
        elif not await self._read_now():
            return None
        await self._keep_alive_if_due()
        return self._subscriptions.next_at()

    async def _pause(self, until: float, buffer: Buffer | None) -> None:
        """Wait for a call, the close, the given time or readable data."""
        loop = asyncio.get_running_loop()
        seconds = max(0.0, min(until - monotonic(), _LONGEST_WAIT))
        timer = loop.call_later(seconds, self._wakeup.set)
        if buffer is not None:
            loop.add_reader(buffer.descriptor, self._wakeup.set)
        try:
            await self._wakeup.wait()
        finally:
            timer.cancel()
            if buffer is not None and buffer is self._buffer:
                loop.remove_reader(buffer.descriptor)
        self._wakeup.clear()

    async def _read_now(self) -> bool:
        """Read available data; False if the owner is using the connection."""
        if (buffer := self._buffer) is None:
            return True
        try:
            async with asyncio.timeout(BUSY_SECONDS):
                await buffer.connection.lock.acquire()
        except TimeoutError:
            return False
        try:
            if not buffer.is_touchable:
                return False
            was_in_transaction = buffer.is_in_transaction
            buffer.read()
        except psycopg.OperationalError as error:
            self._subscriptions.is_transaction_lost = was_in_transaction
            await self._drop_connection(error)
        finally:
            buffer.connection.lock.release()
        self._process_notifications()
        return True

    def _process_notifications(self) -> None:
        self._subscriptions.feed_all(self._buffer)
        if self._subscriptions.inbox:
            self._wakeup.set()

    async def _keep_alive_if_due(self) -> None:
        buffer = self._buffer
        if buffer is None or not buffer.is_idle:
            return
        if not self._subscriptions.keep_alive_due(monotonic()):
            return
        limit = self._options.probe_timeout.total_seconds()
        try:
            await self._drive(buffer, self._subscriptions.keeping_alive(), limit)
        except psycopg.Error as error:
            if is_broken(buffer.connection, error):
                await self._drop_connection(error)
            else:
                self._subscriptions.log.warning("PubSub keep-alive failed: %s", error)
        self._process_notifications()

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
        except (Exception, asyncio.CancelledError) as error:
            is_ending = self._worker is None or self._worker.cancelling()
            if isinstance(error, asyncio.CancelledError) and is_ending:
                raise
            self._subscriptions.handler_failed(event, error)

    # Connecting

    async def _connect(self) -> None:
        try:
            connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        buffer = BusNotifications(connection, self._subscriptions.wants)
        try:
            limit = self._options.answer_timeout.total_seconds()
            await self._drive(buffer, self._subscriptions.opening(buffer), limit)
        except BaseException:
            buffer.close()
            await connection.close()
            raise
        self._use(buffer)

    def _use(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._subscriptions.on_connected(monotonic())
        self._process_notifications()
        self._wakeup.set()

    async def _reconnect_if_due(self) -> None:
        if self._subscriptions.next_at() > monotonic():
            return
        try:
            await self._connect()
        except (MessagesError, psycopg.Error) as error:
            self._subscriptions.on_reconnect_failed(error, monotonic())

    async def _drop_connection(self, reason: object) -> None:
        if (buffer := self._buffer) is None:
            return
        if buffer.is_closed_by_owner:
            # The owner closed the connection given to the bus, so do not open another one.
            self._closed.set()
            await self._finish()
            return
        self._buffer = None
        self._detach(buffer)
        await buffer.connection.close()
        self._subscriptions.on_connection_lost(reason, monotonic())
        self._wakeup.set()
