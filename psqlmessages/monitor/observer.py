"""Observer: one per event loop; observes all topics and events while a page is open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import psycopg

from psqlmessages.monitor.broadcast import Broadcast
from psqlmessages.monitor.history import History
from psqlmessages.monitor.names import new_ident
from psqlmessages.monitor.queries import Health, MonitorReader, RuleRow, read_health
from psqlmessages.monitor.status import MonitorStatus
from psqlmessages.monitor.topic_list import TopicPage, TopicQuery
from psqlmessages.monitor.viewer import Viewer
from psqlmessages.orm import direct_dsn
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub, get_hub
from psqlmessages.relay.socket import INTERNAL_ERROR
from psqlmessages.retry import RateLimitedLogger, wait_for_event

# Observe for this long after the last page was closed, so that the history survives a page change.
# Afterwards the monitor puts no load on the database.
IDLE_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.25
_CHECK_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 1.0
_HEALTH_SECONDS: Final = 2.0
# Error numbers in answers of the hub.
_UNREACHABLE_ERROR: Final = "59"
_MISSING_RULE_ERRORS: Final = ("2", "3", "5")

logger = logging.getLogger("psqlmessages")


class Observer:
    """The monitor's receiver at the hub: records messages and events, and updates the viewers.

    ``rules`` has the rules for each topic with an open page; ``pages`` has the viewed pages of the
    topic list.
    """

    def __init__(self, find_hub: Callable[[], Hub], reader: MonitorReader) -> None:
        self.ident = ""
        self.viewers: set[Viewer] = set()
        self.history = History()
        self.status = MonitorStatus()
        self.health: Health | None = None
        self.rules: dict[str, list[RuleRow]] = {}
        self.pages: dict[TopicQuery, TopicPage] = {}
        self._find_hub = find_hub
        self._hub = find_hub()
        self._reader = reader
        self._broadcast = Broadcast(self)
        self._task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._has_no_viewers = asyncio.Event()
        self._has_viewers = asyncio.Event()
        # Events since the last query of topics began. The query may not have seen their effects.
        self._recent_events: deque[tuple[str, str, str]] = deque(maxlen=10_000)
        # When PostgreSQL was started, and when the hub last lost the connection.
        self._postgres_started_at: float | None = None
        self._connection_lost_at = 0.0
        self._log = RateLimitedLogger(logger)

    # Viewers

    def add(self, viewer: Viewer) -> None:
        """Add a viewer: it gets a snapshot after the next check, then updates."""
        self.viewers.add(viewer)
        self._has_no_viewers.clear()
        self._has_viewers.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="psqlmessages monitor")
        self._wakeup.set()

    def remove(self, viewer: Viewer) -> None:
        """Remove a viewer. Without viewers, the observer stops after ``IDLE_SECONDS``."""
        self.viewers.discard(viewer)
        if not self.viewers:
            self._has_viewers.clear()
            self._has_no_viewers.set()

    def watch(self, viewer: Viewer, topic: str | None) -> None:
        """Switch a viewer to another topic; None: to the topic list."""
        viewer.topic, viewer.is_behind = topic, True
        self._wakeup.set()

    def watch_list(self, viewer: Viewer, query: TopicQuery) -> None:
        """Switch a viewer to another page of the list of topics."""
        viewer.query = query
        self.watch(viewer, None)

    # Receiver of the hub

    def deliver(self, message: HubMessage) -> None:
        """Record a message or an event from the hub. The bodies of large messages are not read."""
        header, at = message.header, message.received_at
        if header["Type"] == "Topic":
            self.history.add_message(header, message.body, at)
        elif header["Type"] == "Sys":
            self._record_event(header["Evt"], header.get("Ident", ""), header.get("Topic", ""), at)

    def _record_event(self, event: str, ident: str, topic: str, at: float) -> None:
        self.history.add_event(event, ident, topic, at)
        self._recent_events.append((event, ident, topic))
        if event == "connection_lost":
            self.status.on_connection_lost(at)
            self._connection_lost_at = at
        elif event == "reconnected":
            self.status.on_reconnected(at)
            self._wakeup.set()
        elif event in ("disconnect", "topic_unobserve") and ident == self.ident:
            # The node's rule was removed, or an administrator disconnected the node.
            self.status.on_not_observing(at)
            self._wakeup.set()

    # Background tasks

    async def _run(self) -> None:
        """Observe until an error or ``IDLE_SECONDS`` without viewers; repeat if viewers came."""
        while True:
            try:
                await self._run_tasks()
            finally:
                await self._stop()
            if not self.viewers:
                return

    async def _run_tasks(self) -> None:
        work = (self._wait_until_unused(), self._tick(), self._check(), self._refresh_health())
        tasks = {asyncio.create_task(coroutine) for coroutine in work}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    logger.error("the monitor failed: restarting it", exc_info=error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop(self) -> None:
        # The pages reconnect and get a new snapshot.
        for viewer in list(self.viewers):
            viewer.close(INTERNAL_ERROR, "the monitor restarts")
        self.viewers.clear()
        await self._hub.leave(self)
        await self._reader.close()
        self.history, self.status = History(), MonitorStatus()
        self.health, self.ident, self._postgres_started_at = None, "", None
        self.rules.clear()
        self.pages.clear()

    async def _wait_until_unused(self) -> None:
        while True:
            await self._has_no_viewers.wait()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._has_viewers.wait()
            except TimeoutError:
                return

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._broadcast.tick(time.time())

    async def _check(self) -> None:
        """Repeatedly register the node if necessary, and read topics and rules."""
        while True:
            self._wakeup.clear()
            new_viewers = {viewer for viewer in self.viewers if not viewer.has_started}
            try:
                is_successful = await self._observe()
                if is_successful:
                    await self._read_topics()
            except (psycopg.Error, OSError) as error:
                self._log.warning("the monitor cannot read the database: %s", error)
                self.status.on_read_failed(time.time())
                is_successful = False
            for viewer in new_viewers & self.viewers:
                self._broadcast.send_snapshot(viewer, time.time())
            pause = _CHECK_SECONDS if is_successful else _RETRY_SECONDS
            await wait_for_event(self._wakeup, pause)

    async def _observe(self) -> bool:
        """Register a new observing node if necessary; return whether a node observes now."""
        if self.status.is_registered:
            if self.status.is_disconnected or await self._reader.is_observing(self.ident):
                return not self.status.is_disconnected
            self.status.on_not_observing(time.time())
        await self._hub.leave(self)
        self._hub = self._find_hub()
        self.ident = new_ident()
        answer = await self._hub.init(self.ident, self, wants_bodies=False)
        if answer["Err"] == "0":
            answer = await self._hub.run(self.ident, self, "topic_observe", "*")
        now = time.time()
        is_observing = answer["Err"] == "0"
        if is_observing:
            self.status.on_observing(now)
        elif answer["Err"] == _UNREACHABLE_ERROR:
            self.status.on_connection_lost(now)
        else:
            role = await self._reader.read_role() if answer["Err"] in _MISSING_RULE_ERRORS else None
            self.status.on_not_observing(now, role, answer["Errstr"])
        return is_observing

    async def _read_topics(self) -> None:
        history = self.history
        started_at = await self._reader.read_start_time()
        if self._postgres_started_at not in (None, started_at):
            history.on_restart(self._connection_lost_at)
        self._postgres_started_at = started_at
        pages = {
            query: await self._reader.read_page(query, history.topics.values(), int(time.time()))
            for query in {each.query for each in self.viewers if each.topic is None}
        }
        viewed = {each.topic for each in self.viewers if each.topic}
        history.viewed = viewed.union(*(page.names for page in pages.values()))
        self._recent_events.clear()
        number_at_query = history.last_number
        active = {t.name for t in history.topics.values() if t.last_at}
        rows = await self._reader.read_topics(active | history.viewed)
        history.apply_rows(rows, number_at_query)
        self.pages = pages
        for event in self._recent_events:
            history.apply_event(*event)
        history.topic_count = await self._reader.count_topics()
        self.rules = {name: await self._reader.read_rules(name) for name in viewed}
        self.status.on_read(time.time())

    async def _refresh_health(self) -> None:
        while True:
            now = time.time()
            try:
                health = await read_health(self._reader, now)
            except (psycopg.Error, OSError) as error:
                self._log.warning("the monitor cannot read the health of the server: %s", error)
                health = Health(now)
            if self._hub.is_connected:
                # Round trip of a notification that the hub sends to itself.
                health.echo = self._hub.echo_seconds
            self.health = health
            await asyncio.sleep(_HEALTH_SECONDS)
            await self._has_viewers.wait()


_observers: WeakKeyDictionary[asyncio.AbstractEventLoop, Observer] = WeakKeyDictionary()


def get_observer() -> Observer:
    """Return the observer of this event loop; it does nothing until a viewer is added."""
    loop = asyncio.get_running_loop()
    if (observer := _observers.get(loop)) is None:
        observer = _observers[loop] = Observer(get_hub, MonitorReader(direct_dsn()))
    return observer


def running_observer() -> Observer | None:
    """Return the observer of this event loop; None if its node is not registered."""
    observer = _observers.get(asyncio.get_running_loop())
    return observer if observer is not None and observer.status.is_registered else None
