"""Observer: one per process; receives all topics and events while a page is open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

import psycopg

from psqlmessages.monitor.broadcast import Broadcast
from psqlmessages.monitor.history import TOPICS, History
from psqlmessages.monitor.names import new_ident
from psqlmessages.monitor.queries import Health, MonitorReader, RuleRow, read_health
from psqlmessages.monitor.status import MonitorStatus
from psqlmessages.monitor.viewer import Viewer
from psqlmessages.orm import direct_dsn
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub, get_hub
from psqlmessages.retry import RateLimitedLogger

# Observe for this long after the last viewer has left, so that the history survives a page change.
# After that the monitor puts no load on the database.
IDLE_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.25
_CHECK_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 1.0
_HEALTH_SECONDS: Final = 2.0

logger = logging.getLogger("psqlmessages")


class Observer:
    """A receiver of the hub that records messages and events and updates its viewers."""

    def __init__(self, find_hub: Callable[[], Hub], reader: MonitorReader) -> None:
        self.ident = ""
        self.viewers: set[Viewer] = set()
        self.history = History()
        self.status = MonitorStatus()
        self.health: Health | None = None
        self.rules: dict[str, list[RuleRow]] = {}
        self._find_hub = find_hub
        self._hub = find_hub()
        self._reader = reader
        self._broadcast = Broadcast(self)
        self._running: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_looked_at = asyncio.Event()
        # Events since the last query began: its result may be older than they are.
        self._recent: deque[tuple[str, str, str]] = deque(maxlen=10_000)
        self._log = RateLimitedLogger(logger)

    # Viewers

    def add(self, viewer: Viewer) -> None:
        """Send a viewer a snapshot after the next check, then updates."""
        self.viewers.add(viewer)
        self._is_empty.clear()
        self._is_looked_at.set()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="psqlmessages monitor")
        self._wake.set()

    def remove(self, viewer: Viewer) -> None:
        """Remove a viewer; after the last one, observe for ``IDLE_SECONDS`` longer."""
        self.viewers.discard(viewer)
        if not self.viewers:
            self._is_looked_at.clear()
            self._is_empty.set()

    def watch(self, viewer: Viewer, topic: str | None) -> None:
        """Switch a viewer to one topic, or to the list (None)."""
        viewer.topic, viewer.is_behind = topic, True
        self._wake.set()

    # Receiver of the hub

    def deliver(self, frame: HubMessage) -> None:
        """Record a message or an event from the hub. Large bodies are counted, but not read."""
        header = frame.header
        if header["Type"] == "Topic":
            self.history.message(header, frame.body, frame.at)
        elif header["Type"] == "Sys":
            self._happened(
                header["Evt"], header.get("Ident", ""), header.get("Topic", ""), frame.at
            )

    def _happened(self, event: str, ident: str, topic: str, at: float) -> None:
        self.history.event(event, ident, topic, at)
        self._recent.append((event, ident, topic))
        if event == "connection_lost":
            self.status.lost(at)
        elif event == "reconnected":
            self.status.returned(at)
            self._wake.set()
        elif event in ("disconnect", "topic_unobserve") and ident == self.ident:
            self.status.refused(at, None, "")
            self._wake.set()

    # Background tasks

    async def _run(self) -> None:
        """Observe until there has been no viewer for a while."""
        while True:
            try:
                await self._work()
            finally:
                await self._end()
            if not self.viewers:
                return

    async def _work(self) -> None:
        loops = {
            asyncio.create_task(loop)
            for loop in (self._until_left(), self._tick(), self._check(), self._examine())
        }
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    logger.error("the monitor failed and restarts", exc_info=error)
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    async def _end(self) -> None:
        # Viewers reconnect and get a new snapshot.
        for viewer in list(self.viewers):
            viewer.end(1011, "the monitor restarts")
        self.viewers.clear()
        await self._hub.leave(self)
        await self._reader.close()
        self.history, self.status = History(), MonitorStatus()
        self.health, self.ident = None, ""
        self.rules.clear()

    async def _until_left(self) -> None:
        while True:
            await self._is_empty.wait()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._is_looked_at.wait()
            except TimeoutError:
                return

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._broadcast.tick(time.time())

    async def _check(self) -> None:
        """Keep the registration valid and read the database; retry sooner after a failure."""
        while True:
            self._wake.clear()
            arrived = {viewer for viewer in self.viewers if not viewer.is_greeted}
            try:
                is_well = await self._observe() and await self._read()
            except (psycopg.Error, OSError) as error:
                self._log.warning("the monitor cannot read the database: %s", error)
                self.status.unread(time.time())
                is_well = False
            for viewer in arrived & self.viewers:
                self._broadcast.greet(viewer, time.time())
            pause = _CHECK_SECONDS if is_well else _RETRY_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _observe(self) -> bool:
        """Register with the hub and observe all topics if needed; return whether it observes."""
        if self.status.is_observing:
            if self.status.is_away or await self._reader.observes(self.ident):
                return not self.status.is_away
            self.status.refused(time.time(), None, "")
        await self._hub.leave(self)
        self._hub = self._find_hub()
        self.ident = new_ident()
        answer = await self._hub.init(self.ident, self, bodies=False)
        if answer["Err"] == "0":
            answer = await self._hub.run(self.ident, self, "topic_observe", "*")
        now = time.time()
        if answer["Err"] == "0":
            self.status.observes(now)
        elif answer["Err"] == "59":
            self.status.lost(now)
        else:
            role = await self._reader.role() if answer["Err"] in ("2", "3", "5") else None
            self.status.refused(now, role, answer["Errstr"])
        return answer["Err"] == "0"

    async def _read(self) -> bool:
        history, watched = self.history, frozenset(v.topic for v in self.viewers if v.topic)
        history.watched = watched
        self._recent.clear()
        before, known = history.number, history.topics.keys() | watched
        rows = await self._reader.topics(known, max(0, TOPICS - len(known)))
        history.place(rows, before)
        for event in self._recent:
            history.follow(*event)
        history.topics_there = await self._reader.count_topics()
        self.rules = {name: await self._reader.rules(name) for name in watched}
        self.status.read()
        return True

    async def _examine(self) -> None:
        while True:
            now = time.time()
            try:
                health = await read_health(self._reader, now)
            except (psycopg.Error, OSError) as error:
                self._log.warning("the monitor cannot read the health figures: %s", error)
                health = Health(now)
            if self._hub.is_connected:
                health.echo = self._hub.echo_seconds
            self.health = health
            await asyncio.sleep(_HEALTH_SECONDS)
            await self._is_looked_at.wait()


_observers: WeakKeyDictionary[asyncio.AbstractEventLoop, Observer] = WeakKeyDictionary()


def get_observer() -> Observer:
    """Return the observer of this event loop; it is idle until a viewer connects."""
    loop = asyncio.get_running_loop()
    if (observer := _observers.get(loop)) is None:
        observer = _observers[loop] = Observer(get_hub, MonitorReader(direct_dsn()))
    return observer


def running_observer() -> Observer | None:
    """Return the observer of this event loop if it is observing, for metrics."""
    observer = _observers.get(asyncio.get_running_loop())
    return observer if observer is not None and observer.status.is_observing else None
