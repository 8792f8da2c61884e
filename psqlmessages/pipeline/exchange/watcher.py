"""Source watcher: lets the driver wait while the source queues are empty."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from time import monotonic

import psycopg

from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.client.wakeups import PollSchedule
from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline.exchange.definition import ExchangeInput
from psqlmessages.retry import Backoff, RateLimitedLogger

logger = logging.getLogger("psqlmessages")

_LEAST, _MOST = timedelta(seconds=0.1), timedelta(seconds=5)


class WatchedSource:
    """One source queue, and when to query its state again."""

    def __init__(
        self,
        source: ExchangeInput,
        listener: QueueListener,
        log: RateLimitedLogger,
        roused: asyncio.Event,
    ) -> None:
        self.source = source
        self.ask_at = 0.0
        self._listener = listener
        self._log = log
        self._roused = roused
        self._rouses = 0
        self._schedule = PollSchedule()
        self._backoff = Backoff(_LEAST, _MOST)
        listener.add(source.place.queue, self.wake)

    def wake(self) -> None:
        """Query the state now, or after the backoff if its server is down."""
        self._rouses += 1
        self._schedule.reset()
        self.ask_at = self._backoff.next_at
        self._roused.set()

    def leave(self) -> None:
        """Stop listening for pushes."""
        self._listener.remove(self.source.place.queue, self.wake)

    async def has_work(self) -> bool:
        """Return whether the queue has available elements; schedule the next query."""
        rouses = self._rouses
        try:
            queue_state = await self._listener.listen(self.source.ident, self.source.place.queue)
        except (psycopg.Error, MessagesError) as error:
            now = monotonic()
            self.ask_at = now + self._backoff.failed(now)
            text = " ".join(str(error).split())
            self._log.warning("node %s cannot watch queue %s: %s", *self.source, text)
            return False
        self._backoff.succeeded()
        now = monotonic()
        next_at = queue_state.again_at if queue_state.next_at is None else queue_state.next_at
        if self._rouses == rouses:
            self.ask_at = min(now + self._schedule.interval, next_at)
            self._schedule.polled()
        return next_at <= now


class SourceWatcher:
    """Watches the source queues of exchanges, with one listening connection per database."""

    def __init__(self, address: Callable[[str], str]) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._listeners: dict[str, QueueListener] = {}
        self._running: dict[ExchangeInput, WatchedSource] = {}
        self._log = RateLimitedLogger(logger)
        self._roused = asyncio.Event()

    def has_work(self, sources: Collection[ExchangeInput], seconds: float) -> bool:
        """Wait until a queue has available elements; return False if the time is over before.

        If a server is down or a rule is missing, it logs that and tries again.
        """
        return self._loop.run_until_complete(self._has_work(sources, seconds))

    def wake(self) -> None:
        """Query the state of all queues again."""
        for running in self._running.values():
            running.wake()

    def close(self) -> None:
        """Close the connections."""
        for listener in self._listeners.values():
            self._loop.run_until_complete(listener.close())
        self._loop.close()

    async def _has_work(self, sources: Collection[ExchangeInput], seconds: float) -> bool:
        until = monotonic() + seconds
        running_exchanges = list(self._posted(sources))
        while True:
            self._roused.clear()
            for running in running_exchanges:
                if running.ask_at <= monotonic() and await running.has_work():
                    return True
            next_at = min([until, *(running.ask_at for running in running_exchanges)])
            if (left := next_at - monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._roused.wait(), left)
            if monotonic() >= until:
                return False

    def _posted(self, sources: Collection[ExchangeInput]) -> Iterator[WatchedSource]:
        """Yield the watched sources; stop watching all others."""
        for source in self._running.keys() - set(sources):
            self._running.pop(source).leave()
        for source in sources:
            if source not in self._running:
                listener = self._listener(source.place.namespace)
                self._running[source] = WatchedSource(source, listener, self._log, self._roused)
            yield self._running[source]

    def _listener(self, namespace: str) -> QueueListener:
        if namespace not in self._listeners:
            address = self._address(namespace)
            self._listeners[namespace] = QueueListener(address, "exchange listens")
        return self._listeners[namespace]
