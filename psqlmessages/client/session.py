"""Session of a Node: runs calls, waits for notifications, reconnects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import inf
from time import monotonic
from typing import Any, TypeVar

import psycopg

from psqlmessages.client import calls
from psqlmessages.client.call_queue import Batch, CallQueue, QueuedCall, run_batch
from psqlmessages.client.calls import Call
from psqlmessages.client.connect import Connector
from psqlmessages.client.connection import (
    CLOSED_CHECK_READS,
    CLOSED_CHECK_SECONDS,
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
# A signal handler may stop the node just before a thread waits for the reader, so check this often.
_READER_CHECK_SECONDS = 1.0


class NodeSession:
    """The connection of a :class:`Node`; threads may share it.

    If several threads wait, one of them is the reader, which reads for all. A thread uses the
    connection only while it holds the lock ``_io``, but the reader waits for data without it.
    A thread that needs both locks acquires ``_io`` before ``_reader_changed``.
    """

    def __init__(self, conninfo: str, state: NodeState, options: Options) -> None:
        self._connector = Connector(conninfo, options.answer_timeout)
        self._state = state
        self._options = options
        self._connection: Connection | None = None
        self._buffer: NotificationBuffer | None = None
        self._io = threading.RLock()
        # Calls of threads that wait for ``_io``.
        self._queue = CallQueue()
        self._reader_changed = threading.Condition()
        self._reader_thread_id: int | None = None
        self._calling_thread_id: int | None = None
        # Ends the wait of the reader for data.
        self._waker = Waker()
        # When the last call ended.
        self._used_at = 0.0
        self._is_closing = False
        self._is_connecting = False
        self.is_closed = False

    def open(self) -> None:
        """Connect and register; if the node's name is taken, retry for half a second."""
        with self._io:
            self._raise_if_closed()
            if self._connection is not None:
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
        """Stop, deregister and disconnect.

        If another thread is connecting, do not wait: that thread disconnects after its attempt.
        """
        self._is_closing = True
        self.stop()
        if self._is_connecting:
            return
        if threading.get_ident() in (self._reader_thread_id, self._calling_thread_id):
            # A signal handler calls this method. The interrupted call or wait closes the session.
            return
        with self._reader_changed:
            self._reader_changed.wait_for(lambda: self._reader_thread_id is None, _CLOSING_SECONDS)
        with self._io:
            self._disconnect()

    def _disconnect(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        connection, self._connection = self._connection, None
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

    def run(self, call: Call[T], seconds: float = inf) -> T:
        """Run one call; without a connection, first wait up to ``reconnect_wait`` for one.

        The time limit is ``seconds``, or ``probe_timeout`` if that is longer. Calls of several
        threads that wait while another one runs share a round trip.
        """
        seconds = max(seconds, self._options.probe_timeout.total_seconds())
        if self._io.acquire(blocking=False):
            try:
                return self._run_alone(call, seconds)
            finally:
                self._io.release()
        if not call.may_share_round_trip or threading.current_thread() is threading.main_thread():
            # Ctrl-C may interrupt the main thread. Then only the call of that thread must fail.
            with self._acquire(seconds):
                return self._run_alone(call, seconds)
        return self._run_together(call, seconds)

    def _run_alone(self, call: Call[T], seconds: float) -> T:
        if seconds == inf:
            return self._run_on(self._wait_for_connection(), call)
        connection = self._wait_for_connection(monotonic() + seconds)
        with connection.limit_answer_time(seconds):
            return self._run_on(connection, call)

    def _run_together(self, call: Call[T], seconds: float) -> T:
        """Queue a call; the first of the waiting threads that gets the lock runs all calls."""
        queued = QueuedCall(call, Future(), inf, threading.get_ident())
        self._queue.append(queued)
        try:
            with self._acquire(seconds):
                while not queued.future.done():
                    self._run_batch(seconds)
        except BaseException:
            queued.future.cancel()
            raise
        result: T = queued.future.result()
        return result

    @contextmanager
    def _acquire(self, seconds: float) -> Iterator[None]:
        # If the network stalls, another thread may hold the lock for up to ``answer_timeout``.
        if not self._io.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise ConnectionLost(f"node {self._state.ident} got no answer from the server")
        try:
            yield
        finally:
            self._io.release()

    def _run_batch(self, seconds: float) -> None:
        connection = self._wait_for_connection(monotonic() + seconds)
        batch = self._queue.take_batch()
        is_lost = partial(is_broken, connection)
        steps = run_batch(batch, self._state, is_lost, self._process_notifications)
        try:
            self._calling_thread_id = threading.get_ident()
            self._state.counters.calls += sum(map(len, batch))
            with connection.limit_answer_time(seconds):
                lost = run_steps(steps, partial(self._execute_batch, connection))
            if lost is not None:
                self._drop_connection(lost)
        finally:
            self._calling_thread_id = None
            self._end_calls()
            # If this thread was interrupted, the results of the other threads' calls are unknown.
            interrupted = ConnectionLost(f"node {self._state.ident}: the call was interrupted")
            for queued in chain.from_iterable(batch):
                queued.fail(interrupted)

    @staticmethod
    def _execute_batch(connection: Connection, batch: Batch) -> list[Any]:
        """Run groups of calls in one transaction; return the answer of each group."""
        if len(batch) > 1:
            return connection.execute_prepared_many([group.statement for group in batch])
        return [connection.execute_prepared(*group.statement) for group in batch]

    def _run_on(self, connection: Connection, call: Call[T]) -> T:
        """Run a call, record its success or error, and process the notifications read with it."""
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
        except MessagesError as error:
            self._state.on_call_failed(call, error)
            raise
        finally:
            # Reset here, not in `_end_calls`: if a signal handler raised an exception at the start
            # of that function, the attribute would remain set. Then `close` would return without
            # disconnecting, as it does during a call.
            self._calling_thread_id = None
            self._end_calls()
        return answer

    def _end_calls(self) -> None:
        """Process the notifications that calls have read; close the session if it is closing."""
        self._used_at = monotonic()
        self._process_notifications()
        if self._is_closing:
            self._disconnect()

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
        """Make waiting threads check whether their conditions are met."""
        self._waker.wake()

    def wait(
        self, is_ready: Callable[[], object], deadline: float, *, also_limits_probes: bool = False
    ) -> None:
        """Wait until ``is_ready()`` is true, the deadline has passed, or the node is stopped.

        With ``also_limits_probes``, housekeeping and probes that run during the wait also end at
        the deadline, or after ``probe_timeout`` if that is later.
        """
        own_id = threading.get_ident()
        while not (is_ready() or self._state.is_stopped):
            try:
                if self._become_reader(is_ready, deadline):
                    self._read_once(is_ready, deadline, also_limits_probes=also_limits_probes)
            finally:
                # A signal handler may have interrupted these calls. As in `_run_on`, no function is
                # called before the attribute is reset.
                if self._reader_thread_id == own_id:
                    self._reader_thread_id = None
                    self._stop_reading()
            if monotonic() >= deadline:
                return

    def _become_reader(self, is_ready: Callable[[], object], deadline: float) -> bool:
        """Become the reader; if there is one, wait until it has read, and return False."""
        with self._reader_changed:
            if is_ready() or self._state.is_stopped:
                return False
            if self._reader_thread_id is None:
                self._reader_thread_id = threading.get_ident()
                return True
            self._reader_changed.wait(max(0.0, min(deadline - monotonic(), _READER_CHECK_SECONDS)))
            return False

    def _stop_reading(self) -> None:
        """Let another thread become the reader; close the session if it is closing."""
        with self._reader_changed:
            self._reader_changed.notify_all()
        if self._is_closing:
            self.close()

    def _read_once(
        self, is_ready: Callable[[], object], deadline: float, *, also_limits_probes: bool
    ) -> None:
        """Reconnect if it is time; or run due calls, wait for data, and process notifications."""
        with self._io:
            if self._state.is_stopped:
                return
            if self._connection is None:
                until = self._state.backoff.next_at
                if until <= monotonic():
                    self._try_to_connect()
                    return
                descriptor = None
            else:
                self._run_due_calls(self._connection, deadline if also_limits_probes else inf)
                if self._connection is None or is_ready():
                    return
                descriptor = self._connection.fileno()
                until = self._state.heartbeat.next_at()
        if self._waker.wait(descriptor, min(until, deadline) - monotonic()):
            with self._io:
                self._read_now()

    def _read_now(self) -> None:
        """Read and process the notifications that have arrived, without waiting."""
        if self._buffer is None or self._connection is None:
            return
        try:
            self._buffer.read()
        except psycopg.OperationalError as error:
            self._drop_connection(error)
        self._process_notifications()

    def _process_notifications(self) -> None:
        if not self._buffer:
            return
        self._state.receive(self._buffer.take())
        if self._reader_thread_id not in (None, threading.get_ident()):
            # The reader waits for data that this thread has already read.
            self._waker.wake()

    def _run_due_calls(self, connection: Connection, deadline: float) -> None:
        now = monotonic()
        seconds = max(deadline - now, self._options.probe_timeout.total_seconds())
        try:
            with connection.limit_answer_time(min(seconds, self._state.heartbeat.answer_seconds)):
                for call in self._state.due_calls(now):
                    self._run_on(connection, call)
        except ConnectionLost as error:
            self._drop_connection(error)
        except (MessagesError, psycopg.Error) as error:
            self._state.on_due_call_failed(error, now)

    def _wait_for_connection(self, until: float = inf) -> Connection:
        """Return the connection; if it is lost, wait up to ``reconnect_wait`` for a new one."""
        self._raise_if_closed()
        if monotonic() - self._used_at > CLOSED_CHECK_SECONDS:
            # A cheap way to detect a closed connection before the call is sent.
            for _ in range(CLOSED_CHECK_READS):
                if self._connection is not None and is_readable(self._connection.fileno()):
                    self._read_now()
        deadline = min(until, monotonic() + self._options.reconnect_wait.total_seconds())
        while self._connection is None:
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
        return self._connection

    def _try_to_connect(self) -> None:
        try:
            self._connect()
        except (MessagesError, psycopg.Error) as error:
            self._state.on_reconnect_failed(error, monotonic())

    def _connect(self) -> None:
        # `close` sets `_is_closing` before it reads `_is_connecting`. The order is reversed here.
        # So at least one of the two threads sees the flag of the other.
        self._is_connecting = True
        try:
            self._raise_if_closed()
            self._connect_and_register()
        finally:
            self._is_connecting = False
            if self._is_closing:
                self._disconnect()

    def _connect_and_register(self) -> None:
        connection = self._connector.connect()
        buffer = NotificationBuffer(connection.pgconn)
        self._state.role = connection.info.user
        try:
            run_steps(self._state.restore_calls(), partial(self._execute_call, connection))
            # A signal handler may have closed the node during this method.
            self._raise_if_closed()
        except BaseException:
            connection.close()
            raise
        self._connection, self._buffer = connection, buffer
        self._used_at = monotonic()
        self._state.on_connected(self._used_at)
        self._process_notifications()
        self._waker.wake()

    def _drop_connection(self, reason: object) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._state.on_connection_lost(reason, monotonic())
        self._waker.wake()
