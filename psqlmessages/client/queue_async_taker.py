"""Queue taker of an AsyncNode: who is cancelled while it takes elements swallows none."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

from psqlmessages.client import queue_calls
from psqlmessages.client.async_link import AsyncLink
from psqlmessages.client.calls import Call, is_passing
from psqlmessages.client.listening import Listening
from psqlmessages.client.queue_elements import Element, Settled
from psqlmessages.client.queue_hand import Hand
from psqlmessages.client.queue_taking import AGAIN_SECONDS, Taking
from psqlmessages.client.steps import Wait, drive_async
from psqlmessages.client.transactions import Script, Statement, transaction
from psqlmessages.exceptions import ConnectionLost, NodeClosed

_CLOSING_SECONDS = 5.0
_LONGEST_WAIT = 24 * 60 * 60.0


class _Take:
    """A call that reserves, and whether it was sent."""

    def __init__(self, queue: str, statement: Statement) -> None:
        self._queue = queue
        self._statement = statement
        self.is_begun = False
        self.call = transaction(self._script)

    def _script(self) -> Script[list[Element]]:
        self.is_begun = True
        return (yield from queue_calls.taking(self._queue, self._statement).script())


class AsyncTaker:
    """What tasks take through one connection, and what goes back because they are gone.

    The answer to a call that takes may come when its task is cancelled, and then nothing must be
    lost. So everything is reserved: what nobody is left for is released, and what is popped is
    committed once it was handed over, between which and the return no task can be cancelled.
    """

    def __init__(self, link: AsyncLink, listening: Listening) -> None:
        self._link = link
        self._listening = listening
        self._under_way: set[asyncio.Future[Any]] = set()
        self._hands: set[Hand] = set()

    async def take(
        self,
        ident: str,
        queue: str,
        statement: Statement,
        timeout: timedelta | None,  # noqa: ASYNC109
    ) -> list[Element]:
        """Reserve, and wait for elements where there is a timeout."""
        # Until what is done with the elements is under way too: ``finish`` waits for it.
        busy = asyncio.get_running_loop().create_future()
        self._under_way.add(busy)
        take = _Take(queue, statement)
        call = take.call
        try:
            if not timeout:
                return await self._reserve(ident, take)
            woken = asyncio.Event()
            taking = Taking(self._listening, ident, queue, call, timeout, woken.set)

            async def do(step: Call[Any] | Wait) -> Any:
                if isinstance(step, Wait):
                    return await self._sleep(step, woken)
                if step is call:
                    return await self._reserve(ident, take)
                return await self._link.run(step)

            return await drive_async(taking.steps(lambda: self._link.is_stopped), do)
        finally:
            self._under_way.discard(busy)
            busy.set_result(None)

    def remove(self, ident: str, elements: list[Element]) -> None:
        """Commit what is being handed over, without waiting for it."""
        if elements:
            until = monotonic() + queue_calls.DEFAULT_DURATION.total_seconds()
            call = queue_calls.commit(ident, [element.lease for element in elements])
            self._commit(ident, call, until)

    def new_hand(self, ident: str, queue: str, duration: timedelta, group: timedelta) -> Hand:
        """Make the hand of a consumer, which ``put_back`` empties, at the latest at the end."""
        hand = Hand(self._listening, ident, queue, duration, group)
        self._hands.add(hand)
        return hand

    def put_back(self, hand: Hand) -> None:
        """Settle what is left in a hand, without waiting for it."""
        self._hands.discard(hand)
        if (done := hand.last_commit()) is not None:
            try:
                self._commit("", done, hand.expires_at, hand)
            except NodeClosed as closed:
                self._came_again("", closed)
        for call in hand.leftover():
            self._post(call)

    async def finish(self) -> None:
        """Wait for all that is under way, some seconds at most; the node is stopped already."""
        deadline = monotonic() + _CLOSING_SECONDS
        for hand in list(self._hands):
            self.put_back(hand)
        while self._under_way and self._listening.pulse.is_connected:
            seconds = deadline - monotonic()
            if seconds <= 0:
                return
            await asyncio.wait(self._under_way, timeout=seconds)

    # Inside

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
        if step.is_ready() or self._link.is_stopped:
            return
        seconds = min(max(0.0, step.deadline - monotonic()), _LONGEST_WAIT)
        timer = asyncio.get_running_loop().call_later(seconds, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()

    def _commit(
        self, ident: str, call: Call[Settled], until: float, hand: Hand | None = None
    ) -> None:
        future = self._order(call)
        future.add_done_callback(partial(self._committed, ident, call, until, hand))

    def _committed(
        self,
        ident: str,
        call: Call[Settled],
        until: float,
        hand: Hand | None,
        future: asyncio.Future[Settled],
    ) -> None:
        if future.cancelled():
            return
        error = future.exception()
        # Late is as good, as long as nobody else has taken it.
        may_again = monotonic() < until and not self._link.is_closed
        if may_again and isinstance(error, ConnectionLost):
            self._commit_again(ident, call, until)
        elif may_again and error is not None and is_passing(error):
            # Under way all the same: ``finish`` waits for it.
            loop = asyncio.get_running_loop()
            self._under_way.add(busy := loop.create_future())
            busy.add_done_callback(self._under_way.discard)
            loop.call_later(AGAIN_SECONDS, self._commit_again, ident, call, until, busy)
        elif error is not None:
            self._came_again(ident, error)
        elif hand is not None:
            hand.committed(future.result())

    def _commit_again(
        self,
        ident: str,
        call: Call[Settled],
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

    def _post(self, call: Call[Settled]) -> None:
        try:
            future = self._order(call)
        except NodeClosed as closed:
            self._came_again("", closed)
            return
        future.add_done_callback(self._posted)

    def _posted(self, future: asyncio.Future[Settled]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._came_again("", error)

    def _order(self, call: Call[Any]) -> asyncio.Future[Any]:
        future = self._link.order(call)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _came_again(self, ident: str, error: BaseException) -> None:
        self._listening.counters.lost_leases += 1
        self._listening.log.warning(
            "%s: elements could not be settled, and come back when their leases have run out: %s",
            ident or self._listening.ident,
            error,
        )
