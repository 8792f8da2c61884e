"""The history: what was counted per minute, by one process at a time, and where there are gaps."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from unittest.mock import AsyncMock

import pytest
from django.core.signals import request_started
from django.test import Client
from psycopg.conninfo import conninfo_to_dict
from pytest_django import Settings

from psqlmessages.client.connection import AsyncConnection
from psqlmessages.client.refused_calls import NeededRule, refused_calls
from psqlmessages.models import Element, HistoryPeriod, QueueMinute, TopicMinute
from psqlmessages.monitor import minute_writer, refused_writer
from psqlmessages.monitor.minute_writer import LOCK_IDS, MinuteWriter
from psqlmessages.monitor.observer import get_observer
from psqlmessages.orm import direct_dsn
from psqlmessages.relay.asgi import websocket_application
from psqlmessages.relay.hub import get_hub
from tests.exchanges.conftest import namespace
from tests.sql.conftest import World
from tests.web.browser import MONITOR_RULE
from tests.web.pages import logged_in

HISTORY = "/monitor/history/"
LSN = "SELECT pg_current_wal_insert_lsn()::text"


@pytest.fixture(autouse=True)
def minutes(monkeypatch, database: World, settings: Settings) -> Iterator[None]:
    monkeypatch.setattr(minute_writer, "_MAX_DELAY_SECONDS", 1e9)
    settings.PSQLMESSAGES = {"NODE": "example"}
    # End commands of earlier tests, which may write.
    locks = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = %s AND granted"
    database.end_backends(f"pid IN ({locks})", *LOCK_IDS[:1])
    delete_all()
    yield
    delete_all()


@pytest.fixture
def now() -> int:
    """The start of this minute."""
    return int(time.time()) // 60 * 60


def delete_all() -> None:
    for model in (HistoryPeriod, QueueMinute, TopicMinute):
        model.objects.all().delete()


def read(client: Client, **query: Any) -> dict[str, Any]:
    response = client.get(HISTORY, query)
    assert response.status_code == 200, response.content
    return response.json()


async def start(connection: AsyncConnection) -> MinuteWriter:
    """Return a writer that has the lock and has observed for a long time."""
    writer = MinuteWriter()
    await connection.execute("SELECT pg_advisory_lock(%s, %s)", LOCK_IDS)
    await writer._topics.observe()
    assert writer._topics.observed_since is not None, "the rule is there"
    writer._topics.observed_since = 0
    return writer


def test_minutes_have_counts_idle_ones_write_none_and_outages_are_gaps(database: World, now: int):
    rules = ("user1 S Topic T W 60", "user2 L Topic T R 60", "user1 W Queue * RW 60")
    database.rules(MONITOR_RULE, *rules)
    database.node("user2", "L", listen="T")
    sender, worker = database.node("user1", "S", notify="T"), database.program("user1")
    worker.ok("push_many", "W", "jobs", ["x"] * 3)
    client = logged_in("view_monitor")
    with asyncio.Runner() as runner:
        connection = runner.run(AsyncConnection.connect(direct_dsn(), autocommit=True))
        writer = runner.run(start(connection))
        # The first minute began before the writer, so it has no counts.
        runner.run(writer.write_minute(connection, now - 300))
        assert list(QueueMinute.objects.values_list("queue", "puts", "backlog")) == [("jobs", 0, 3)]
        sender.ok("topic_send_many", "T", ["body"] * 10)
        worker.ok("push_many", "W", "jobs", ["x"] * 9)
        worker.elements("pop", "W", "jobs", 2)
        worker.ok("commit", "W", *[row.lease for row in worker.elements("reserve", "W", "jobs", 3)])
        # An answer arrives after the notifications that were sent before the call.
        topics = writer._topics
        while topics._counts.get("T") != [10, 40]:
            runner.run(topics._hub.run(topics.ident, topics, "topic_status", "T"))
        runner.run(writer.write_minute(connection, now - 240))
        # Repeat, because other sessions may write.
        for _ in range(10):
            rows, lsn = QueueMinute.objects.count(), database.owner.query(LSN)
            runner.run(writer.write_minute(connection, now - 120))
            if (QueueMinute.objects.count(), database.owner.query(LSN)) == (rows, lsn):
                break
        else:
            pytest.fail("idle minutes write WAL")
        alive = [read(client, topic="T"), read(client, queue="jobs")]
        wrong = "", "topic=T&queue=Q", "topic=T&seconds=5", "topic=", "topic=T&x=1", "topic=A%00"
        assert {client.get(f"{HISTORY}?{query}").status_code for query in wrong} == {400}
        # The connection is lost.
        runner.run(writer._topics.close())
        runner.run(connection.close())
        crashed = [read(client, topic="T"), read(client, queue="jobs")]
    for topic, queue in (alive, crashed):
        assert topic["points"] == [[now - 300, 10, 40]]
        assert queue["points"] == [[now - 300, 9, 5, 0, 7]]
    assert Element.objects.filter(queue__name="jobs").count() == 7
    (topic_start, topic_end), (queue_start, queue_end) = (each["periods"][0] for each in alive)
    assert (topic_start, queue_start) == (now - 360, now - 300)
    assert topic_end == queue_end >= now
    # The period ends with the last row.
    assert [each["periods"][0][1] for each in crashed] == [now - 240] * 2


def test_rows_older_than_the_setting_are_deleted_and_zero_shows_no_chart(settings, now: int):
    async def write() -> None:
        async with await AsyncConnection.connect(direct_dsn(), autocommit=True) as connection:
            await MinuteWriter().write_minute(connection, now)

    tables = {TopicMinute: "minute", QueueMinute: "minute", HistoryPeriod: "ends_at"}
    for days in (7, 1, 0):
        settings.PSQLMESSAGES = {"NODE": "example", "HISTORY_DAYS": days}
        page = logged_in("view_monitor").get("/monitor/topics/T/").text
        assert ('id="history"' in page) == (days > 0)
        delete_all()
        times = [datetime.fromtimestamp(now - days * 86_400 + more, UTC) for more in (-60, 0, 60)]
        for at in times:
            TopicMinute.objects.create(topic="T", minute=at, messages=1, bytes=1)
            QueueMinute.objects.create(queue="Q", minute=at, puts=1, gets=0, removes=0, backlog=1)
            HistoryPeriod.objects.create(kind="topic", starts_at=times[0], ends_at=at, pid=1)
        asyncio.run(write())
        for model, column in tables.items():
            assert sorted(model.objects.values_list(column, flat=True)) == times[1:], model


def test_an_http_request_starts_the_writer(monkeypatch):
    started: list[int] = []
    monkeypatch.setattr(minute_writer, "start_history_writer", lambda: started.append(1))
    websocket_application()
    request_started.send(None)
    assert started == [1]


def test_all_sessions_use_the_setting_direct_database(settings: Settings, monkeypatch):
    async def open_sessions() -> list[str]:
        refused_calls.add(Counter([NeededRule("n", "Topic", "T", "W")]))
        writing = MinuteWriter()._write_while_locked(), refused_writer.write_counts()
        await asyncio.gather(*writing, return_exceptions=True)
        refused_calls.take()
        return [get_hub()._dsn, get_observer()._reader._dsn]

    connect = AsyncMock(side_effect=OSError)
    monkeypatch.setattr(AsyncConnection, "connect", connect)
    settings.PSQLMESSAGES = {"DIRECT_DATABASE": "sessions"}
    with namespace("sessions", NAME="unpooled"):
        found = asyncio.run(open_sessions()) + [call.args[0] for call in connect.await_args_list]
    assert [conninfo_to_dict(each)["dbname"] for each in found] == ["unpooled"] * 4
