"""The observer with a real hub, in the test's own loop: its beginning, its end, its bounds."""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from pytest_django import Settings

from psqlmessages.cli.doctor_checks import MAX_QUEUE_USAGE, QUEUE_USAGE_QUERY
from psqlmessages.monitor import history, observer, queries, viewer
from psqlmessages.monitor.access import MonitorAccess
from psqlmessages.monitor.broadcast import BODY_BYTES, message_json, topic_details, topic_row
from psqlmessages.monitor.history import MAX_EVENTS, MAX_MESSAGES, History
from psqlmessages.monitor.observer import Observer
from psqlmessages.monitor.queries import MonitorReader, read_health
from psqlmessages.monitor.topic_list import TopicQuery
from psqlmessages.monitor.viewer import Viewer
from psqlmessages.relay.hub import Hub
from tests.sql.conftest import Pair, World
from tests.web.browser import MONITOR_RULE
from tests.web.receivers import in_loop


@pytest.fixture(autouse=True)
def node(settings: Settings, world: World) -> None:
    settings.PSQLMESSAGES = {"NODE": "example"}
    world.rules(MONITOR_RULE)


class Monitor:
    """An observer with its own hub, and viewers that read immediately."""

    def __init__(self, url: str) -> None:
        self.hub = Hub(url)
        self.reader = MonitorReader(url)
        self.observer = Observer(lambda: self.hub, self.reader)
        self.frames: list[dict[str, Any]] = []
        self.unread: list[dict[str, Any]] = []
        self.closed: list[int] = []
        self._came = asyncio.Event()

    def look(self, topic: str | None = None, *, reads: bool = True) -> Viewer:
        """Open a page; without `reads`, it echoes nothing."""

        def on_frame(text: str) -> None:
            frame = json.loads(text)
            (self.frames if reads else self.unread).append(frame)
            if reads:
                watching.on_echo(frame["n"])
            self._came.set()

        def closed(code: int, _: str) -> None:
            self.closed.append(code)
            self._came.set()

        access = MonitorAccess(can_view=True, can_view_bodies=True)
        watching = Viewer(topic, access, send=on_frame, close=closed)
        self.observer.add(watching)
        return watching

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait until a condition holds; check it after each frame."""
        async with asyncio.timeout(60):
            while not is_so():
                self._came.clear()
                await self._came.wait()

    def is_live(self) -> bool:
        return bool(self.frames) and self.observer.status.name(0) == "live"

    async def live(self, topic: str | None = None) -> Viewer:
        """Open a page and wait until the observer is live."""
        watching = self.look(topic)
        await self.until(self.is_live)
        return watching

    async def close(self) -> None:
        if (running := self.observer._task) is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await self.hub.close()


@pytest.fixture
def monitor(world: World) -> Monitor:
    return Monitor(world.server.url())


def monitors(world: World) -> int:
    """Count this process's monitors; sites of other tests may still run theirs."""
    count = "SELECT count(*) FROM psqlmessages_client WHERE starts_with(ident, %s)"
    return world.owner.query(count, f"example.monitor.{os.getpid()}-")


@in_loop
async def test_it_is_one_node_while_pages_are_open(monitor: Monitor, world: World, monkeypatch):
    monkeypatch.setattr(observer, "IDLE_SECONDS", 1.0)
    assert monitors(world) == 0
    pages = [await monitor.live(), await monitor.live("T")]
    assert monitors(world) == 1
    since = monitor.observer.status.first_observed_at
    for page in pages:
        monitor.observer.remove(page)
    # The observer continues from one page to the next.
    third = await monitor.live()
    assert monitor.observer.status.first_observed_at == since
    monitor.observer.remove(third)
    assert monitor.observer._task is not None
    await asyncio.wait_for(monitor.observer._task, 60)
    assert monitors(world) == 0
    assert monitor.observer.status.first_observed_at is None


@in_loop
async def test_a_peer_that_reads_nothing_is_closed_later(monitor: Monitor, pair: Pair, monkeypatch):
    monkeypatch.setattr(viewer, "READ_TIMEOUT_SECONDS", 600.0)
    monkeypatch.setattr(viewer, "MAX_UNCHECKED_SECONDS", 600.0)
    monkeypatch.setattr(viewer, "MAX_UNREAD_FRAMES", 3)
    await monitor.live()
    slow = monitor.look(reads=False)
    await monitor.until(lambda: len(monitor.unread) == viewer.MAX_UNREAD_FRAMES)
    pair[0].ok("topic_send_many", "T", ["x"] * 50)
    await monitor.until(lambda: 50 in counts(monitor.frames))
    assert len(monitor.unread) == viewer.MAX_UNREAD_FRAMES
    assert 50 not in counts(monitor.unread)
    slow.on_echo(monitor.unread[-1]["n"])
    await monitor.until(lambda: len(monitor.unread) > viewer.MAX_UNREAD_FRAMES)
    assert monitor.unread[viewer.MAX_UNREAD_FRAMES]["op"] == "snapshot"
    assert counts(monitor.unread[viewer.MAX_UNREAD_FRAMES :])[0] == 50
    monkeypatch.setattr(viewer, "READ_TIMEOUT_SECONDS", 0.1)
    await monitor.until(lambda: monitor.closed)
    assert monitor.closed == [4408]


