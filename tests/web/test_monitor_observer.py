"""The observer with a real hub, in the test's own loop: its beginning, its end, its bounds."""

import asyncio
import json
import os
from collections.abc import Callable
from threading import Thread
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.monitor import history, observer, reading, viewer
from psqlmessages.monitor.admission import VIEW_MONITOR, Permit
from psqlmessages.monitor.consumers import MonitorConsumer
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
        self.closed: list[int] = []
        self._came = asyncio.Event()

    def look(self, topic: str | None = None) -> Viewer:
        """Open a page."""
        permit = Permit(monitor=True, bodies=True)

        def heard(text: str) -> None:
            self.frames.append(frame := json.loads(text))
            watching.echoed(frame["n"])
            self._came.set()

        watching = Viewer(topic, permit, send=heard, close=lambda code, _: self.closed.append(code))
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


def test_it_observes_while_a_page_is_open_and_a_while_after(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "IDLE_SECONDS", 1.0)

    async def play(stage: Stage) -> None:
        assert monitors(world) == 0
        first = stage.look()
        await stage.until(stage.is_live)
        assert monitors(world) == 1
        since = stage.observer.standing.since
        stage.observer.remove(first)
        # From page to page, nothing is forgotten.
        second = stage.look()
        await stage.until(stage.is_live)
        assert stage.observer.standing.since == since
        stage.observer.remove(second)
        running = stage.observer._running
        assert running is not None
        async with asyncio.timeout(SECONDS):
            await running
        assert monitors(world) == 0
        assert stage.observer.standing.since is None

    staged(world, play)


def test_two_pages_are_one_node(world: World) -> None:
    async def play(stage: Stage) -> None:
        stage.look()
        stage.look("T")
        await stage.until(stage.is_live)
        assert monitors(world) == 1

    staged(world, play)


def test_large_bodies_are_not_fetched_for_the_monitor(world: World) -> None:
    world.rules("user1 SENDER Topic T W 60", "user2 LISTENER Topic T R 60")
    sender, listener = world.node("user1", "SENDER"), world.node("user2", "LISTENER")
    listener.ok("topic_listen", "T")
    sender.ok("topic_notify", "T")

    async def play(stage: Stage) -> None:
        stage.look("T")
        await stage.until(stage.is_live)
        sender.ok("topic_send", "T", "x" * 50_000)
        await stage.until(lambda: stage.observer.history.topics["T"].count)
        assert stage.hub.counters.fetched == 0
        assert stage.observer.history.topics["T"].tail[0].is_kept

    staged(world, play)


def test_a_node_that_was_deleted_behind_its_back_is_registered_anew(world: World) -> None:
    async def play(stage: Stage) -> None:
        stage.look()
        await stage.until(stage.is_live)
        before = stage.observer.ident
        world.owner.connection.execute("DELETE FROM psqlmessages_observation")
        await stage.until(lambda: stage.observer.ident != before and stage.is_live())
        assert monitors(world) == 1

    staged(world, play)


def test_a_rule_that_is_taken_away_is_missed_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event tells, and no look at the database."""
    monkeypatch.setattr(observer, "_CHECK_SECONDS", 3600.0)

    async def play(stage: Stage) -> None:
        stage.look()
        await stage.until(stage.is_live)
        world.owner.connection.execute("UPDATE messages.auth SET mode = 'R'")
        await stage.until(lambda: stage.observer.standing.missing_role == Server.owner)
        assert stage.observer.standing.name(0) == "not_observing"

    staged(world, play)


def test_a_failure_of_its_own_begins_anew_and_is_in_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(stage: Stage) -> None:
        stage.look()
        await stage.until(stage.is_live)
        monkeypatch.setattr(stage.observer.history, "take_changes", lambda: 1 / 0)
        running = stage.observer._running
        assert running is not None
        async with asyncio.timeout(SECONDS):
            await running
        assert stage.closed == [1011]
        assert "the monitor failed" in caplog.text
        stage.look()
        await stage.until(stage.is_live)

    staged(world, play)


def test_who_cannot_be_checked_is_shown_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(stage: Stage) -> None:
        watching = stage.look()
        await stage.until(stage.is_live)
        monkeypatch.setattr(viewer, "_TRUSTED_SECONDS", -1.0)
        await stage.until(lambda: stage.frames[-1].get("state") == {"is": "unchecked"})
        told = len(stage.frames)
        monkeypatch.setattr(viewer, "_TRUSTED_SECONDS", 600.0)
        watching.permitted(Permit(monitor=True, bodies=True))
        await stage.until(lambda: len(stage.frames) > told)
        assert stage.frames[told]["op"] == "snapshot"

    staged(world, play)


def test_who_cannot_be_checked_is_told_again_and_again_that_postgresql_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(stage: Stage) -> None:
        stage.look()
        await stage.until(stage.is_live)
        monkeypatch.setattr(viewer, "_TRUSTED_SECONDS", -1.0)
        monkeypatch.setattr(stage.observer.standing, "name", lambda now: "away")
        before = len(stage.frames)
        await stage.until(lambda: states(stage)[before:].count({"is": "away"}) >= 3)
        withheld = [f for f in stage.frames[before:] if f.get("state") == {"is": "away"}]
        assert all(frame.keys() == {"op", "n", "lag", "state"} for frame in withheld)

    staged(world, play)


def states(stage: Stage) -> list[Any]:
    return [frame.get("state") for frame in stage.frames]


def test_the_topics_that_are_shown_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "TOPICS", 50)
    monkeypatch.setattr(history, "TOPICS", 50)
    world.owner.connection.execute(
        "INSERT INTO psqlmessages_topic (name)"
        " SELECT 'T' || lpad(n::text, 4, '0') FROM generate_series(1, 200) AS n"
    )

    async def play(stage: Stage) -> None:
        stage.look("T0150")
        await stage.until(lambda: stage.observer.history.topics_there == 200)
        shown = stage.observer.history.topics
        assert len(shown) == 50
        assert "T0150" in shown
        assert "T0001" in shown

    staged(world, play)


@pytest.mark.slow(reason="makes ten thousand topics")
def test_ten_thousand_topics_are_read_quickly(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_STATEMENT_SECONDS", 60)
    world.owner.connection.execute(
        "INSERT INTO psqlmessages_topic (name) SELECT 'T' || n FROM generate_series(1, 10000) AS n"
    )
    world.owner.connection.execute("ANALYZE psqlmessages_topic")

    async def play(stage: Stage) -> None:
        stage.look()
        await stage.until(lambda: stage.observer.history.topics_there == 10_000)
        known = list(stage.observer.history.topics)
        assert len(known) == history.TOPICS
        begun = perf_counter()
        assert len(await stage.reader.topics(known, 0)) == history.TOPICS
        assert perf_counter() - begun < 20

    staged(world, play)
    world.owner.connection.execute("DELETE FROM psqlmessages_topic")
    # No other test is to be planned for so many.
    world.owner.connection.execute("ANALYZE psqlmessages_topic")


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
        watching = stage.look("T")
        await stage.until(stage.is_live)
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
