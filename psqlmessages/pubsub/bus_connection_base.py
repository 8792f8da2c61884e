"""Common base of BusConnection and AsyncBusConnection: reading, keep-alive and reconnecting."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.conninfo import make_conninfo

from psqlmessages.client.calls import translate_error
from psqlmessages.client.connection import (
    CLOSED_CHECK_READS,
    CLOSED_CHECK_SECONDS,
    is_broken,
    is_readable,
)
from psqlmessages.client.options import Options, complete_conninfo
from psqlmessages.exceptions import ConnectionLost, MessagesError, NodeClosed
from psqlmessages.pubsub.bus_state import BusBuffer, BusState, ConnectionT, Script, ScriptFactory

T = TypeVar("T")
# A generator that yields functions to call, receives their results, and returns a result of its
# own. In AsyncBusConnection, the functions are coroutine functions.
Steps = Generator[Callable[[], Any], Any, T]


class BusConnectionBase(Generic[ConnectionT]):
    """Common part of the connections of PubSub and AsyncPubSub.

    A given connection belongs to the program, which continues to use it. The lock ``_io`` of a
    subclass protects the object and its I/O. ``_io`` is acquired before psycopg's lock of the
    connection, which statements of the program acquire too. ``run_steps`` and ``run_steps_async``
    run the generators while the thread or task has ``_io``.
    """

    # Methods of the subclasses that the generators yield.
    _connect: Callable[[], Any]
    _disconnect: Callable[[], Any]
    _close_buffer: Callable[[BusBuffer[ConnectionT]], Any]
    _acquire_lock: Callable[[BusBuffer[ConnectionT]], Any]
    _run_script: Callable[[BusBuffer[ConnectionT], Script[Any], float], Any]
    _wait_for_close: Callable[[float], Any]
    # Other methods of the subclasses.
    _raise_if_closed: Callable[[], None]
    _process_notifications: Callable[[], None]
    _wake_receiver: Callable[[], None]

    def __init__(self, connection: ConnectionT | str, state: BusState, options: Options) -> None:
        self._given_connection = None if isinstance(connection, str) else connection
        self._dsn = complete_conninfo(connection, "PubSub") if isinstance(connection, str) else ""
        self._state = state
        self._options = options
        self._answer_seconds = options.answer_timeout.total_seconds()
        self._buffer: BusBuffer[ConnectionT] | None = None
        self._used_at = 0.0
        # Whether the connection was lost within a transaction, and the next call must report this.
        self._is_transaction_lost = False
        # Whether a check has shown that the pooler gives each client its own backend.
        self._is_pooler_allowed = False

    @property
    def connection(self) -> ConnectionT | None:
        """The current connection; None while disconnected."""
        return self._buffer.connection if self._buffer is not None else None

    def _create_given_buffer(self) -> BusBuffer[ConnectionT]:
        """Create the buffer of the given connection; store the parameters for reconnecting."""
        connection = self._given_connection
        if connection is None or connection.closed:
            raise NodeClosed("the connection given to the bus is closed")
        parameters: dict[str, Any] = dict(connection.info.get_parameters())
        dsn = make_conninfo(**parameters, password=connection.info.password or None)
        self._dsn = complete_conninfo(dsn, "PubSub")
        return BusBuffer(connection, self._state.is_subscribed)

    def _set_buffer(self, buffer: BusBuffer[ConnectionT]) -> None:
        self._buffer = buffer
        self._used_at = monotonic()
        self._state.on_connected(self._used_at)
        self._process_notifications()
        self._wake_receiver()

    def _wait_for_connection(self) -> Steps[BusBuffer[ConnectionT]]:
        """Return the current buffer; if there is none, wait up to ``reconnect_wait`` for one."""
        if monotonic() - self._used_at > CLOSED_CHECK_SECONDS:
            # Detect a connection that the server has closed, before sending a statement to it.
            for _ in range(CLOSED_CHECK_READS):
                if self._buffer is not None and is_readable(self._buffer.descriptor):
                    yield from self._read_now()
        if self._is_transaction_lost:
            self._is_transaction_lost = False
            raise ConnectionLost("the connection was lost during a transaction: run it again")
        deadline = monotonic() + self._options.reconnect_wait.total_seconds()
        while self._buffer is None:
            self._raise_if_closed()
            pause = self._state.next_action_at() - monotonic()
            if monotonic() + pause > deadline:
                raise ConnectionLost("the bus is not connected")
            if pause > 0:
                yield partial(self._wait_for_close, pause)
            yield from self._reconnect_if_due()
        return self._buffer

    def _run_call(self, create_script: ScriptFactory[T]) -> Steps[T]:
        """Run a script; if the connection is lost, drop it and raise ConnectionLost."""
        buffer = yield from self._wait_for_connection()
        script = create_script(buffer)
        try:
            result: T = yield partial(self._run_script, buffer, script, self._answer_seconds)
        except psycopg.Error as error:
            is_lost = is_broken(buffer.connection, error)
            if is_lost:
                yield from self._drop_connection(error)
            raise translate_error(error, is_broken=is_lost) from error
        else:
            return result
        finally:
            self._used_at = monotonic()
            self._process_notifications()

    def _receive(self) -> Steps[bool]:
        """Reconnect or keep alive if due, and read; return False if the program prevents it."""
        yield from self._reconnect_if_due()
        is_read = yield from self._read_now()
        if is_read:
            yield from self._keep_alive_if_due()
        return is_read

    def _read_now(self) -> Steps[bool]:
        """Read available data; return False if the program is using the connection."""
        if (buffer := self._buffer) is None:
            return True
        if not (yield partial(self._acquire_lock, buffer)):
            return False
        try:
            if not buffer.can_read:
                return False
            was_in_transaction = buffer.is_in_transaction
            buffer.read()
        except psycopg.OperationalError as error:
            self._is_transaction_lost = was_in_transaction
            yield from self._drop_connection(error)
        finally:
            buffer.connection.lock.release()
        self._process_notifications()
        return True

    def _keep_alive_if_due(self) -> Steps[None]:
        buffer = self._buffer
        if buffer is None or not (buffer.is_idle and self._state.advance_keep_alive(monotonic())):
            return
        seconds = self._options.probe_timeout.total_seconds()
        try:
            yield partial(self._run_script, buffer, self._state.keep_alive_script(), seconds)
        except psycopg.Error as error:
            if is_broken(buffer.connection, error):
                yield from self._drop_connection(error)
            else:
                self._state.log.warning("PubSub keep-alive failed: %s", error)
        self._process_notifications()

    def _reconnect_if_due(self) -> Steps[None]:
        if self._buffer is not None or self._state.next_action_at() > monotonic():
            return
        try:
            yield self._connect
        except (MessagesError, psycopg.Error) as error:
            self._state.on_reconnect_failed(error, monotonic())

    def _drop_connection(self, reason: object) -> Steps[None]:
        if (buffer := self._buffer) is None:
            return
        if buffer.connection.closed and not buffer.connection.broken:
            # The program has closed its connection, so close the bus instead of reconnecting.
            yield self._disconnect
            return
        self._buffer = None
        yield partial(self._close_buffer, buffer)
        self._state.on_connection_lost(reason, monotonic())
        self._wake_receiver()
