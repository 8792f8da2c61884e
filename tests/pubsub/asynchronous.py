"""What the tests of AsyncPubSub share: a loop with a limit, an ear, a wait."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from psqlmessages import AsyncPubSub
from psqlmessages.pubsub import Event

SECONDS = 60

NewAsyncBus = Callable[..., AsyncPubSub]


def run(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a test's coroutine; a task that is stuck fails it."""

    async def limited() -> None:
        async with asyncio.timeout(110):
            await coroutine

    asyncio.run(limited())


class AsyncEar:
    """A handler that keeps what it is called with: a coroutine function."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[Event] = asyncio.Queue()

    async def __call__(self, event: Event) -> None:
        await self._heard.put(event)

    async def event(self) -> Event:
        async with asyncio.timeout(SECONDS):
            return await self._heard.get()

    async def payload(self) -> Any:
        return (await self.event()).payload


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, with turns of the loop between."""
    never = asyncio.Event()
    for _ in range(SECONDS * 100):
        if condition():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), 0.01)
    raise AssertionError("it never came to be")
