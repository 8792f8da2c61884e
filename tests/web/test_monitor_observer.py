"""The observer with a real hub, in the test's own loop: its beginning, its end, its bounds."""

import asyncio
import json
import os
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.commands.doctor_queue import QUEUE_LIMIT, USAGE
from psqlmessages.monitor import history, observer, pacing, reading, viewer
from psqlmessages.monitor.admission import VIEW_MONITOR, Permit
from psqlmessages.monitor.consumers import MonitorConsumer
from psqlmessages.monitor.health import Health, read_health
from psqlmessages.monitor.observer import Observer
from psqlmessages.monitor.reading import Reader
from psqlmessages.monitor.viewer import Viewer
from psqlmessages.relay.hub import Hub
from tests.sql.conftest import World
from tests.web.receivers import run

RULE = f"{Server.owner} example.monitor.* Topic * O 60"
SECONDS = 60


@pytest.fixture(autouse=True)
def node(settings: Settings, world: World) -> None:
    settings.PSQLMESSAGES = {"NODE": "example"}
    world.rules(RULE)


class Stage:
    """An observer of its own, and a viewer that reads at once."""

    def __init__(self, url: str) -> None:
        self.hub = Hub(url)
        self.reader = Reader(url)
        self.observer = Observer(lambda: self.hub, self.reader)
        self.frames: list[dict[str, Any]] = []
        self.unread: list[dict[str, Any]] = []
        self.closed: list[int] = []
        self._came = asyncio.Event()

    def look(self, topic: str | None = None, *, reads: bool = True) -> Viewer:
        """Open a page; one that does not read echoes nothing."""

        def heard(text: str) -> None:
            frame = json.loads(text)
            (self.frames if reads else self.unread).append(frame)
            if reads:
                watching.echoed(frame["n"])
            self._came.set()

        def closed(code: int, _: str) -> None:
            self.closed.append(code)
            self._came.set()

        permit = Permit(monitor=True, bodies=True)
        watching = Viewer(topic, permit, send=heard, close=closed)
        self.observer.add(watching)
        return watching

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so, asked at each frame."""
        async with asyncio.timeout(SECONDS):
            while not is_so():
                self._came.clear()
                await self._came.wait()

    def is_live(self) -> bool:
        return bool(self.frames) and self.observer.standing.name(0) == "live"

    async def live(self, topic: str | None = None) -> Viewer:
        """Open a page and wait until the observer is live."""
        watching = self.look(topic)
        await self.until(self.is_live)
        return watching

    async def ended(self) -> None:
        """Wait until the observer has ended by itself."""
        assert self.observer._running is not None
        async with asyncio.timeout(SECONDS):
            await self.observer._running

    async def end(self) -> None:
        """Leave nothing running."""
        if (running := self.observer._running) is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await self.hub.close()


def staged(world: World, play: Callable[[Stage], Any]) -> None:
    async def whole() -> None:
        stage = Stage(world.server.url())
        try:
            await play(stage)
        finally:
            await stage.end()

    run(whole())


def monitors(world: World) -> int:
    """Count this process's monitors; sites of other tests may still run theirs."""
    return world.owner.query(
        "SELECT count(*) FROM psqlmessages_client WHERE starts_with(ident, %s)",
        f"example.monitor.{os.getpid()}-",
    )


def test_it_is_one_node_while_a_page_is_open_and_a_while_after(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "IDLE_SECONDS", 1.0)

    async def play(stage: Stage) -> None:
        assert monitors(world) == 0
        pages = [await stage.live(), await stage.live("T")]
        assert monitors(world) == 1
        since = stage.observer.standing.since
        for page in pages:
            stage.observer.remove(page)
        # From page to page, nothing is forgotten.
        third = await stage.live()
        assert stage.observer.standing.since == since
        stage.observer.remove(third)
        await stage.ended()
        assert monitors(world) == 0
        assert stage.observer.standing.since is None

    staged(world, play)


def test_large_bodies_are_not_fetched_for_the_monitor(world: World) -> None:
    world.rules("user1 SENDER Topic T W 60", "user2 LISTENER Topic T R 60")
    sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER")
    listener.ok("topic_listen", "T")
    sender.ok("topic_notify", "T")

    async def play(stage: Stage) -> None:
        await stage.live("T")
        sender.ok("topic_send", "T", "x" * 50_000)
        await stage.until(lambda: stage.observer.history.topics["T"].count)
        assert stage.hub.counters.fetched == 0
        assert stage.observer.history.topics["T"].tail[0].is_kept

    staged(world, play)


def test_who_reads_nothing_gets_no_more_then_a_snapshot_and_in_the_end_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PATIENCE_SECONDS", 600.0)
    monkeypatch.setattr(viewer, "_TRUSTED_SECONDS", 600.0)
    world.rules("user1 SENDER Topic T W 60", "user2 LISTENER Topic T R 60")
    sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER")
    listener.ok("topic_listen", "T")
    sender.ok("topic_notify", "T")

    async def play(stage: Stage) -> None:
        await stage.live()
        slow = stage.look(reads=False)
        await stage.until(lambda: len(stage.unread) == pacing.FRAMES)
        sender.ok("topic_send_many", "T", ["x"] * 50)
        await stage.until(lambda: 50 in counts(stage.frames))
        assert len(stage.unread) == pacing.FRAMES
        assert 50 not in counts(stage.unread)
        slow.echoed(stage.unread[-1]["n"])
        await stage.until(lambda: len(stage.unread) > pacing.FRAMES)
        assert stage.unread[pacing.FRAMES]["op"] == "snapshot"
        assert counts(stage.unread[pacing.FRAMES :])[0] == 50
        monkeypatch.setattr(pacing, "PATIENCE_SECONDS", 0.1)
        await stage.until(lambda: stage.closed)
        assert stage.closed == [4408]

    staged(world, play)


