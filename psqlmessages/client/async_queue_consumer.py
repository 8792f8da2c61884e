"""Queue consumer of an AsyncNode: cancelling a task loses no element."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any

import psycopg

from psqlmessages.client import queue_calls
from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.calls import Call, is_transient
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.queue_calls import AckResult, Element
from psqlmessages.client.queue_consumer import RETRY_SECONDS, LeasedBatch, QueuePoller
from psqlmessages.client.transactions import Script, SqlStatement, Wait, drive_async, transaction
from psqlmessages.exceptions import ConnectionLost, NodeClosed

_CLOSING_SECONDS = 5.0
_LONGEST_WAIT = 24 * 60 * 60.0


class AsyncQueueConsumer:
    """Reserves elements for the tasks of a node, and releases them if the task is gone.

    A task may be cancelled while the answer to its call arrives. To lose nothing, each call
    reserves; if the task is gone, the elements are released. ``pop`` queues the commit after its
    last await, so it cannot be cancelled between the commit and its return.
    """

    def __init__(self, session: AsyncNodeSession, state: NodeState) -> None:
        self._session = session
        self._state = state
        self._in_progress: set[asyncio.Future[Any]] = set()
        self._leased_batches: set[LeasedBatch] = set()

    async def take(
        self, ident: str, queue: str, statement: SqlStatement, timeout: timedelta | None
    ) -> list[Element]:
        """Reserve elements; with a timeout, wait for them."""
        # Make ``finish`` wait until the commit or release of the elements is queued.
        busy = asyncio.get_running_loop().create_future()
        self._in_progress.add(busy)
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

            return await drive_async(poller.steps(), run_step)
        finally:
            self._in_progress.discard(busy)
            busy.set_result(None)

    def remove(self, ident: str, elements: list[Element]) -> None:
        """Queue the commit of popped elements, without waiting for it."""
        if elements:
            until = monotonic() + queue_calls.DEFAULT_DURATION.total_seconds()
            self._submit(ident, queue_calls.commit(ident, *elements), until)

    def new_batch(
        self, ident: str, queue: str, duration: timedelta, group: timedelta
    ) -> LeasedBatch:
        """Create the batch of a consumer; ``put_back`` empties it, at the latest in ``finish``."""
        leased = LeasedBatch(self._state, ident, queue, duration, group)
        self._leased_batches.add(leased)
        return leased

    def put_back(self, leased: LeasedBatch) -> None:
        """Queue the calls that commit or give back the rest of a batch, without waiting."""
        self._leased_batches.discard(leased)
        if (call := leased.last_commit()) is not None:
            self._submit_or_log("", call, leased.expires_at, leased)
        for call in leased.leftover():
            self._submit_or_log("", call)

    async def finish(self) -> None:
        """Wait for calls in progress, up to 5 seconds; the node is already stopped."""
        deadline = monotonic() + _CLOSING_SECONDS
        for leased in list(self._leased_batches):
            self.put_back(leased)
        while self._in_progress and self._state.heartbeat.is_connected:
            seconds = deadline - monotonic()
            if seconds <= 0:
                return
            await asyncio.wait(self._in_progress, timeout=seconds)

    # Internals

    async def _reserve(self, ident: str, queue: str, statement: SqlStatement) -> list[Element]:
        is_begun = False

        def script() -> Script[list[Element]]:
            nonlocal is_begun
            is_begun = True
            return (yield from queue_calls.take(queue, statement).script())

        def release(future: asyncio.Future[list[Element]]) -> None:
            if not future.cancelled() and future.exception() is None and future.result():
                self._submit_or_log(ident, queue_calls.release(ident, *future.result()))

        future = self._session.order(transaction(script))
        self._wait_for(future)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if is_begun:
                future.add_done_callback(release)
            else:
                future.cancel()
            raise

    async def _sleep(self, step: Wait, woken: asyncio.Event) -> None:
        woken.clear()
        if step.is_ready() or self._state.is_stopped:
            return
        seconds = min(max(0.0, step.deadline - monotonic()), _LONGEST_WAIT)
        timer = asyncio.get_running_loop().call_later(seconds, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()

    def _submit(
        self,
        ident: str,
        call: Call[AckResult],
        until: float = -inf,
        leased: LeasedBatch | None = None,
    ) -> None:
        """Queue a call, and retry it in the background until the time ``until``."""
        future = self._session.order(call)
        self._wait_for(asyncio.create_task(self._complete(ident, call, future, until, leased)))

    def _submit_or_log(self, ident: str, call: Call[AckResult], *more: Any) -> None:
        try:
            self._submit(ident, call, *more)
        except NodeClosed as closed:
            self._could_not_put_back(ident, closed)

    async def _complete(
        self,
        ident: str,
        call: Call[AckResult],
        future: asyncio.Future[AckResult],
        until: float,
        leased: LeasedBatch | None,
    ) -> None:
        try:
            while True:
                try:
                    answer = await future
                    break
                except (ConnectionLost, psycopg.Error) as error:
                    # A late commit works too, unless another consumer has taken the element.
                    if monotonic() >= until or self._session.is_closed:
                        raise
                    if isinstance(error, psycopg.Error):
                        if not is_transient(error):
                            raise
                        await asyncio.sleep(RETRY_SECONDS)
                # After a retry a False does not mean a lost lease.
                leased = None
                future = self._session.order(call)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self._could_not_put_back(ident, error)
        else:
            if leased is not None:
                leased.on_committed(answer)

    def _wait_for(self, future: asyncio.Future[Any]) -> None:
        self._in_progress.add(future)
        future.add_done_callback(self._in_progress.discard)

    def _could_not_put_back(self, ident: str, error: Exception) -> None:
        self._state.counters.lost_leases += 1
        self._state.log.warning(
            "%s: could not commit or give back elements; they return when their leases run out: %s",
            ident or self._state.ident,
            error,
        )
