"""Crews: the loops of one exchange, of which one at a time waits for all."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Final

from psqlmessages.graph.plans import Plan
from psqlmessages.graph.remote import Circuit
from psqlmessages.graph.reports import Reports
from psqlmessages.graph.tallies import Tally
from psqlmessages.graph.watching import Outlook, Watch

if TYPE_CHECKING:
    from psqlmessages.graph.loops import Loop

# A push that had begun before anybody waited tells nobody.
POLL_LEAST: Final = 0.1
POLL_MOST: Final = 10.0
# What is there and in a transaction's hands is free without a word where that is rolled back.
_HELD_SECONDS: Final = 1.0


class Namespace:
    """A database, as this process knows it."""

    def __init__(self, alias: str, address: str) -> None:
        self.alias = alias
        self.address = address
        self.watch = Watch(address)
        self.circuit = Circuit(alias)


class Crew:
    """Runs the loops of one exchange until it is stopped; what is in hand is then finished."""

    def __init__(self, plan: Plan, namespaces: dict[str, Namespace], tally: Tally) -> None:
        self.plan = plan
        self.namespaces = namespaces
        self.reports = Reports(plan, tally)
        self.is_stopping = False
        self.rouses = 0
        self._stopping = asyncio.Event()
        self._roused = asyncio.Event()
        self._is_watched = False
        self._parked: deque[asyncio.Future[None]] = deque()
        self._outlook: Outlook | None = None
        self._poll = POLL_LEAST

    @property
    def source(self) -> Namespace:
        """The database of the source."""
        return self.namespaces[self.plan.graphed.source.namespace]

    async def run(self, loops: list[Loop]) -> None:
        """Run until stopped."""
        queue, watch = self.plan.graphed.source.queue, self.source.watch
        watch.add(queue, self.rouse)
        try:
            await asyncio.gather(*(loop.run() for loop in loops))
        finally:
            watch.remove(queue, self.rouse)

    def stop(self) -> None:
        """Let each loop end after what it has in hand."""
        self.is_stopping = True
        self._stopping.set()
        self.rouse()
        while self._parked:
            self._call()

    def rouse(self) -> None:
        """Note that there may be something to take."""
        self.rouses += 1
        self._poll = POLL_LEAST
        self._outlook = None
        self._roused.set()
        if not self._is_watched:
            # Who watched is busy, which may take long: another looks meanwhile.
            self._call()

    def found(self) -> None:
        """Note that there was something: another loop looks for more, and else watches."""
        self._poll = POLL_LEAST
        self._outlook = None
        self._call()

    async def rest(self, rouses: int) -> None:
        """Wait until there may be something; ``rouses`` is their number before it was looked for.

        Raises what SQL does where the queue cannot be watched.
        """
        if self.is_stopping or self.rouses != rouses:
            return
        if self._is_watched:
            future = asyncio.get_running_loop().create_future()
            self._parked.append(future)
            await future
            return
        self._is_watched = True
        try:
            await self._watch(rouses)
        finally:
            self._is_watched = False

    async def pause(self, seconds: float) -> None:
        """Wait after an error; a stop ends it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _call(self) -> None:
        while self._parked:
            future = self._parked.popleft()
            if not future.done():
                future.set_result(None)
                return

    async def _watch(self, rouses: int) -> None:
        outlook = self._outlook
        if outlook is None or outlook.is_stale(monotonic()):
            source = self.plan.graphed.source.queue
            outlook = await self.source.watch.follow(self.plan.ident, source)
            if outlook.is_new or self.rouses != rouses:
                return
            self._outlook = outlook
        self._roused.clear()
        if not self.is_stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience(outlook)):
                    await self._roused.wait()

    def _patience(self, outlook: Outlook) -> float:
        poll, self._poll = self._poll, min(self._poll * 2, POLL_MOST)
        seconds = min(poll, max(outlook.again_at - monotonic(), POLL_LEAST))
        if outlook.next_at is None or outlook.is_paused:
            return seconds
        # What is available and was not given is in other hands just now.
        until_next = outlook.next_at - monotonic()
        return min(seconds, until_next if until_next > 0 else _HELD_SECONDS)
