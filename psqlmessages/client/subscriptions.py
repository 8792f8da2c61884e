"""Subscriptions: what a node's ``subscribe`` gives: iterators over reading, sync and async."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeVar

from psqlmessages.client.reading import Reading
from psqlmessages.client.steps import Steps, Wait, drive, drive_async
from psqlmessages.client.streams import StreamMessage

if TYPE_CHECKING:
    from psqlmessages.client.async_link import AsyncLink
    from psqlmessages.client.link import Link

T = TypeVar("T")


class Subscription(Iterator[StreamMessage]):
    """The messages of a subscription: what waited first, then each as it is published.

    Who asks for the next message says that those before are done: from then on they are passed,
    in batches. What was not passed comes again: after a crash, or where the loop was left. One
    thread iterates.
    """

    def __init__(self, link: Link, reading: Reading) -> None:
        self._link = link
        self._reading = reading
        self._take(reading.begin())

    @property
    def topic(self) -> str:
        """The topic that is read."""
        return self._reading.topic

    def __next__(self) -> StreamMessage:
        message = self._take(self._reading.next(lambda: self._link.is_stopped))
        if message is None:
            raise StopIteration
        return message

    def confirm(self, message: StreamMessage | None = None) -> None:
        """Pass all messages given so far, or up to this one, at once: they do not come again."""
        self._take(self._reading.confirm(message.id if message is not None else None))

    def _take(self, steps: Steps[T]) -> T:
        return drive(steps, self._do)

    def _do(self, step: Any) -> Any:
        if isinstance(step, Wait):
            return self._link.wait(step.is_ready, step.deadline)
        return self._link.run(step)


class AsyncSubscription(AsyncIterator[StreamMessage]):
    """See :class:`Subscription`; one task iterates.

    Awaited, it subscribes at once, else with the first message.
    """

    def __init__(self, link: AsyncLink, reading: Reading) -> None:
        self._link = link
        self._reading = reading

    @property
    def topic(self) -> str:
        """See :attr:`Subscription.topic`."""
        return self._reading.topic

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._begin().__await__()

    async def __anext__(self) -> StreamMessage:
        message = await self._take(self._reading.next(lambda: self._link.is_stopped))
        if message is None:
            raise StopAsyncIteration
        return message

    async def _begin(self) -> Self:
        await self._take(self._reading.begin())
        return self

    async def confirm(self, message: StreamMessage | None = None) -> None:
        """See :meth:`Subscription.confirm`."""
        await self._take(self._reading.confirm(message.id if message is not None else None))

    async def _take(self, steps: Steps[T]) -> T:
        return await drive_async(steps, self._do)

    async def _do(self, step: Any) -> Any:
        if isinstance(step, Wait):
            return await self._link.wait(step.is_ready, step.deadline)
        return await self._link.run(step)