def counts(frames: list[dict[str, Any]]) -> list[int]:
    rows = [row for frame in frames for row in frame.get("topics", ())]
    return [row["count"] for row in rows if row["topic"] == "T"]


@in_loop
async def test_an_unchecked_viewer_sees_nothing(monitor: Monitor, monkeypatch):
    def states(frames: list[dict[str, Any]]) -> list[Any]:
        return [frame.get("state") for frame in frames]

    watching = await monitor.live()
    monkeypatch.setattr(viewer, "_STATUS_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(viewer, "MAX_UNCHECKED_SECONDS", -1.0)
    await monitor.until(lambda: states(monitor.frames)[-1] == {"is": "unchecked"})
    # The viewer receives only the state, repeatedly.
    with monkeypatch.context() as patch:
        patch.setattr(monitor.observer.status, "name", lambda now: "away")
        before = len(monitor.frames)
        await monitor.until(lambda: states(monitor.frames[before:]).count({"is": "away"}) >= 3)
        withheld = [f for f in monitor.frames[before:] if f.get("state") == {"is": "away"}]
        assert all(frame.keys() == {"op", "n", "lag", "state"} for frame in withheld)
    monkeypatch.setattr(viewer, "MAX_UNCHECKED_SECONDS", 600.0)
    told = len(monitor.frames)
    watching.set_access(MonitorAccess(can_view=True, can_view_bodies=True))
    await monitor.until(lambda: len(monitor.frames) > told)
    assert monitor.frames[told]["op"] == "snapshot"


# PostgreSQL takes seconds for the larger number.
@pytest.mark.parametrize("number", [10_000, pytest.param(100_000, marks=pytest.mark.nightly)])
@in_loop
async def test_the_busiest_topic_is_first(monitor: Monitor, world: World, monkeypatch, number: int):
    monkeypatch.setattr(queries, "_QUERY_TIMEOUT_SECONDS", 60)
    monkeypatch.setattr(viewer, "MAX_UNCHECKED_SECONDS", 600.0)
    world.rules("user1 SENDER Topic T005555 W 60", "user2 LISTENER Topic T005555 R 60")
    listener, sender = world.node("user2", "LISTENER"), world.node("user1", "SENDER")
    listener.ok("topic_listen", "T005555")
    sender.ok("topic_notify", "T005555")
    page = await monitor.live()
    names = "SELECT 'T' || lpad(n::text, 6, '0') FROM generate_series(1, %s) AS n WHERE n <> 5555"
    world.execute(f"INSERT INTO psqlmessages_topic (name) {names}", [number])
    world.execute("ANALYZE psqlmessages_topic")
    monitor.observer.watch_list(page, TopicQuery("", "topic"))

    def shown() -> Any:
        lists = [frame["list"] for frame in monitor.frames if "list" in frame]
        return lists[-1] if lists else None

    await monitor.until(lambda: shown() and shown()["total"] == number)
    assert shown()["names"] == [f"T{n:06}" for n in range(1, 101)]
    assert max(len(json.dumps(frame)) for frame in monitor.frames) < 100_000
    monitor.observer.watch_list(page, TopicQuery())
    sender.ok("topic_send_many", "T005555", ["x"] * 5)
    await monitor.until(lambda: shown()["names"][0] == "T005555")
    for query, total, names in (
        (TopicQuery("t00999"), 10, [f"T00999{digit}" for digit in range(10)]),
        (TopicQuery("LISTENER"), 1, ["T005555"]),
        (TopicQuery("T00", "-topic", 100), 9999, [f"T{n:06}" for n in range(99, 0, -1)]),
        (TopicQuery("", "-senders"), number, ["T005555"]),
        (TopicQuery("nothing"), 0, []),
    ):
        monitor.observer.watch_list(page, query)
        await monitor.until(lambda query=query: (shown()["search"], shown()["sort"]) == query[:2])
        assert shown()["names"][: len(names) or 1] == names, query
        assert shown()["total"] == total, query
    world.execute("DELETE FROM psqlmessages_topic WHERE name <> 'T005555'")


@in_loop
async def test_the_session_that_fills_the_queue_is_unknown(world: World, monkeypatch):
    reader = MonitorReader(world.server.url("user3"))
    said, rows = [], reader.fetch

    async def filled(query: str, values: Any = None) -> list[Any]:
        return said if query == QUEUE_USAGE_QUERY else await rows(query, values)

    monkeypatch.setattr(reader, "fetch", filled)
    for usage, holders in ((MAX_QUEUE_USAGE / 2, []), (MAX_QUEUE_USAGE, None)):
        said[:] = [(usage,)]
        found = await read_health(reader, 0.0)
        assert (found.usage, found.holders) == (usage, holders)
        assert found.round_trip is not None
    await reader.close()


NOW = 1_800_000_000


def message(topic: str = "T", size: int = 5, **fields: Any) -> dict[str, Any]:
    return {"Type": "Topic", "To": topic, "From": "N", "Size": size, "Id": 1, **fields}


def test_messages_are_counted_by_topic_and_the_rate_falls_to_zero():
    kept = History()
    for _ in range(100):
        kept.add_message(message("A", 7), "seven b", NOW + 0.5)
    kept.add_message(message("B"), "hello", NOW)
    assert (kept.topics["A"].count, kept.topics["A"].size) == (100, 700)
    shown = topic_row(kept.topics["A"], NOW + 1, 2)
    assert (shown["count"], shown["rate"], shown["size_rate"]) == (100, 20.0, 140.0)
    assert shown["buckets"] == [NOW // 10 - 1, 0, 100]
    assert [topic_row(kept.topics["B"], NOW + later, 2)["rate"] for later in (5, 6)] == [0.2, 0]


def test_a_restart_of_postgresql_is_one_event():
    kept = History()
    # Some crashes are reported before the restart.
    kept.add_event("crash", "A", "", NOW + 1)
    kept.on_restart(NOW)
    for event, ident in (("crash", "B"), ("connect", "B"), ("crash", "B")):
        kept.add_event(event, ident, "", NOW + 2)
    shown = [(event.event, event.ident, event.nodes) for event in kept.events]
    assert shown == [("restarted", "", 2), ("connect", "B", 0), ("crash", "B", 0)]


@in_loop
async def test_live_since_restarts_after_an_outage(monitor: Monitor, world: World, monkeypatch):
    await monitor.live()
    status, before = monitor.observer.status, monitor.observer.status.live_since
    started = await monitor.reader.read_start_time()
    # A new start time means a restart.
    monkeypatch.setattr(monitor.reader, "read_start_time", AsyncMock(return_value=started + 1))
    world.superuser().query(
        "SELECT pg_terminate_backend(s.pid) FROM psqlmessages_session AS s"
        " JOIN psqlmessages_client AS c ON c.session_id = s.id WHERE c.ident = %s",
        monitor.observer.ident,
    )
    await monitor.until(lambda: status.live_since and status.live_since != before)
    assert status.as_json(0)["live_since"] > status.first_observed_at
    await monitor.until(lambda: "restarted" in [e.event for e in monitor.observer.history.events])


def test_messages_bodies_and_events_are_bounded(monkeypatch):
    kept = History()
    for number in range(MAX_MESSAGES + 10):
        kept.add_message(message(), str(number), NOW)
    assert [m.body for m in kept.topics["T"].tail] == [str(n) for n in range(10, MAX_MESSAGES + 10)]
    for number in range(MAX_EVENTS + 5):
        kept.add_event("connect", f"N{number}", "", NOW)
    assert [event.ident for event in kept.events] == [f"N{n}" for n in range(5, MAX_EVENTS + 5)]
    monkeypatch.setattr(history, "MAX_TOTAL_CHARACTERS", 1000)
    kept = History()
    for topic in "ABC":
        for _ in range(4):
            kept.add_message(message(topic), "x" * 100, NOW)
    bodies = {name: [m.body is not None for m in t.tail] for name, t in kept.topics.items()}
    assert bodies == {"A": [False, False, True, True], "B": [True] * 4, "C": [True] * 4}


def test_shown_messages_are_short_and_contain_no_secret():
    kept = History()
    kept.add_message(message(size=12_288), "€" * 4097, NOW)
    kept.add_message(message(size=9_000), None, NOW)
    kept.add_message(message(Token="1.abc 5 mine", Dkey="60.4.1.2"), "secret", NOW)
    long, large, asking = (message_json(m, with_body=True) for m in kept.topics["T"].tail)
    assert (long["body"], long["is_cut"]) == ("€" * (BODY_BYTES // 3), True)
    assert (large["is_large"], large["size"], "body" in large) == (True, 9000, False)
    assert asking["wants_answer"]
    assert not [secret for secret in ("abc", "60.4") if secret in str(asking)]
    whole = topic_details(kept.topics["T"], NOW, with_bodies=False)
    changed = topic_details(kept.topics["T"], NOW, with_bodies=False, seconds=range(NOW, NOW))
    assert "secret" not in str(whole) + str(changed)


def test_the_busiest_topics_stay_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr(history, "MAX_TOPICS", 10)
    monkeypatch.setattr(history, "_EVICTED_TOPICS", 3)
    kept = History()
    kept.viewed = {"quiet"}
    kept.apply_rows([("quiet", [], [])], 0)
    for number in range(9):
        for _ in range(number + 1):
            kept.add_message(message(f"T{number}"), "x", NOW - 86_400 * (number == 5))
    assert TopicQuery().parameters(kept.topics.values(), NOW)["messages"][4:6] == [5, 0]
    kept.add_message(message("new"), "x", NOW)
    assert sorted(kept.topics) == ["T2", "T3", "T4", "T6", "T7", "T8", "new", "quiet"]
