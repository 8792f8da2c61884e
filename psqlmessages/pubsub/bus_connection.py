"""Connection of a PubSub, and the thread that receives messages and reconnects."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any, TypeVar

import psycopg

from psqlmessages.client.calls import translate_error
from psqlmessages.client.connect import host_and_port, refuse_shared_connections
from psqlmessages.client.connection import (
    CLOSED_CHECK_READS,
    CLOSED_CHECK_SECONDS,
    Waker,
    is_broken,
    is_readable,
    with_time_limit,
)
from psqlmessages.client.options import Options
from psqlmessages.client.transactions import run_steps
from psqlmessages.exceptions import ConnectionLost, MessagesError, NodeClosed, ServerUnreachable
from psqlmessages.pubsub.bus_state import (
    BUSY_SECONDS,
    BusBuffer,
    BusConnectionBase,
    BusState,
    BusStatement,
    Script,
    ScriptFactory,
    logger,
)

T = TypeVar("T")
Buffer = BusBuffer[psycopg.Connection[Any]]
_CLOSING_SECONDS = 5.0


class BusConnection(BusConnectionBase[psycopg.Connection[Any]]):
    """The connection of a :class:`PubSub`; threads may share it.

    ``_io`` protects this object and its I/O. It is acquired before the connection's own lock, which
    the connection's owner uses too.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any] | str,
        state: BusState,
        options: Options,
    ) -> None:
        super().__init__(connection, state, options)
        self._io = threading.RLock()
        self._waker = Waker()
        self._thread: threading.Thread | None = None
        self._calling_thread_id: int | None = None
        self._is_closing = False
        self._is_connecting = False
        self.closed_event = threading.Event()

    def open(self) -> None:
        """Connect, unless already connected; raise an error without another attempt."""
        with self._io:
            self._raise_if_closed()
            if self._state.has_been_connected:
                return
            self._waker.open()
            try:
                if self._owners_connection is not None:
                    self._set_buffer(self._create_owners_buffer())
                else:
                    self._connect()
            except BaseException:
                self._waker.close()
                raise

    def start_receiving(self) -> None:
        """Start the receiving thread, unless it is running."""
        with self._io:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(
                    target=self._run_until_closed, name="psqlmessages bus", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Close or release the connection, and end the thread.

        If a signal handler calls this during a call of the same thread, that call does it at its
        end. An attempt to connect may last as long as ``connect_timeout``: its thread does it then.
        """
        self._is_closing = True
        self._waker.wake()
        if self._is_connecting:
            self.closed_event.set()
            return
        this_thread = threading.current_thread()
        if self._calling_thread_id == this_thread.ident:
            return
        if self._thread is not None and self._thread is not this_thread:
            self._thread.join(_CLOSING_SECONDS)
        with self._io:
            self._disconnect()

    def _disconnect(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            belongs_to_owner = buffer.connection is self._owners_connection
            try:
                if belongs_to_owner and not buffer.connection.closed:
                    script = self._state.unlisten_script()
                    self._run_script(
                        buffer, script, _CLOSING_SECONDS, busy_seconds=_CLOSING_SECONDS
                    )
            except psycopg.Error as error:
                logger.debug("PubSub was closed without UNLISTEN: %s", error)
            buffer.close()
            if not belongs_to_owner:
                buffer.connection.close()
        self._state.is_connected = False
        self._waker.close()
        self.closed_event.set()

    def _raise_if_closed(self) -> None:
        if self._is_closing:
            raise NodeClosed("the bus is closed")

    # Called by threads

    def run(self, create_script: ScriptFactory[T]) -> T:
        """Run a script; if disconnected, first wait up to ``reconnect_wait`` for a connection."""
        with self._io:
            buffer = self._wait_for_connection()
            self._calling_thread_id = threading.get_ident()
            try:
                return self._run_script(buffer, create_script(buffer), self._answer_seconds)
            except psycopg.Error as error:
                is_lost = is_broken(buffer.connection, error)
                if is_lost:
                    self._drop_connection(error)
                raise translate_error(error, is_broken=is_lost) from error
            finally:
                self._calling_thread_id = None
                self._used_at = monotonic()
                self._process_notifications()
                if self._is_closing:
                    self._disconnect()

    def require_own_backend(self) -> None:
        """Raise ConnectionShared if a pooler shares the connection: it loses notifications."""
        has_pooler = self.run(BusBuffer.detect_pooler_script)
        if has_pooler and not self._is_pooler_allowed:
            refuse_shared_connections(self._dsn, host_and_port(self.connection))
            self._is_pooler_allowed = True

    @staticmethod
    def _run_script(
        buffer: Buffer, script: Script[T], seconds: float, *, busy_seconds: float = -1
    ) -> T:
        connection = buffer.connection

        def execute(statement: BusStatement) -> list[str]:
            return connection.wait(with_time_limit(buffer.execute(statement), seconds))

        if not connection.lock.acquire(timeout=busy_seconds):
            raise psycopg.OperationalError("the connection is in use by its owner")
        try:
            return run_steps(script, execute)
        finally:
            connection.lock.release()

    def _wait_for_connection(self) -> Buffer:
        self.open()
        if monotonic() - self._used_at > CLOSED_CHECK_SECONDS:
            # Detect a connection that the server has closed, before sending a statement to it.
            for _ in range(CLOSED_CHECK_READS):
                if self._buffer is not None and is_readable(self._buffer.descriptor):
                    self._read_now()
        self._state.raise_if_transaction_lost()
        deadline = monotonic() + self._options.reconnect_wait.total_seconds()
        while self._buffer is None:
            self._raise_if_closed()
            pause = self._state.due_at() - monotonic()
            if monotonic() + pause > deadline:
                raise ConnectionLost("the bus is not connected")
            if pause > 0:
                self._waker.wait(None, pause)
            self._reconnect_if_due()
        return self._buffer

    def _run_until_closed(self) -> None:
        while not self._is_closing:
            try:
                self._run_once()
            except Exception as error:  # noqa: BLE001 - logged; the bus continues
                logger.exception("unexpected error in PubSub: reconnecting")
                with self._io:
                    self._drop_connection(error)
                    self._state.backoff.record_failure(monotonic())
        self.close()

    def _run_once(self) -> None:
        with self._io:
            if self._is_closing:
                return
            until, descriptor = monotonic() + BUSY_SECONDS, None
            self._reconnect_if_due()
            if self._read_now():
                self._keep_alive_if_due()
                until = self._state.due_at()
                descriptor = self._buffer.descriptor if self._buffer is not None else None
        self._deliver()
        if not self._is_closing and not self._state.inbox:
            self._waker.wait(descriptor, until - monotonic())

    def _read_now(self) -> bool:
        """Read available data; return False if the owner is using the connection."""
        if (buffer := self._buffer) is None:
            return True
        if not buffer.connection.lock.acquire(timeout=BUSY_SECONDS):
            return False
        try:
            if not buffer.can_read:
                return False
            was_in_transaction = buffer.is_in_transaction
            buffer.read()
        except psycopg.OperationalError as error:
            self._state.is_transaction_lost = was_in_transaction
            self._drop_connection(error)
        finally:
            buffer.connection.lock.release()
        self._process_notifications()
        return True

    def _process_notifications(self) -> None:
        self._state.process_notifications(self._buffer)
        if self._state.inbox and threading.current_thread() is not self._thread:
            # The receiving thread waits for the socket, but this thread has already read its data.
            self._waker.wake()

    def _keep_alive_if_due(self) -> None:
        buffer = self._buffer
        if buffer is None or not buffer.is_idle:
            return
        if not self._state.start_keep_alive_if_due(monotonic()):
            return
        seconds = self._options.probe_timeout.total_seconds()
        try:
            self._run_script(buffer, self._state.keep_alive_script(), seconds)
        except psycopg.Error as error:
            if is_broken(buffer.connection, error):
                self._drop_connection(error)
            else:
                self._state.log.warning("PubSub keep-alive failed: %s", error)
        self._process_notifications()

    def _deliver(self) -> None:
        for handler, event in self._state.deliveries():
            try:
                handler(event)
            except BaseException as error:  # noqa: BLE001 - logged and counted, even SystemExit
                self._state.on_handler_failed(event, error)
            if self._is_closing:
                return

    def _connect(self) -> None:
        # `close` sets its flag first and reads this one second, so one of the two sees the other.
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
        except psycopg.OperationalError as error:
            raise ServerUnreachable(f"cannot connect: {str(error).strip()}") from error
        buffer = BusBuffer(connection, self._state.is_subscribed)
        try:
            script = self._state.open_script(buffer)
            self._run_script(buffer, script, self._answer_seconds)
            # A signal handler may have closed the bus during the connection attempt.
            self._raise_if_closed()
        except BaseException:
            buffer.close()
            connection.close()
            raise
        return buffer

    def _set_buffer(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._used_at = monotonic()
        self._state.on_connected(self._used_at)
        self._process_notifications()
        self._waker.wake()

    def _reconnect_if_due(self) -> None:
        if self._buffer is not None or self._state.due_at() > monotonic():
            return
        try:
            self._connect()
        except (MessagesError, psycopg.Error) as error:
            self._state.on_reconnect_failed(error, monotonic())

    def _drop_connection(self, reason: object) -> None:
        if (buffer := self._buffer) is None:
            return
        if buffer.is_closed_by_owner:
            # The owner has closed its connection, so the bus does not open another one.
            self._is_closing = True
            self._disconnect()
            return
        self._buffer = None
        buffer.close()
        buffer.connection.close()
        self._state.on_connection_lost(reason, monotonic())
        self._waker.wake()
