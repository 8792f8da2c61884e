"""Queue methods of AsyncNode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any

import psycopg

from psqlmessages.client import queue_calls
from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.calls import Call, is_transient
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.queue_calls import (
    DEFAULT_DURATION,
    AckResult,
    Element,
    Headers,
    QueueSizes,
)
from psqlmessages.client.queue_consumer import (
    AGAIN_SECONDS,
    DEFAULT_GROUP,
    FOR_EVER,
    BlockingTake,
    LeasedBatch,
)
from psqlmessages.client.transactions import Script, SqlStatement, Wait, drive_async, transaction
from psqlmessages.exceptions import ConnectionLost, NodeClosed
from psqlmessages.wire import EncodedBody

# Reserving elements in an AsyncNode: cancelling a task loses no element.

_CLOSING_SECONDS = 5.0
_LONGEST_WAIT = 24 * 60 * 60.0


class _Take:
    """A call that reserves elements, and whether it has started."""

    def __init__(self, queue: str, statement: SqlStatement) -> None:
        self._queue = queue
        self._statement = statement
        self.is_begun = False
        self.call = transaction(self._script)

    def _script(self) -> Script[list[Element]]:
        self.is_begun = True
        return (yield from queue_calls.taking(self._queue, self._statement).script())


class AsyncQueueConsumer:
    """Reserves elements for the tasks of a node, and releases them if the task is gone.

    A task may be cancelled while the answer to its call arrives. To lose nothing, each call
    reserves; if the task is gone, the elements are released. ``pop`` queues the commit after its
    last await, so it cannot be cancelled between the commit and its return.
    """

    def __init__(self, session: AsyncNodeSession, state: NodeState) -> None:
        self._session = session
        self._state = state
        self._under_way: set[asyncio.Future[Any]] = set()
        self._leased_batches: set[LeasedBatch] = set()

    async def take(
        self,
        ident: str,
        queue: str,
        statement: SqlStatement,
        timeout: timedelta | None,  # noqa: ASYNC109
    ) -> list[Element]:
        """Reserve elements; with a timeout, wait for them."""
        # Make ``finish`` wait until the commit or release of the elements is queued.
        busy = asyncio.get_running_loop().create_future()
        self._under_way.add(busy)
        take = _Take(queue, statement)
        call = take.call
        try:
            if not timeout:
                return await self._reserve(ident, take)
            woken = asyncio.Event()
            taking = BlockingTake(self._state, ident, queue, call, timeout, woken.set)

            async def do(step: Call[Any] | Wait) -> Any:
                if isinstance(step, Wait):
                    return await self._sleep(step, woken)
                if step is call:
                    return await self._reserve(ident, take)
                return await self._session.run(step)

            return await drive_async(taking.steps(lambda: self._session.is_stopped), do)
        finally:
            self._under_way.discard(busy)
            busy.set_result(None)

    def remove(self, ident: str, elements: list[Element]) -> None:
        """Queue the commit of popped elements, without waiting for it."""
        if elements:
            until = monotonic() + queue_calls.DEFAULT_DURATION.total_seconds()
            call = queue_calls.commit(ident, [element.lease for element in elements])
            self._commit(ident, call, until)

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
        if (done := leased.last_commit()) is not None:
            try:
                self._commit("", done, leased.expires_at, leased)
            except NodeClosed as closed:
                self._came_again("", closed)
        for call in leased.leftover():
            self._post(call)

    async def finish(self) -> None:
        """Wait for calls in progress, up to 5 seconds; the node is already stopped."""
        deadline = monotonic() + _CLOSING_SECONDS
        for leased in list(self._leased_batches):
            self.put_back(leased)
        while self._under_way and self._state.heartbeat.is_connected:
            seconds = deadline - monotonic()
            if seconds <= 0:
                return
            await asyncio.wait(self._under_way, timeout=seconds)

    # Internals

    async def _reserve(self, ident: str, take: _Take) -> list[Element]:
        take.is_begun = False
        future = self._order(take.call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if take.is_begun:
                future.add_done_callback(partial(self._give_back, ident))
            else:
                future.cancel()
            raise

    def _give_back(self, ident: str, future: asyncio.Future[list[Element]]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        if leases := [element.lease for element in future.result()]:
            self._post(queue_calls.release(ident, leases))

    async def _sleep(self, step: Wait, woken: asyncio.Event) -> None:
        woken.clear()
        if step.is_ready() or self._session.is_stopped:
            return
        seconds = min(max(0.0, step.deadline - monotonic()), _LONGEST_WAIT)
        timer = asyncio.get_running_loop().call_later(seconds, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()

    def _commit(
        self, ident: str, call: Call[AckResult], until: float, leased: LeasedBatch | None = None
    ) -> None:
        future = self._order(call)
        future.add_done_callback(partial(self._committed, ident, call, until, leased))

    def _committed(
        self,
        ident: str,
        call: Call[AckResult],
        until: float,
        leased: LeasedBatch | None,
        future: asyncio.Future[AckResult],
    ) -> None:
        if future.cancelled():
            return
        error = future.exception()
        # A late commit works too, unless another consumer has taken the element.
        may_again = monotonic() < until and not self._session.is_closed
        if may_again and isinstance(error, ConnectionLost):
            self._commit_again(ident, call, until)
        elif may_again and error is not None and is_transient(error):
            # The pause counts as a call in progress, so ``finish`` waits for it.
            loop = asyncio.get_running_loop()
            self._under_way.add(busy := loop.create_future())
            busy.add_done_callback(self._under_way.discard)
            loop.call_later(AGAIN_SECONDS, self._commit_again, ident, call, until, busy)
        elif error is not None:
            self._came_again(ident, error)
        elif leased is not None:
            leased.committed(future.result())

    def _commit_again(
        self,
        ident: str,
        call: Call[AckResult],
        until: float,
        busy: asyncio.Future[None] | None = None,
    ) -> None:
        try:
            self._commit(ident, call, until)
        except NodeClosed as closed:
            self._came_again(ident, closed)
        finally:
            if busy is not None:
                busy.set_result(None)

    def _post(self, call: Call[AckResult]) -> None:
        try:
            future = self._order(call)
        except NodeClosed as closed:
            self._came_again("", closed)
            return
        future.add_done_callback(self._posted)

    def _posted(self, future: asyncio.Future[AckResult]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._came_again("", error)

    def _order(self, call: Call[Any]) -> asyncio.Future[Any]:
        future = self._session.order(call)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _came_again(self, ident: str, error: BaseException) -> None:
        self._state.counters.lost_leases += 1
        self._state.log.warning(
            "%s: could not commit or give back elements; they return when their leases run out: %s",
            ident or self._state.ident,
            error,
        )


class AsyncQueueMethods:
    """The methods of :class:`~psqlmessages.client.async_node.AsyncNode` for queues."""

    _session: AsyncNodeSession
    _state: NodeState
    _taker: AsyncQueueConsumer

    async def push(
        self,
        queue: str,
        body: Any,
        *,
        headers: Headers | None = None,
        mature: datetime | None = None,
        delay: timedelta | None = None,
        tries: int = 0,
        key: str | None = None,
    ) -> int:
        """See :meth:`Node.push`."""
        return await self._session.run(
            queue_calls.push(
                self._acting,
                queue,
                EncodedBody.of(body),
                headers=headers,
                mature=mature,
                delay=delay,
                tries=tries,
                key=key,
            )
        )

    async def push_many(
        self,
        queue: str,
        bodies: Iterable[Any],
        *,
        headers: Iterable[Headers | None] | None = None,
        mature: datetime | None = None,
        delay: timedelta | None = None,
        tries: int = 0,
        keys: Iterable[str | None] | None = None,
    ) -> list[int]:
        """See :meth:`Node.push_many`."""
        return await self._session.run(
            queue_calls.push_many(
                self._acting,
                queue,
                list(bodies),
                headers=headers,
                mature=mature,
                delay=delay,
                tries=tries,
                keys=keys,
            )
        )

    async def pop(
        self,
        queue: str,
        count: int = 1,
        *,
        timeout: timedelta | None = None,  # noqa: ASYNC109
    ) -> list[Element]:
        """See :meth:`Node.pop`; a cancelled call takes nothing.

        It reserves the elements and commits them in the background. If the program dies in between,
        they are delivered again after two minutes.
        """
        ident = self._acting
        statement = queue_calls.reserve(ident, queue, count)
        elements = await self._taker.take(ident, queue, statement, timeout)
        self._taker.remove(ident, elements)
        for element in elements:
            element.lease = ""
        return elements

    async def reserve(
        self,
        queue: str,
        count: int = 1,
        duration: timedelta = DEFAULT_DURATION,
        *,
        timeout: timedelta | None = None,  # noqa: ASYNC109
    ) -> list[Element]:
        """See :meth:`Node.reserve`; a cancelled call releases its elements."""
        ident = self._acting
        statement = queue_calls.reserve(ident, queue, count, duration)
        return await self._taker.take(ident, queue, statement, timeout)

    async def commit(self, *elements: Element | str) -> AckResult:
        """See :meth:`Node.commit`."""
        return await self._session.run(queue_calls.commit(self._acting, elements))

    async def rollback(self, *elements: Element | str, delay: timedelta | None = None) -> AckResult:
        """See :meth:`Node.rollback`."""
        return await self._session.run(queue_calls.rollback(self._acting, elements, delay))

    async def release(self, *elements: Element | str) -> AckResult:
        """See :meth:`Node.release`."""
        return await self._session.run(queue_calls.release(self._acting, elements))

    async def remove(self, queue: str, id_: int) -> bool:
        """See :meth:`Node.remove`."""
        return await self._session.run(queue_calls.remove(self._acting, queue, id_))

    async def pause(self, queue: str) -> bool:
        """See :meth:`Node.pause`."""
        return await self._session.run(queue_calls.pause(self._acting, queue))

    async def resume(self, queue: str) -> bool:
        """See :meth:`Node.resume`."""
        return await self._session.run(queue_calls.resume(self._acting, queue))

    async def drain(self, queue: str) -> int:
        """See :meth:`Node.drain`."""
        return await self._session.run(queue_calls.drain(self._acting, queue))

    async def sizes(self, queue: str) -> QueueSizes:
        """See :meth:`Node.sizes`."""
        return await self._session.run(queue_calls.sizes(self._acting, queue))

    async def consume(
        self,
        queue: str,
        *,
        batch: int = 1,
        duration: timedelta = DEFAULT_DURATION,
        idle: timedelta | None = None,
        group: timedelta = DEFAULT_GROUP,
    ) -> AsyncIterator[Element]:
        """See :meth:`Node.consume`; ``close`` commits or gives back the elements of its batch."""
        leased = self._taker.new_batch(self._acting, queue, duration, group)
        timeout = FOR_EVER if idle is None else idle
        try:
            while not self._session.is_stopped:
                leased.take(await self.reserve(queue, batch, duration, timeout=timeout))
                if leased.is_empty:
                    return
                while not self._session.is_stopped and (element := leased.next()) is not None:
                    yield element
                    if leased.done():
                        await self._commit(leased)
                await self._commit(leased)
        except NodeClosed:
            if not self._session.is_stopped:
                raise
        finally:
            self._taker.put_back(leased)

    async def _commit(self, leased: LeasedBatch) -> None:
        while (call := leased.commit()) is not None:
            try:
                leased.committed(await self._session.run(call))
            except ConnectionLost:
                if not leased.may_try_again():
                    raise
            except psycopg.Error as error:
                if not (is_transient(error) and leased.may_try_again()) or self._session.is_stopped:
                    raise
                leased.must_wait(error)
                await self._session.wait(lambda: False, monotonic() + AGAIN_SECONDS)

    @property
    def _acting(self) -> str:
        return self._state.registration.acting
