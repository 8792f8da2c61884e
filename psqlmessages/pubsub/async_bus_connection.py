"""Connection of an AsyncPubSub, and the task that receives messages and reconnects."""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import Awaitable
from time import monotonic
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.connect import host_and_port, refuse_shared_connections
from psqlmessages.client.connection import MAX_WAIT_SECONDS, with_time_limit
from psqlmessages.client.options import Options
from psqlmessages.client.transactions import SqlStatement, run_steps_async
from psqlmessages.exceptions import NodeClosed, ServerUnreachable
from psqlmessages.pubsub.bus_connection_base import BusConnectionBase
from psqlmessages.pubsub.bus_state import (
    BUSY_SECONDS,
    BusBuffer,
    BusState,
    Event,
    Handler,
    Script,
    ScriptFactory,
    logger,
)
from psqlmessages.retry import wait_for_event

T = TypeVar("T")
Buffer = BusBuffer[psycopg.AsyncConnection[Any]]
_CLOSING_SECONDS = 5.0


class AsyncBusConnection(BusConnectionBase[psycopg.AsyncConnection[Any]]):
    """The connection of an :class:`AsyncPubSub`; tasks may share it."""

    def __init__(
        self, connection: psycopg.AsyncConnection[Any] | str, state: BusState, options: Options
    ) -> None:
        super().__init__(connection, state, options)
        self._io = asyncio.Lock()
        self._wakeup = asyncio.Event()
        self._wake_receiver = self._wakeup.set
        self._close_requested = asyncio.Event()
        self._receiver: asyncio.Task[None] | None = None
        self._is_delivering = False
        self.closed_event = asyncio.Event()

    async def open(self) -> None:
        """Connect, unless the bus has already been connected; do not retry after an error."""
        async with self._io:
            await self._open()

    async def _open(self) -> None:
        self._raise_if_closed()
        if self._state.has_been_connected:
            return
        if self._given_connection is not None:
            self._set_buffer(self._create_given_buffer())
        else:
            await self._connect()

    def start_receiving(self) -> None:
        """Start the receiving task, unless it is running or the bus is closed."""
        if self._receiver is None and not self._close_requested.is_set():
            self._receiver = asyncio.create_task(self._run_until_closed(), name="psqlmessages bus")

    async def close(self) -> None:
        """End the task and disconnect. On a given connection, only stop listening."""
        self._close_requested.set()
        self._wake_receiver()
        try:
            await self._stop_receiver()
            async with self._io:
                await self._unlisten()
        finally:
            # Disconnect even if this task is cancelled, for instance at the end of its event loop.
            await self._disconnect()

    async def _stop_receiver(self) -> None:
        if self._receiver is None or self._receiver is asyncio.current_task():
            return
        if self._buffer is None and not self._is_delivering:
            # An attempt to connect may last as long as `connect_timeout`.
            self._receiver.cancel()
        _, unfinished = await asyncio.wait({self._receiver}, timeout=_CLOSING_SECONDS)
        for receiver in unfinished:
            receiver.cancel()
            await asyncio.wait({receiver})

    async def _unlisten(self) -> None:
        buffer = self._buffer
        if buffer is None or buffer.connection is not self._given_connection:
            return
        if buffer.connection.closed:
            return
        try:
            # The program may hold the lock of its connection for longer.
            async with asyncio.timeout(_CLOSING_SECONDS):
                await self._run_script(buffer, self._state.unlisten_script(), _CLOSING_SECONDS)
        except (psycopg.Error, TimeoutError) as error:
            logger.debug("PubSub was closed without UNLISTEN: %s", error)

    async def _disconnect(self) -> None:
        self._close_requested.set()
        self.closed_event.set()
        buffer, self._buffer = self._buffer, None
        self._state.is_connected = False
        self._wake_receiver()
        if buffer is not None and buffer.connection is not self._given_connection:
            await self._close_buffer(buffer)
        elif buffer is not None:
            self._detach(buffer)

    async def _close_buffer(self, buffer: Buffer) -> None:
        self._detach(buffer)
        await buffer.connection.close()

    @staticmethod
    def _detach(buffer: Buffer) -> None:
        # Remove the reader before closing the descriptor: a new connection may get the same number.
        asyncio.get_running_loop().remove_reader(buffer.descriptor)
        buffer.close()

    def _raise_if_closed(self) -> None:
        if self._close_requested.is_set():
            raise NodeClosed("the bus is closed")

    async def _wait_for_close(self, seconds: float) -> None:
        await wait_for_event(self._close_requested, seconds)

    @staticmethod
    async def _acquire_lock(buffer: Buffer) -> bool:
        try:
            async with asyncio.timeout(BUSY_SECONDS):
                return await buffer.connection.lock.acquire()
        except TimeoutError:
            return False

    # Calls

    async def run(self, create_script: ScriptFactory[T]) -> T:
        """Run a script; if disconnected, first wait up to ``reconnect_wait`` for a connection."""
        async with self._io:
            await self._open()
            return await run_steps_async(self._run_call(create_script), operator.call)

    async def require_own_backend(self) -> None:
        """See :meth:`BusConnection.require_own_backend`."""
        has_pooler = await self.run(BusBuffer.detect_pooler_script)
        if has_pooler and not self._is_pooler_allowed:
            await asyncio.to_thread(
                refuse_shared_connections, self._dsn, host_and_port(self.connection)
            )
            self._is_pooler_allowed = True

    @staticmethod
    async def _run_script(buffer: Buffer, script: Script[T], seconds: float) -> T:
        connection = buffer.connection

        def execute(statement: SqlStatement) -> Awaitable[list[str]]:
            return connection.wait(with_time_limit(buffer.execute(statement), seconds))

        async with connection.lock:
            return await run_steps_async(script, execute)

    # Receiving task

    async def _run_until_closed(self) -> None:
        while not self._close_requested.is_set():
            try:
                await self._run_once()
            except Exception as error:  # noqa: BLE001 - logged; the bus continues
                logger.exception("unexpected error in PubSub: reconnecting")
                async with self._io:
                    await run_steps_async(self._drop_connection(error), operator.call)
                    self._state.backoff.record_failure(monotonic())

    async def _run_once(self) -> None:
        async with self._io:
            if self._close_requested.is_set():
                return
            is_read = await run_steps_async(self._receive(), operator.call)
        await self._deliver()
        if is_read:
            await self._pause(self._state.next_action_at(), self._buffer)
        else:
            await self._pause(monotonic() + BUSY_SECONDS, None)

    async def _pause(self, deadline: float, buffer: Buffer | None) -> None:
        """Wait until ``_wakeup`` is set, ``deadline`` has passed, or the connection has data."""
        loop = asyncio.get_running_loop()
        seconds = max(0.0, min(deadline - monotonic(), MAX_WAIT_SECONDS))
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

    def _process_notifications(self) -> None:
        self._state.process_notifications(self._buffer)
        if self._state.inbox:
            self._wake_receiver()

    async def _deliver(self) -> None:
        self._is_delivering = True
        try:
            for handler, event in self._state.deliveries():
                await self._call(handler, event)
                if self._close_requested.is_set():
                    return
        finally:
            self._is_delivering = False

    async def _call(self, handler: Handler, event: Event) -> None:
        try:
            result = handler(event)
            if inspect.isawaitable(result):
                await result
        except (Exception, asyncio.CancelledError) as error:
            is_cancelled = self._receiver is None or self._receiver.cancelling()
            if isinstance(error, asyncio.CancelledError) and is_cancelled:
                raise
            self._state.on_handler_failed(event, error)

    async def _connect(self) -> None:
        try:
            connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
            buffer = BusBuffer(connection, self._state.is_subscribed)
            try:
                script = self._state.open_script(buffer)
                await self._run_script(buffer, script, self._answer_seconds)
                # `close` may have been cancelled while it waited for `_io`. Then it has already
                # disconnected, and would not close this connection.
                self._raise_if_closed()
            except BaseException:
                await self._close_buffer(buffer)
                raise
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        self._set_buffer(buffer)