def counts(frames: list[dict[str, Any]]) -> list[int]:
    return [
        row["count"] for frame in frames for row in frame.get("topics", ()) if row["topic"] == "T"
    ]


def test_a_node_that_was_deleted_behind_its_back_is_registered_anew(world: World) -> None:
    async def play(stage: Stage) -> None:
        await stage.live()
        before = stage.observer.ident
        world.owner.connection.execute("DELETE FROM psqlmessages_observation")
        await stage.until(lambda: stage.observer.ident != before and stage.is_live())
        assert monitors(world) == 1

    staged(world, play)


def test_a_failure_of_its_own_begins_anew_and_is_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(stage: Stage) -> None:
        await stage.live()
        monkeypatch.setattr(stage.observer.history, "take_changes", lambda: 1 / 0)
        await stage.ended()
        assert stage.closed == [1011]
        assert "the monitor failed" in caplog.text
        await stage.live()

    staged(world, play)


def test_who_cannot_be_checked_is_shown_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(frames: list[dict[str, Any]]) -> list[Any]:
        return [frame.get("state") for frame in frames]

    async def play(stage: Stage) -> None:
        watching = await stage.live()
        monkeypatch.setattr(viewer, "_TRUSTED_SECONDS", -1.0)
        await stage.until(lambda: states(stage.frames)[-1] == {"is": "unchecked"})
        # It is told again and again, and nothing else, that PostgreSQL is away.
        with monkeypatch.context() as patch:
            patch.setattr(stage.observer.standing, "name", lambda now: "away")
            before = len(stage.frames)
            await stage.until(lambda: states(stage.frames[before:]).count({"is": "away"}) >= 3)
            withheld = [f for f in stage.frames[before:] if f.get("state") == {"is": "away"}]
            assert all(frame.keys() == {"op", "n", "lag", "state"} for frame in withheld)
        monkeypatch.setattr(viewer, "_TRUSTED_SECONDS", 600.0)
        told = len(stage.frames)
        watching.permitted(Permit(monitor=True, bodies=True))
        await stage.until(lambda: len(stage.frames) > told)
        assert stage.frames[told]["op"] == "snapshot"

    staged(world, play)


@pytest.mark.parametrize(
    ("there", "most"),
    [
        (200, 50),
        # Ten thousand topics are slow to make.
        pytest.param(10_000, 2000, marks=pytest.mark.nightly),
    ],
)
def test_the_topics_that_are_shown_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch, there: int, most: int
) -> None:
    monkeypatch.setattr(reading, "_STATEMENT_SECONDS", 60)
    monkeypatch.setattr(observer, "TOPICS", most)
    monkeypatch.setattr(history, "TOPICS", most)
    world.owner.connection.execute(
        "INSERT INTO psqlmessages_topic (name)"
        " SELECT 'T' || lpad(n::text, 5, '0') FROM generate_series(1, %s) AS n",
        [there],
    )

    async def play(stage: Stage) -> None:
        stage.look("T00150")
        await stage.until(lambda: stage.observer.history.topics_there == there)
        shown = stage.observer.history.topics
        assert len(shown) == most
        assert {"T00001", "T00150"} <= shown.keys()

    staged(world, play)


class Asked(Viewer):
    """A page whose permissions are asked anew amid a tick, in a thread, as the watch does."""

    consumer: MonitorConsumer
    visitor: Any = None

    @property
    def is_trusted(self) -> bool:
        if self.visitor is not None:
            asking = Thread(target=self.consumer.permits, args=[self.visitor])
            asking.start()
            asking.join()
        return super().is_trusted


def test_a_permission_that_goes_amid_a_tick_ends_nobodys_page(world: World) -> None:
    async def play(stage: Stage) -> None:
        watching = await stage.live("T")
        watching.__class__ = Asked
        assert isinstance(watching, Asked)
        watching.consumer = MonitorConsumer()
        watching.consumer._viewer = watching
        watching.visitor = SimpleNamespace(
            is_active=True, is_staff=True, has_perm=lambda name: name == VIEW_MONITOR
        )
        await stage.until(lambda: stage.closed or stage.frames[-1].get("may_see_bodies") is False)
        assert stage.closed == []

    staged(world, play)


class Filled(Reader):
    """Reads of a server whose notification queue is said to be so full; all else is as it is."""

    usage = 0.0

    async def rows(self, query: Any, params: Any = None) -> list[Any]:
        if query == USAGE:
            return [(self.usage,)]
        return await super().rows(query, params)


def test_who_holds_a_queue_that_fills_is_not_known_if_nobody_is_seen(world: World) -> None:
    async def health(usage: float) -> Health:
        reader = Filled(world.server.url("user3"))
        reader.usage = usage
        try:
            return await read_health(reader, 0.0)
        finally:
            await reader.close()

    for usage, holders in ((QUEUE_LIMIT / 2, []), (QUEUE_LIMIT, None)):
        found = asyncio.run(health(usage))
        assert (found.usage, found.holders) == (usage, holders)
        assert found.round_trip is not None
