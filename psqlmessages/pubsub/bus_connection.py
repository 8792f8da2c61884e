"""Connection of a PubSub, and the thread that receives messages and reconnects."""

from __future__ import annotations

import operator
import threading
from time import monotonic
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.connect import host_and_port, refuse_shared_connections
from psqlmessages.client.connection import Waker, with_time_limit
from psqlmessages.client.options import Options
from psqlmessages.client.transactions import SqlStatement, run_steps
from psqlmessages.exceptions import NodeClosed, ServerUnreachable
from psqlmessages.pubsub.bus_connection_base import BusConnectionBase
from psqlmessages.pubsub.bus_state import (
    BUSY_SECONDS,
    BusBuffer,
    BusState,
    Script,
    ScriptFactory,
    logger,
)

T = TypeVar("T")
Buffer = BusBuffer[psycopg.Connection[Any]]
_CLOSING_SECONDS = 5.0


class BusConnection(BusConnectionBase[psycopg.Connection[Any]]):
    """The connection of a :class:`PubSub`; threads may share it."""

    def __init__(
        self, connection: psycopg.Connection[Any] | str, state: BusState, options: Options
    ) -> None:
        super().__init__(connection, state, options)
        self._io = threading.RLock()
        self._waker = Waker()
        self._wake_receiver = self._waker.wake
        self._receiver: threading.Thread | None = None
        self._calling_thread_id: int | None = None
        self._is_closing = False
        self._is_connecting = False
        self.closed_event = threading.Event()

    def open(self) -> None:
        """Connect, unless the bus has already been connected; do not retry after an error."""
        with self._io:
            self._raise_if_closed()
            if self._state.has_been_connected:
                return
            self._waker.open()
            try:
                if self._given_connection is not None:
                    self._set_buffer(self._create_given_buffer())
                else:
                    self._connect()
            except BaseException:
                self._waker.close()
                raise

    def start_receiving(self) -> None:
        """Start the receiving thread, unless it is running or the bus is closed."""
        with self._io:
            if self._receiver is None and not self._is_closing:
                self._receiver = threading.Thread(
                    target=self._run_until_closed, name="psqlmessages bus", daemon=True
                )
                self._receiver.start()

    def close(self) -> None:
        """End the thread and disconnect. On a given connection, only stop listening.

        If a signal handler interrupts a call and closes the bus, the call disconnects at its end.
        If the bus is connecting, do not wait: that attempt disconnects at its end, after at most
        ``connect_timeout``.
        """
        self._is_closing = True
        self._wake_receiver()
        if self._is_connecting:
            self.closed_event.set()
            return
        this_thread = threading.current_thread()
        if self._calling_thread_id == this_thread.ident:
            return
        if self._receiver is not None and self._receiver is not this_thread:
            self._receiver.join(_CLOSING_SECONDS)
        with self._io:
            self._disconnect()

    def _disconnect(self) -> None:
        self._is_closing = True
        buffer, self._buffer = self._buffer, None
        if buffer is not None and buffer.connection is not self._given_connection:
            self._close_buffer(buffer)
        elif buffer is not None:
            try:
                if not buffer.connection.closed:
                    script = self._state.unlisten_script()
                    self._run_script(
                        buffer, script, _CLOSING_SECONDS, busy_seconds=_CLOSING_SECONDS
                    )
            except psycopg.Error as error:
                logger.debug("PubSub was closed without UNLISTEN: %s", error)
            buffer.close()
        self._state.is_connected = False
        self._waker.close()
        self.closed_event.set()

    @staticmethod
    def _close_buffer(buffer: Buffer) -> None:
        buffer.close()
        buffer.connection.close()

    def _raise_if_closed(self) -> None:
        if self._is_closing:
            raise NodeClosed("the bus is closed")

    def _wait_for_close(self, seconds: float) -> None:
        self._waker.wait(None, seconds)

    @staticmethod
    def _acquire_lock(buffer: Buffer) -> bool:
        return buffer.connection.lock.acquire(timeout=BUSY_SECONDS)

    # Calls

    def run(self, create_script: ScriptFactory[T]) -> T:
        """Run a script; if disconnected, first wait up to ``reconnect_wait`` for a connection."""
        with self._io:
            self.open()
            self._calling_thread_id = threading.get_ident()
            try:
                return run_steps(self._run_call(create_script), operator.call)
            finally:
                self._calling_thread_id = None
                if self._is_closing:
                    self._disconnect()

    def require_own_backend(self) -> None:
        """Raise ConnectionShared if a pooler shares connections: notifications would be lost."""
        has_pooler = self.run(BusBuffer.detect_pooler_script)
        if has_pooler and not self._is_pooler_allowed:
            refuse_shared_connections(self._dsn, host_and_port(self.connection))
            self._is_pooler_allowed = True

    @staticmethod
    def _run_script(
        buffer: Buffer, script: Script[T], seconds: float, *, busy_seconds: float = -1
    ) -> T:
        connection = buffer.connection

        def execute(statement: SqlStatement) -> list[str]:
            return connection.wait(with_time_limit(buffer.execute(statement), seconds))

        if not connection.lock.acquire(timeout=busy_seconds):
            raise psycopg.OperationalError(
                "the program is using the connection that it gave to the bus"
            )
        try:
            return run_steps(script, execute)
        finally:
            connection.lock.release()

    # Receiving thread

    def _run_until_closed(self) -> None:
        while not self._is_closing:
            try:
                self._run_once()
            except Exception as error:  # noqa: BLE001 - logged; the bus continues
                logger.exception("unexpected error in PubSub: reconnecting")
                with self._io:
                    run_steps(self._drop_connection(error), operator.call)
                    self._state.backoff.record_failure(monotonic())
        self.close()

    def _run_once(self) -> None:
        with self._io:
            if self._is_closing:
                return
            until, descriptor = monotonic() + BUSY_SECONDS, None
            if run_steps(self._receive(), operator.call):
                until = self._state.next_action_at()
                descriptor = self._buffer.descriptor if self._buffer is not None else None
        self._deliver()
        if not self._is_closing and not self._state.inbox:
            self._waker.wait(descriptor, until - monotonic())

    def _process_notifications(self) -> None:
        self._state.process_notifications(self._buffer)
        if self._state.inbox and threading.current_thread() is not self._receiver:
            # The receiving thread waits for the socket, whose data this thread has already read.
            self._wake_receiver()

    def _deliver(self) -> None:
        for handler, event in self._state.deliveries():
            try:
                handler(event)
            except BaseException as error:  # noqa: BLE001 - logged and counted, even SystemExit
                self._state.on_handler_failed(event, error)
            if self._is_closing:
                return

    def _connect(self) -> None:
        # `close` sets `_is_closing`, then reads this flag. This function sets this flag, then reads
        # `_is_closing`. So at least one of them sees the flag of the other function.
        self._is_connecting = True
        try:
            self._raise_if_closed()
            self._set_buffer(self._connect_buffer())
        finally:
            self._is_connecting = False
            if self._is_closing:
                self._disconnect()

    def _connect_buffer(self) -> Buffer:
        try:
            connection = psycopg.Connection.connect(self._dsn, autocommit=True)
            buffer = BusBuffer(connection, self._state.is_subscribed)
            try:
                script = self._state.open_script(buffer)
                self._run_script(buffer, script, self._answer_seconds)
                # A signal handler may have closed the bus during the connection attempt.
                self._raise_if_closed()
            except BaseException:
                self._close_buffer(buffer)
                raise
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        return buffer
