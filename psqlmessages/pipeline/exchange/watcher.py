"""Source watcher: lets the driver wait while the source queues are empty."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

import psycopg

from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.client.wakeups import PollSchedule
from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline.exchange.definition import ExchangeInput
from psqlmessages.retry import Backoff, RateLimitedLogger, error_line

logger = logging.getLogger("psqlmessages")

_LEAST, _MOST = timedelta(seconds=0.1), timedelta(seconds=5)


@dataclass(eq=False)
class WatchedSource:
    """One source queue, and when to query its state again."""

    source: ExchangeInput
    listener: QueueListener
    log: RateLimitedLogger
    woken: asyncio.Event
    backoff: Backoff = field(default_factory=lambda: Backoff(_LEAST, _MOST))
    next_at: float = 0.0
    wakeups: int = 0
    schedule: PollSchedule = field(default_factory=PollSchedule)

    def wake(self) -> None:
        """Query the state now, or after the backoff if its server is down."""
        self.wakeups += 1
        self.schedule.reset()
        self.next_at = self.backoff.next_at
        self.woken.set()

    async def has_work(self) -> bool:
        """Return whether the queue has available elements; schedule the next query."""
        wakeups = self.wakeups
        try:
            state = await self.listener.listen(self.source.ident, self.source.place.queue)
        except (psycopg.Error, MessagesError) as error:
            now = monotonic()
            self.next_at = now + self.backoff.failed(now)
            text = error_line(error)
            self.log.warning("node %s cannot watch queue %s: %s", *self.source, text)
            return False
        self.backoff.succeeded()
        now = monotonic()
        next_at = state.listen_again_at if state.next_at is None else state.next_at
        if self.wakeups == wakeups:
            self.next_at = min(now + self.schedule.interval, next_at)
            self.schedule.lengthen()
        return next_at <= now


class SourceWatcher:
    """Watches the source queues of exchanges, with one listening connection per database."""

    def __init__(self, address: Callable[[str], str]) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._listeners: dict[str, QueueListener] = {}
        self._watched: dict[ExchangeInput, WatchedSource] = {}
        self._log = RateLimitedLogger(logger)
        self._woken = asyncio.Event()

    def has_work(self, sources: Collection[ExchangeInput], seconds: float) -> bool:
        """Wait until a queue has available elements; return False if the time is over before.

        If a server is down or a rule is missing, it logs that and tries again.
        """
        return self._loop.run_until_complete(self._has_work(sources, seconds))

    def wake(self) -> None:
        """Query the state of all queues again."""
        for watched in self._watched.values():
            watched.wake()

    def close(self) -> None:
        """Close the connections."""
        for listener in self._listeners.values():
            self._loop.run_until_complete(listener.close())
        self._loop.close()

    async def _has_work(self, sources: Collection[ExchangeInput], seconds: float) -> bool:
        until = monotonic() + seconds
        self._watch_only(sources)
        while True:
            self._woken.clear()
            for watched in self._watched.values():
                if watched.next_at <= monotonic() and await watched.has_work():
                    return True
            next_at = min([until, *(watched.next_at for watched in self._watched.values())])
            if (left := next_at - monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), left)
            if monotonic() >= until:
                return False

    def _watch_only(self, sources: Collection[ExchangeInput]) -> None:
        for source in self._watched.keys() - set(sources):
            watched = self._watched.pop(source)
            watched.listener.remove(source.place.queue, watched.wake)
        for source in sources:
            namespace = source.place.namespace
            if namespace not in self._listeners:
                address = self._address(namespace)
                self._listeners[namespace] = QueueListener(address, "exchange listens")
            if source not in self._watched:
                listener = self._listeners[namespace]
                watched = WatchedSource(source, listener, self._log, self._woken)
                listener.add(source.place.queue, watched.wake)
                self._watched[source] = watched
