"""Session of an AsyncNode: one task uses the connection, so cancelling other tasks is safe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
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
    MAX_WAIT_SECONDS,
    AsyncConnection,
    NotificationBuffer,
    is_broken,
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
    run_steps_async,
    run_transaction_async,
)
from psqlmessages.exceptions import ConnectionLost, IdentTaken, MessagesError, NodeClosed
from psqlmessages.retry import wait_for_event

T = TypeVar("T")

_CLOSING_SECONDS = 5.0
_DISCONNECTED_WAIT_SECONDS = 0.001


class AsyncNodeSession:
    """The connection of an :class:`AsyncNode`, and the worker: the task that uses it.

    Other tasks queue their calls. Calls that are queued at the same time may share a round trip.
    """

    def __init__(self, conninfo: str, state: NodeState, options: Options) -> None:
        self._connector = Connector(conninfo, options.answer_timeout)
        self._state = state
        state.on_received = self._wake_waiters
        state.on_taken = self.on_taken
        self._options = options
        self._reconnect_seconds = options.reconnect_wait.total_seconds()
        self._connection: AsyncConnection | None = None
        self._buffer: NotificationBuffer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: asyncio.Task[None] | None = None
        self._queue = CallQueue()
        # An event for each waiting task.
        self._waiters: set[asyncio.Event] = set()
        # Wakes the worker.
        self._wakeup = asyncio.Event()
        self._housekeeping_timer: asyncio.TimerHandle | None = None
        self._is_housekeeping_due = False
        self._read_error: psycopg.OperationalError | None = None
        self._open_lock = asyncio.Lock()
        self._close_lock = asyncio.Lock()
        # Whether a task waits with a timeout of 0, until the worker has read once.
        self._has_zero_wait = False
        self._is_closing = False
        self.is_closed = False

    async def open(self) -> None:
        """Connect and register; if the node's name is taken, retry for half a second."""
        async with self._open_lock:
            self._raise_if_closed()
            if self._worker is None:
                self._loop = asyncio.get_running_loop()
                await self._open()
                name = f"node {self._state.ident}"
                self._worker = asyncio.create_task(self._work(), name=name)

    async def _open(self) -> None:
        deadline = monotonic() + IDENT_WAIT_SECONDS
        while True:
            try:
                return await self._connect()
            except IdentTaken:
                if monotonic() > deadline or self._state.is_stopped:
                    raise
            await asyncio.sleep(IDENT_RETRY_SECONDS)

    def stop(self) -> None:
        """End all waits immediately; callable from any thread and from signal handlers."""
        self._state.is_stopped = True
        if self._loop is not None:
            # If the loop is closed, this raises RuntimeError, and no task waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_stopped)

    def _on_stopped(self) -> None:
        self._wake_waiters()
        self._wakeup.set()
        self._state.end_waits()

    async def close(self) -> None:
        """Stop, deregister and disconnect."""
        self._is_closing = True
        self.stop()
        async with self._close_lock:
            if self.is_closed:
                return
            try:
                await self._stop_worker()
                await self._deregister()
            finally:
                # Disconnect even if this task is cancelled, as at the end of an event loop.
                await self._disconnect()

    async def wait_closed(self) -> None:
        """Wait until ``close`` has ended the worker; return immediately if there is none."""
        if self._worker is not None:
            await asyncio.wait({self._worker})

    async def _stop_worker(self) -> None:
        if self._worker is None:
            return
        if self._connection is None:
            self._worker.cancel()
        self._wakeup.set()
        _, unfinished = await asyncio.wait({self._worker}, timeout=_CLOSING_SECONDS)
        while unfinished:
            # When cancelled, psycopg first waits until the server has cancelled the query.
            self._worker.cancel()
            _, unfinished = await asyncio.wait(unfinished, timeout=_CLOSING_SECONDS)

    async def _deregister(self) -> None:
        if (connection := self._connection) is None:
            return
        connection.answer_seconds = _CLOSING_SECONDS
        try:
            async with asyncio.timeout(_CLOSING_SECONDS):
                for call in self._state.deregister_calls():
                    await self._execute_call(connection, call)
        except (MessagesError, psycopg.Error, TimeoutError) as error:
            logger.debug("%s: closed without deinit: %s", self._state.ident, error)

    async def _disconnect(self) -> None:
        self.is_closed = True
        self._queue.fail_until(inf, NodeClosed(f"node {self._state.ident} was closed"))
        if self._worker is not None:
            self._worker.cancel()
        self._cancel_housekeeping()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        self._state.heartbeat.is_connected = False

    def _raise_if_closed(self) -> None:
        if self.is_closed or self._is_closing:
            raise NodeClosed(f"node {self._state.ident} is closed")

    # Called by other tasks

    async def run(self, call: Call[T]) -> T:
        """Run one call; without a connection, first wait up to ``reconnect_wait`` for one."""
        return await self.submit(call)

    def submit(
        self, call: Call[T], on_success: Callable[[], object] | None = None
    ) -> asyncio.Future[T]:
        """Queue a call; the future receives its result. Calls of one task run in their order.

        With ``on_success``, a success calls this function and leaves the future pending; only an
        error completes the future.
        """
        self._raise_if_closed()
        if self._loop is None or self._worker is None:
            raise NodeClosed(f"node {self._state.ident} is not open yet")
        future: asyncio.Future[T] = self._loop.create_future()
        deadline = monotonic() + self._reconnect_seconds
        task = asyncio.current_task(self._loop)
        self._queue.append(QueuedCall(call, future, deadline, task, on_success))
        self._wakeup.set()
        return future

    async def wait(self, is_ready: Callable[[], object], deadline: float) -> None:
        """Wait until ``is_ready()`` is true, the deadline has passed, or the node is stopped."""
        loop = asyncio.get_running_loop()
        while not (is_ready() or self._state.is_stopped):
            woken = asyncio.Event()
            self._waiters.add(woken)
            seconds = max(0.0, min(deadline - monotonic(), MAX_WAIT_SECONDS))
            if not seconds and self._connection is None:
                # A wait of 0 s ends after the next read of the worker, which needs a connection.
                seconds = _DISCONNECTED_WAIT_SECONDS
            timer = loop.call_later(seconds, woken.set) if seconds else None
            if not seconds:
                self._has_zero_wait = True
                self._wakeup.set()
            try:
                await woken.wait()
            finally:
                self._waiters.discard(woken)
                if timer is not None:
                    timer.cancel()
            if monotonic() >= deadline:
                return

    def run_steps(self, steps: Steps[T]) -> Coroutine[Any, Any, T]:
        """Run the calls and waits that a generator yields; return its result."""
        return run_steps_async(steps, self._run_step)

    async def _run_step(self, step: Call[Any] | Wait) -> Any:
        if isinstance(step, Wait):
            return await self.wait(step.is_ready, step.deadline)
        return await self.submit(step)

    def on_taken(self, number: int = 1) -> None:
        """Wake the worker if the inbox was full before ``number`` messages were taken."""
        limit = self._options.inbox_limit
        if limit - number <= len(self._state.inbox) < limit:
            self._wakeup.set()

    def _wake_waiters(self) -> None:
        for woken in self._waiters:
            woken.set()

    # The worker

    async def _work(self) -> None:
        while not self._is_closing:
            self._wakeup.clear()
            try:
                if self._connection is None:
                    await self._reconnect()
                else:
                    await self._use(self._connection)
            except Exception as error:  # noqa: BLE001 - logged; the node continues
                logger.exception("%s: unexpected error", self._state.ident)
                await self._drop_connection(error)
                self._state.backoff.record_failure(monotonic())

    async def _use(self, connection: AsyncConnection) -> None:
        """Do the first of these that is needed: disconnect, housekeeping, calls, or read."""
        if self._read_error is not None:
            await self._drop_connection(self._read_error)
        elif len(self._state.inbox) > self._state.inbox_maximum:
            await self._drop_connection("the inbox is far over its limit")
        elif self._is_housekeeping_due and self._can_read():
            # Each query reads all pending notifications, so a full inbox also delays housekeeping.
            await self._run_due_calls(connection)
        elif self._queue:
            await self._run_next_batch(connection)
        elif self._has_zero_wait:
            self._read()
        else:
            await self._read_until_woken(connection)

    async def _run_next_batch(self, connection: AsyncConnection) -> None:
        batch = self._queue.take_batch()
        self._state.counters.calls += sum(map(len, batch))
        steps = run_batch(batch, self._state, partial(is_broken, connection), self._process_read)
        try:
            lost = await run_steps_async(steps, partial(self._execute, connection))
            if lost is not None:
                await self._drop_connection(lost)
        except asyncio.CancelledError:
            # ``close`` cancels this task after waiting 5 seconds for the answer.
            for queued in chain.from_iterable(batch):
                queued.fail(NodeClosed(f"node {self._state.ident} was closed"))
            raise
        finally:
            self._read()

    def _can_read(self) -> bool:
        # Answers to pending calls are needed even if the inbox is full.
        is_full = len(self._state.inbox) >= self._options.inbox_limit
        return not is_full or bool(self._state.pending_calls())

    # Reading

    async def _read_until_woken(self, connection: AsyncConnection) -> None:
        """Process notifications as they arrive, until the worker has something else to do."""
        loop, descriptor = asyncio.get_running_loop(), connection.fileno()
        can_read = self._can_read()
        if can_read:
            loop.add_reader(descriptor, self._on_readable)
        try:
            await self._wakeup.wait()
        finally:
            if can_read:
                loop.remove_reader(descriptor)
        # Before a call is sent, find out whether the server has closed the connection.
        self._read()

    def _on_readable(self) -> None:
        self._read()
        if len(self._state.inbox) >= self._options.inbox_limit:
            self._wakeup.set()

    def _process_read(self) -> None:
        """Process the notifications that were read with the last answer, without waking tasks."""
        if self._buffer is not None:
            self._state.store(self._buffer.take())

    def _read(self) -> None:
        """Read unless the inbox is full, process notifications, and wake the tasks that wait."""
        if self._buffer is None:
            return
        if self._connection is not None and self._can_read():
            try:
                self._buffer.read()
            except psycopg.OperationalError as error:
                self._read_error = error
                self._wakeup.set()
        self._state.receive(self._buffer.take())
        if self._has_zero_wait:
            self._has_zero_wait = False
            self._wake_waiters()

    # Housekeeping and probes

    async def _run_due_calls(self, connection: AsyncConnection) -> None:
        now = monotonic()
        try:
            with connection.limit_answer_time(self._state.heartbeat.answer_seconds):
                for call in self._state.due_calls(now):
                    await self._execute_call(connection, call)
        except ConnectionLost as error:
            await self._drop_connection(error)
        except (MessagesError, psycopg.Error) as error:
            self._state.on_due_call_failed(error, now)
        self._read()
        if self._connection is not None:
            self._schedule_housekeeping()

    def _schedule_housekeeping(self) -> None:
        # While an echo is expected, next_at() considers its deadline, but not the next probe. The
        # echo may arrive soon, and then the probe may be due earlier.
        seconds = self._state.heartbeat.next_at() - monotonic()
        seconds = min(seconds, self._options.probe_interval.total_seconds())
        self._is_housekeeping_due = False
        loop = asyncio.get_running_loop()
        self._housekeeping_timer = loop.call_later(seconds, self._on_housekeeping_due)

    def _on_housekeeping_due(self) -> None:
        self._is_housekeeping_due = True
        self._wakeup.set()

    def _cancel_housekeeping(self) -> None:
        if self._housekeeping_timer is not None:
            self._housekeeping_timer.cancel()

    # Queued calls

    async def _execute(self, connection: AsyncConnection, batch: Batch) -> list[Any]:
        """Run groups of calls in one transaction; return the answer of each group."""
        if not batch:
            return []
        if len(batch) > 1:
            return await connection.execute_prepared_many([group.statement for group in batch])
        (group,) = batch
        if len(group) == 1:
            return [await self._execute_single(connection, group[0].call)]
        return [await connection.execute_prepared(*group.statement)]

    @staticmethod
    async def _execute_single(connection: AsyncConnection, call: Call[Any]) -> Any:
        """Run one call; return the first column of its answer."""
        if isinstance(call, TransactionCall):
            return await run_transaction_async(connection, call.script())
        if call.is_prepared:
            return await connection.execute_prepared(call.sql, call.params)
        row = await (await connection.execute(call.sql, call.params)).fetchone()
        return row[0] if row else None

    async def _execute_call(self, connection: AsyncConnection, call: Call[T]) -> T:
        try:
            answer = await self._execute_single(connection, call)
        except psycopg.Error as error:
            raise calls.translate_error(error, is_broken=is_broken(connection, error)) from error
        return call.read(answer)

    async def _reconnect(self) -> None:
        """Fail the calls that have waited too long; then connect if it is time, or pause."""
        now = monotonic()
        error = ConnectionLost(f"node {self._state.ident} is not connected")
        self._queue.fail_until(now, error)
        until = self._state.backoff.next_at
        if until > now:
            if self._queue:
                until = min(until, self._queue[0].deadline)
            await wait_for_event(self._wakeup, until - now)
            return
        try:
            await self._connect()
        except (MessagesError, psycopg.Error) as error:
            self._state.on_reconnect_failed(error, monotonic())

    async def _connect(self) -> None:
        connection = await self._connector.connect_async()
        buffer = NotificationBuffer(connection.pgconn)
        self._state.role = connection.info.user
        try:
            steps = self._state.restore_calls()
            await run_steps_async(steps, partial(self._execute_call, connection))
            # Another task may have closed the node while this one connected.
            self._raise_if_closed()
        except BaseException:
            await connection.close()
            raise
        self._connection, self._buffer, self._read_error = connection, buffer, None
        self._state.on_connected(monotonic())
        self._state.on_received()
        self._read()
        self._schedule_housekeeping()

    async def _drop_connection(self, reason: object) -> None:
        self._cancel_housekeeping()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        self._state.on_connection_lost(reason, monotonic())
        self._state.on_received()
