"""The graph's figures as the server tells them: who gets them, what they say, what they cost."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.test import Client

from psqlmessages.graph.counted import BUCKET_SECONDS, Counted, Histogram, Row
from psqlmessages.models import ExchangeCount, Queue
from psqlmessages.monitor import graph
from psqlmessages.monitor.graph import GraphWatch
from tests.sql.conftest import World
from tests.web.desks import visitor
from tests.web.test_admin_exchanges import ALIVE, new

FIGURES = "/monitor/exchanges/figures/"
HOSTILE = "</script><script>alert(1)</script>"
Outcome = ExchangeCount.Outcome


@pytest.fixture
def database(database: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The database, which may stand still for seconds."""
    monkeypatch.setattr(graph, "_PATIENCE_SECONDS", 60)
    return database


def figures(client: Client) -> dict[str, Any]:
    response = client.get(FIGURES)
    assert response.status_code == 200
    return response.json()


@pytest.mark.usefixtures("database")
def test_figures_hold_no_secret_and_are_neither_stored_nor_taken_for_a_page() -> None:
    Queue.objects.create(name="orders", channel="queue_secret")
    new(HOSTILE, "orders", HOSTILE)
    answer = visitor("view_monitor").get(FIGURES)
    assert "queue_secret" not in answer.text
    assert "no-store" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_exchanges_and_queues_are_told_with_what_was_counted(database: World) -> None:
    database.rules("user1 W Queue * RW 60")
    worker = database.program("user1")
    worker.ok("push_many", "W", "orders", ["x", "y", "z"])
    worker.query("SELECT lease FROM messages.reserve('W', 'orders')")
    worker.ok("pause", "W", "orders")
    exchange = new("x1", "orders", "eu true", "orders")
    for seen in ("2020-01-01T00:00:00Z", ALIVE):
        given = {"exchange": exchange, "worker": uuid.uuid4(), "seen_at": seen}
        ExchangeCount.objects.create(**given, outcome=Outcome.OK, count=7)
        ExchangeCount.objects.create(**given, outcome=Outcome.TO, destination=0, count=5)
        ExchangeCount.objects.create(**given, outcome=Outcome.NO_ROUTE, count=1)
    found = figures(visitor("view_monitor"))
    assert found["exchanges"] == [
        {
            "id": exchange.pk,
            "name": "x1",
            "source": ["default", "orders"],
            "is_running": True,
            "workers": 1,
            "destinations": [
                {"to": ["default", "eu"], "selector": "true", "count": 10, "is_in_cycle": False},
                {"to": ["default", "orders"], "selector": "", "count": 0, "is_in_cycle": True},
            ],
            "counts": {"ok": 14, "no_route": 2},
        }
    ]
    queues = {queue["queue"]: (queue["sizes"], queue["is_paused"]) for queue in found["queues"]}
    assert queues == {
        "orders": ([2, 0, 1], True),
        "eu": ([0, 0, 0], False),
        "__no_route__": ([0, 0, 0], False),
    }


@pytest.mark.usefixtures("database")
def test_more_exchanges_than_can_be_drawn_are_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "EXCHANGES", 2)
    for name in ("a", "b", "c"):
        new(name, "orders", "eu")
    found = figures(visitor("view_monitor"))
    assert [exchange["name"] for exchange in found["exchanges"]] == ["a", "b"]
    assert found["has_more"]


# What it costs


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The databases asked, in the order of the questions."""
    found: list[str] = []
    ask = graph._ask

    async def counted(alias: str, *question: Any) -> Any:
        found.append(alias)
        return await ask(alias, *question)

    monkeypatch.setattr(graph, "_ask", counted)
    return found


@pytest.mark.usefixtures("database")
def test_a_hundred_who_look_at_the_same_time_cost_as_much_as_one(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "TICK_SECONDS", 3600.0)
    new("x1", "orders", "eu")

    @async_to_sync
    async def look() -> set[str | None]:
        watch = GraphWatch()
        first, second = (asyncio.create_task(watch.text()) for _ in range(2))
        # Both are waiting now: if one leaves, the reading goes on for the others.
        await asyncio.wait({first}, timeout=0)
        first.cancel()
        texts = await asyncio.gather(second, *(watch.text() for _ in range(100)))
        return {*texts, await watch.text()}

    (text,) = look()
    assert text is not None
    assert "x1" in text
    assert asked == ["default", "default"]


@pytest.mark.usefixtures("database")
def test_a_database_that_cannot_be_read_is_not_known_and_holds_up_nothing(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new("x1", "orders", "eu", source_namespace="elsewhere")
    (source,) = [q for q in figures(visitor("view_monitor"))["queues"] if q["queue"] == "orders"]
    assert (source["ns"], source["sizes"]) == ("elsewhere", None)
    monkeypatch.setattr(graph, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(graph, "_AWAY_SECONDS", 3600.0)
    asked.clear()

    @async_to_sync
    async def look() -> None:
        watch = GraphWatch()
        for _ in range(5):
            await watch.text()

    look()
    assert asked.count("elsewhere") == 1, "it is left alone for a while"

    async def hanging(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(graph, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", hanging)
    assert visitor("view_monitor").get(FIGURES).status_code == 503


# Figures


def histogram(**counts: int) -> Histogram:
    """A histogram with elements in some buckets, as in b0=5: the first."""
    buckets = [0] * (len(BUCKET_SECONDS) + 1)
    for name, number in counts.items():
        buckets[int(name[1:])] = number
    return Histogram(sum(buckets), 0.0, buckets)


def test_quantiles_lie_within_their_buckets_and_sums_take_rows_of_any_version() -> None:
    assert histogram().quantile(0.5) is None
    for share, seconds in ((0.5, 0.002), (0.25, 0.0015), (0.75, 0.0035), (1, 0.005)):
        assert histogram(b1=10, b2=10).quantile(share) == pytest.approx(seconds)
    assert histogram(b0=1, b12=99).quantile(0.95) == float("inf")
    rows = [
        Row("ok", -1, 3, 1.0, [], 0.5),
        Row("ok", -1, 2, 1.0, [2], 0.5),
        Row("to", 1, 9, 0, [], 0),
    ]
    counted = Counted.of(rows)
    assert (counted.elements, counted.copies, counted.selector_seconds) == (5, {1: 9}, 1.0)
    assert counted.outcomes["ok"].buckets[0] == 2
