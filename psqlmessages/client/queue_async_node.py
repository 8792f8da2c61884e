"""Queues of an AsyncNode: the same as those of Node, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

import psycopg

from psqlmessages.client import queue_calls
from psqlmessages.client.async_link import AsyncLink
from psqlmessages.client.calls import is_passing
from psqlmessages.client.listening import Listening
from psqlmessages.client.queue_async_taker import AsyncTaker
from psqlmessages.client.queue_calls import DEFAULT_DURATION, Headers
from psqlmessages.client.queue_elements import (
    Element,
    QueueSizes,
    Settled,
    leases_of,
    settle,
)
from psqlmessages.client.queue_hand import DEFAULT_GROUP, FOR_EVER, Hand
from psqlmessages.client.queue_taking import AGAIN_SECONDS
from psqlmessages.exceptions import ConnectionLost, NodeClosed
from psqlmessages.wire import Body


class AsyncQueueMethods:
    """The methods of :class:`~psqlmessages.client.async_node.AsyncNode` for queues."""

    _link: AsyncLink
    _listening: Listening
    _taker: AsyncTaker

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
        return await self._link.run(
            queue_calls.push(
                self._acting,
                queue,
                Body.of(body),
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
        return await self._link.run(
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
        """See :meth:`Node.pop`; cancelled, it has taken nothing.

        So they are removed right after they were handed over: a program that dies in that moment
        gets them again, two minutes later.
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
        """See :meth:`Node.reserve`; cancelled, it releases what it has taken."""
        ident = self._acting
        statement = queue_calls.reserve(ident, queue, count, duration)
        return await self._taker.take(ident, queue, statement, timeout)

    async def commit(self, *elements: Element | str) -> Settled:
        """See :meth:`Node.commit`."""
        call = queue_calls.commit(self._acting, leases_of(elements))
        return settle(elements, await self._link.run(call))

    async def rollback(self, *elements: Element | str, delay: timedelta | None = None) -> Settled:
        """See :meth:`Node.rollback`."""
        call = queue_calls.rollback(self._acting, leases_of(elements), delay)
        return settle(elements, await self._link.run(call))

    async def release(self, *elements: Element | str) -> Settled:
        """See :meth:`Node.release`."""
        call = queue_calls.release(self._acting, leases_of(elements))
        return settle(elements, await self._link.run(call))

    async def remove(self, queue: str, id_: int) -> bool:
        """See :meth:`Node.remove`."""
        return await self._link.run(queue_calls.remove(self._acting, queue, id_))

    async def pause(self, queue: str) -> bool:
        """See :meth:`Node.pause`."""
        return await self._link.run(queue_calls.pause(self._acting, queue))

    async def resume(self, queue: str) -> bool:
        """See :meth:`Node.resume`."""
        return await self._link.run(queue_calls.resume(self._acting, queue))

    async def drain(self, queue: str) -> int:
        """See :meth:`Node.drain`."""
        return await self._link.run(queue_calls.drain(self._acting, queue))

    async def sizes(self, queue: str) -> QueueSizes:
        """See :meth:`Node.sizes`."""
        return await self._link.run(queue_calls.sizes(self._acting, queue))

    async def consume(
        self,
        queue: str,
        *,
        batch: int = 1,
        duration: timedelta = DEFAULT_DURATION,
        idle: timedelta | None = None,
        group: timedelta = DEFAULT_GROUP,
    ) -> AsyncIterator[Element]:
        """See :meth:`Node.consume`; ``close`` settles what it has at hand."""
        hand = self._taker.new_hand(self._acting, queue, duration, group)
        timeout = FOR_EVER if idle is None else idle
        try:
            while not self._link.is_stopped:
                hand.take(await self.reserve(queue, batch, duration, timeout=timeout))
                if hand.is_empty:
                    return
                while not self._link.is_stopped and (element := hand.next()) is not None:
                    yield element
                    if hand.done():
                        await self._commit(hand)
                await self._commit(hand)
        except NodeClosed:
            if not self._link.is_stopped:
                raise
        finally:
            self._taker.put_back(hand)

    async def _commit(self, hand: Hand) -> None:
        while (call := hand.commit()) is not None:
            try:
                hand.committed(await self._link.run(call))
            except ConnectionLost:
                if not hand.may_try_again():
                    raise
            except psycopg.Error as error:
                if not (is_passing(error) and hand.may_try_again()) or self._link.is_stopped:
                    raise
                hand.must_wait(error)
                await self._link.wait(lambda: False, monotonic() + AGAIN_SECONDS)

    @property
    def _acting(self) -> str:
        return self._listening.registration.acting
