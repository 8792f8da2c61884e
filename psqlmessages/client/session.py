"""Session of a Node: runs calls, waits for notifications, reconnects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Any, TypeVar

import psycopg

from psqlmessages.client import calls
from psqlmessages.client.calls import Call
from psqlmessages.client.connect import Connector
from psqlmessages.client.connection import (
    STALE_READS,
    STALE_SECONDS,
    Connection,
    NotificationBuffer,
    Waker,
    is_broken,
    is_readable,
)
from psqlmessages.client.node_state import (
    IDENT_RETRY_SECONDS,
    IDENT_WAIT_SECONDS,
    NodeState,
    logger,
)
from psqlmessages.client.options import Options
from psqlmessages.client.transactions import (
    Steps,
    TransactionCall,
    Wait,
    run_steps,
    run_transaction,
)
from psqlmessages.exceptions import ConnectionLost, IdentTaken, MessagesError, NodeClosed

T = TypeVar("T")

_CLOSING_SECONDS = 5.0


class NodeSession:
    """The connection of a :class:`Node`; threads may share it.

    If several threads wait, one reads for all. Lock order: ``_io``, then ``_reader_changed``.
    """

    def __init__(self, conninfo: str, state: NodeState, options: Options) -> None:
        self._connector = Connector(conninfo, options.answer_timeout)
        self._state = state
        self._options = options
        self.connection: Connection | None = None
        self.buffer: NotificationBuffer | None = None
        self._io = threading.RLock()
        self._reader_changed = threading.Condition()
        self._reader_thread_id: int | None = None
        self._calling_thread_id: int | None = None
        self._waker = Waker()
        self._used_at = 0.0
        self._is_closing = False
        self.is_closed = False

    def open(self) -> None:
        """Connect and register; retry only while the name is taken, and only for a moment."""
        with self._io:
            self._raise_if_closed()
            if self.connection is not None:
                return
            self._waker.open()
            try:
                self._open()
            except BaseException:
                self._waker.close()
                raise

    def _open(self) -> None:
        deadline = monotonic() + IDENT_WAIT_SECONDS
        while True:
            try:
                return self._connect()
            except IdentTaken:
                if monotonic() > deadline or self._state.is_stopped:
                    raise
            self._waker.wait(None, IDENT_RETRY_SECONDS)

    def stop(self) -> None:
        """End all waits immediately; callable from any thread and from signal handlers."""
        self._state.is_stopped = True
        self._waker.wake()
        with self._reader_changed:
            self._reader_changed.notify_all()

    def close(self) -> None:
        """Stop, deregister and disconnect; within a call or wait of this thread, when it ends."""
        self._is_closing = True
        self.stop()
        if threading.get_ident() in (self._reader_thread_id, self._calling_thread_id):
            return
        with self._reader_changed:
            self._reader_changed.wait_for(lambda: self._reader_thread_id is None, _CLOSING_SECONDS)
        with self._io:
            self._disconnect()

    def _disconnect(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.answer_seconds = _CLOSING_SECONDS
            try:
                for call in self._state.deregister_calls():
                    self._execute_call(connection, call)
            except (MessagesError, psycopg.Error) as error:
                logger.debug("%s: closed without deinit: %s", self._state.ident, error)
            connection.close()
        self._state.heartbeat.is_connected = False
        self._waker.close()

    def _raise_if_closed(self) -> None:
        if self.is_closed or self._is_closing:
            raise NodeClosed(f"node {self._state.ident} is closed")

    def run(self, call: Call[T]) -> T:
        """Run one call; without a connection, wait up to ``reconnect_wait`` for the next one."""
        with self._io:
            return self._run_on(self._wait_for_connection(), call)

    def run_within(self, seconds: float, call: Call[T]) -> T:
        """Run one call with a time limit of ``seconds``, at least ``probe_timeout``."""
        seconds = max(seconds, self._options.probe_timeout.total_seconds())
        until = monotonic() + seconds
        # Another thread may hold the lock for longer if the network stalls.
        if not self._io.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise ConnectionLost(f"node {self._state.ident} got no answer from the server")
        try:
            connection = self._wait_for_connection(until)
            with connection.limit_answers(seconds):
                return self._run_on(connection, call)
        finally:
            self._io.release()

    def _run_on(self, connection: Connection, call: Call[T]) -> T:
        try:
            self._calling_thread_id = threading.get_ident()
            self._state.counters.calls += 1
            answer = self._execute_call(connection, call)
            if call.must_follow_events:
                self._process_notifications()
            self._state.on_call_succeeded(call, answer)
        except ConnectionLost as error:
            self._drop_connection(error)
            raise
        finally:
            self._calling_thread_id = None
            self._used_at = monotonic()
            self._process_notifications()
            if self._is_closing:
                self._disconnect()
        return answer

    @staticmethod
    def _execute_call(connection: Connection, call: Call[T]) -> T:
        try:
            if isinstance(call, TransactionCall):
                result: T = run_transaction(connection, call.script())
                return result
            if call.is_prepared:
                return call.read(connection.execute_prepared(call.sql, call.params))
            row = connection.execute(call.sql, call.params).fetchone()
        except psycopg.Error as error:
            raise calls.translate_error(error, is_broken=is_broken(connection, error)) from error
        return call.read(row[0] if row else None)

    def run_steps(self, steps: Steps[T]) -> T:
        """Run the calls and waits that a generator yields; return its result."""
        return run_steps(steps, self._run_step)

    def _run_step(self, step: Call[Any] | Wait) -> Any:
        if isinstance(step, Wait):
            return self.wait(step.is_ready, step.deadline)
        return self.run(step)

    def wake(self) -> None:
        """Make waiting threads check whether they are ready."""
        self._waker.wake()

    def wait(
        self, is_ready: Callable[[], object], deadline: float, *, limits_heartbeat: bool = False
    ) -> None:
        """Wait until something is ready, the deadline has passed, or the node is stopped.

        With ``limits_heartbeat``, housekeeping and probes also end at the deadline, but have at
        least ``probe_timeout``.
        """
        while not (is_ready() or self._state.is_stopped):
            try:
                if self._become_reader(is_ready, deadline):
                    self._read(is_ready, deadline, limits_heartbeat=limits_heartbeat)
            finally:
                # Ctrl-C may interrupt at any point.
                self._stop_reading()
            if monotonic() >= deadline:
                return

    def _become_reader(self, is_ready: Callable[[], object], deadline: float) -> bool:
        """Become the thread that reads for all, or wait until that thread has read something."""
        with self._reader_changed:
            if is_ready() or self._state.is_stopped:
                return False
            if self._reader_thread_id is None:
                self._reader_thread_id = threading.get_ident()
                return True
            self._reader_changed.wait(max(0.0, min(deadline - monotonic(), STALE_SECONDS)))
            return False

    def _stop_reading(self) -> None:
        if self._reader_thread_id != threading.get_ident():
            return
        with self._reader_changed:
            self._reader_thread_id = None
            self._reader_changed.notify_all()
        if self._is_closing:
            self.close()

    def _read(
        self, is_ready: Callable[[], object], deadline: float, *, limits_heartbeat: bool
    ) -> None:
        with self._io:
            if self._state.is_stopped:
                return
            if self.connection is None:
                until = self._state.backoff.next_at
                if until <= monotonic():
                    self._try_to_connect()
                    return
                descriptor = None
            else:
                self._run_due_calls(self.connection, deadline if limits_heartbeat else inf)
                if self.connection is None or is_ready():
                    return
                descriptor = self.connection.fileno()
                until = self._state.heartbeat.next_at()
        if self._waker.wait(descriptor, min(until, deadline) - monotonic()):
            with self._io:
                self._read_now()

    def _read_now(self) -> None:
        if self.buffer is None or self.connection is None:
            return
        try:
            self.buffer.read()
        except psycopg.OperationalError as error:
            self._drop_connection(error)
        self._process_notifications()

    def _process_notifications(self) -> None:
        if not self.buffer:
            return
        self._state.receive(self.buffer.take())
        if self._reader_thread_id not in (None, threading.get_ident()):
            # The reading thread waits for data that this thread has already read.
            self._waker.wake()

    def _run_due_calls(self, connection: Connection, deadline: float) -> None:
        now = monotonic()
        seconds = max(deadline - now, self._options.probe_timeout.total_seconds())
        try:
            with connection.limit_answers(min(seconds, self._state.heartbeat.answer_seconds)):
                for call in self._state.due_calls(now):
                    self._run_on(connection, call)
        except ConnectionLost as error:
            self._drop_connection(error)
        except (MessagesError, psycopg.Error) as error:
            self._state.on_evaluation_failed(error, now)

    def _wait_for_connection(self, until: float = inf) -> Connection:
        self._raise_if_closed()
        if monotonic() - self._used_at > STALE_SECONDS:
            # A cheap way to detect that the server is gone, before anything is sent.
            for _ in range(STALE_READS):
                if self.connection is not None and is_readable(self.connection.fileno()):
                    self._read_now()
        deadline = min(until, monotonic() + self._options.reconnect_wait.total_seconds())
        while self.connection is None:
            pause = self._state.backoff.next_at - monotonic()
            if self._state.heartbeat.lost_at is None:
                raise NodeClosed(f"node {self._state.ident} is not open yet")
            if monotonic() + pause > deadline:
                raise ConnectionLost(f"node {self._state.ident} is not connected")
            if pause > 0:
                self._waker.wait(None, pause)
            if self._state.is_stopped:
                raise self._state.stopped_error("while disconnected")
            if self._state.backoff.next_at <= monotonic():
                self._try_to_connect()
        return self.connection

    def _try_to_connect(self) -> None:
        try:
            self._connect()
        except (MessagesError, psycopg.Error) as error:
            self._state.on_reconnect_failed(error, monotonic())

    def _connect(self) -> None:
        connection = self._connector.connect()
        buffer = NotificationBuffer(connection.pgconn)
        try:
            run_steps(self._state.restore_calls(), partial(self._execute_call, connection))
            # A signal handler may have closed the node while it connected.
            self._raise_if_closed()
        except BaseException:
            connection.close()
            raise
        self.connection, self.buffer = connection, buffer
        self._used_at = monotonic()
        self._state.on_connected(self._used_at)
        self._process_notifications()
        self._waker.wake()

    def _drop_connection(self, reason: object) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._state.on_connection_lost(reason, monotonic())
        self._waker.wake()
