"""Queue consumer of an AsyncNode: takes, commits and gives back elements; safe to cancel."""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from typing import Any

import psycopg

from psqlmessages.client import queue_calls
from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.calls import Call, is_transient
from psqlmessages.client.connection import MAX_WAIT_SECONDS
from psqlmessages.client.durations import Duration
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.queue_calls import AckResult, Element
from psqlmessages.client.queue_consumer import RETRY_SECONDS, LeasedBatch, QueuePoller
from psqlmessages.client.transactions import (
    Script,
    SqlStatement,
    Wait,
    run_steps_async,
    transaction,
)
from psqlmessages.exceptions import ConnectionLost, NodeClosed
from psqlmessages.retry import wait_for_event

_CLOSING_SECONDS = 5.0


class AsyncQueueConsumer:
    """Reserves elements for the tasks of a node, and releases them if the task is cancelled.

    A task may be cancelled after the server has taken elements, but before the answer arrives. So
    ``pop``, too, first reserves elements, and then queues their commit. It does not await between
    the two, so a cancelled ``pop`` commits nothing, and no element is lost.
    """

    def __init__(self, session: AsyncNodeSession, state: NodeState) -> None:
        self._session = session
        self._state = state
        # ``finish`` waits for these.
        self._in_progress: set[asyncio.Future[Any]] = set()
        # Batches whose ``consume`` has not ended.
        self._batches: set[LeasedBatch] = set()

    async def take(
        self, ident: str, queue: str, statement: SqlStatement, timeout: Duration | None
    ) -> list[Element]:
        """Reserve elements; with a timeout, wait for them."""
        # Makes ``finish`` wait until the commit or release of the elements is queued.
        taking = asyncio.get_running_loop().create_future()
        self._in_progress.add(taking)
        try:
            if not timeout:
                return await self._reserve(ident, queue, statement)
            woken = asyncio.Event()
            call = queue_calls.take(queue, statement)
            poller = QueuePoller(self._state, ident, queue, call, timeout, woken.set)

            async def run_step(step: Call[Any] | Wait) -> Any:
                if isinstance(step, Wait):
                    return await self._sleep(step, woken)
                if step is call:
                    return await self._reserve(ident, queue, statement)
                return await self._session.run(step)

            return await run_steps_async(poller.steps(), run_step)
        finally:
            self._in_progress.discard(taking)
            taking.set_result(None)

    def commit_popped(self, ident: str, elements: list[Element]) -> None:
        """Queue the commit of popped elements, without waiting for it."""
        if elements:
            expires_at = monotonic() + queue_calls.DEFAULT_DURATION.total_seconds()
            batch = LeasedBatch(self._state, ident, elements[0].queue)
            self._submit(queue_calls.commit(ident, *elements), expires_at, batch)

    def new_batch(self, ident: str, queue: str, duration: Duration, group: Duration) -> LeasedBatch:
        """Create a batch of ``consume``. If ``consume`` has not ended, ``finish`` gives it back."""
        batch = LeasedBatch(self._state, ident, queue, duration, group)
        self._batches.add(batch)
        return batch

    def give_back(self, batch: LeasedBatch) -> None:
        """Queue the calls that commit finished elements and give back the others; do not wait."""
        self._batches.discard(batch)
        if (call := batch.last_commit()) is not None:
            self._submit_or_log(call, batch.expires_at, batch)
        for call in batch.give_back_calls():
            self._submit_or_log(call)

    async def finish(self) -> None:
        """Give back all batches of a stopped node, and wait up to 5 s for the running calls."""
        deadline = monotonic() + _CLOSING_SECONDS
        for batch in list(self._batches):
            self.give_back(batch)
        while self._in_progress and self._state.heartbeat.is_connected:
            seconds = deadline - monotonic()
            if seconds <= 0:
                return
            await asyncio.wait(self._in_progress, timeout=seconds)

    async def _reserve(self, ident: str, queue: str, statement: SqlStatement) -> list[Element]:
        """Run a statement of ``reserve``; if this task is cancelled, release the elements."""
        has_begun = False

        def script() -> Script[list[Element]]:
            nonlocal has_begun
            has_begun = True
            return (yield from queue_calls.take(queue, statement).script())

        def release(future: asyncio.Future[list[Element]]) -> None:
            if not future.cancelled() and future.exception() is None and future.result():
                self._submit_or_log(queue_calls.release(ident, *future.result()))

        future = self._session.submit(transaction(script))
        self._track(future)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if has_begun:
                future.add_done_callback(release)
            else:
                future.cancel()
            raise

    async def _sleep(self, step: Wait, woken: asyncio.Event) -> None:
        woken.clear()
        if step.is_ready() or self._state.is_stopped:
            return
        await wait_for_event(woken, min(step.deadline - monotonic(), MAX_WAIT_SECONDS))

    def _submit(
        self, call: Call[AckResult], retry_until: float = -inf, batch: LeasedBatch | None = None
    ) -> None:
        """Queue a call; ``_complete`` awaits it in the background."""
        future = self._session.submit(call)
        self._track(asyncio.create_task(self._complete(call, future, retry_until, batch)))

    def _submit_or_log(self, call: Call[AckResult], *arguments: Any) -> None:
        try:
            self._submit(call, *arguments)
        except NodeClosed as error:
            self._log_give_back_error(call, error)

    async def _complete(
        self,
        call: Call[AckResult],
        future: asyncio.Future[AckResult],
        retry_until: float,
        batch: LeasedBatch | None,
    ) -> None:
        """Await a queued call; retry it until ``retry_until``; ``batch`` records lost leases."""
        try:
            while True:
                try:
                    answer = await future
                    break
                except (ConnectionLost, psycopg.Error) as error:
                    if monotonic() >= retry_until or self._session.is_closed:
                        raise
                    if isinstance(error, ConnectionLost):
                        # The commit may have succeeded: then False does not mean a lost lease.
                        batch = None
                    elif is_transient(error):
                        await asyncio.sleep(RETRY_SECONDS)
                    else:
                        raise
                future = self._session.submit(call)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self._log_give_back_error(call, error)
        else:
            if batch is not None:
                batch.on_committed(answer)

    def _track(self, future: asyncio.Future[Any]) -> None:
        """Make ``finish`` wait for a future."""
        self._in_progress.add(future)
        future.add_done_callback(self._in_progress.discard)

    def _log_give_back_error(self, call: Call[AckResult], error: Exception) -> None:
        self._state.counters.lost_leases += 1
        self._state.log.warning(
            "%s: could not commit or give back elements; they return when their leases expire: %s",
            call.ident,
            error,
        )
