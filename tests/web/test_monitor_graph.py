"""The graph's figures as the server tells them: who gets them, what they say, what they cost."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Permission, User
from django.test import Client

from psqlmessages.models import ExchangeCount, Queue
from psqlmessages.monitor import graph
from psqlmessages.monitor.graph import GraphWatch
from tests.sql.conftest import World
from tests.web.test_admin_exchanges import ALIVE, new

PAGE, FIGURES = "/monitor/exchanges/", "/monitor/exchanges/figures/"
HOSTILE = "</script><script>alert(1)</script>"
Outcome = ExchangeCount.Outcome


@pytest.fixture
def database(transactional_db: None, world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The database, which may stand still for seconds."""
    monkeypatch.setattr(graph, "_PATIENCE_SECONDS", 60)
    return world


def visitor(*permissions: str, is_staff: bool = True) -> Client:
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def figures(client: Client) -> dict[str, Any]:
    response = client.get(FIGURES)
    assert response.status_code == 200
    return response.json()


# Who


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(
    ("is_staff", "permissions"),
    [(True, ()), (False, ("view_monitor",)), (True, ("view_exchange",))],
)
def test_who_may_not_see_the_monitor_sees_neither_page_nor_figures(
    is_staff: bool, permissions: tuple[str, ...]
) -> None:
    client = visitor(*permissions, is_staff=is_staff)
    assert client.get(PAGE).status_code == 403
    answer = client.get(FIGURES)
    assert answer.status_code == 403
    assert "psqlmessages.view_monitor" in answer.json()["error"]


@pytest.mark.usefixtures("database")
def test_who_is_not_logged_in_is_told_so(client: Client) -> None:
    assert client.get(PAGE).url == f"/admin/login/?next={PAGE}"
    assert client.get(FIGURES).status_code == 401


@pytest.mark.usefixtures("database")
def test_links_into_the_admin_are_for_who_may_follow_them() -> None:
    assert "/admin/psqlmessages/" not in visitor("view_monitor").get(PAGE).text
    page = visitor("view_monitor", "view_exchange", "view_queue").get(PAGE).text
    assert 'data-exchange-url="/admin/psqlmessages/exchange/0/change/"' in page
    assert 'data-queue-url="/admin/psqlmessages/queue/0/change/"' in page


@pytest.mark.usefixtures("database")
def test_figures_are_never_kept_by_browsers_or_taken_for_a_page() -> None:
    new(HOSTILE, HOSTILE, HOSTILE)
    answer = visitor("view_monitor").get(FIGURES)
    assert "no-store" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


# What


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
def test_a_namespace_that_cannot_be_read_is_not_known_and_holds_up_nothing() -> None:
    exchange = new("x1", "orders", "eu", source_namespace="elsewhere")
    (source,) = [q for q in figures(visitor("view_monitor"))["queues"] if q["queue"] == "orders"]
    assert (source["ns"], source["sizes"]) == ("elsewhere", None)
    assert exchange.source_namespace == "elsewhere"


@pytest.mark.usefixtures("database")
def test_no_secret_is_told() -> None:
    Queue.objects.create(name="orders", channel="queue_secret")
    new("x1", "orders", "eu")
    assert "queue_secret" not in visitor("view_monitor").get(FIGURES).text


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
def test_a_hundred_who_look_at_once_cost_as_much_as_one(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "TICK_SECONDS", 3600.0)
    new("x1", "orders", "eu")

    @async_to_sync
    async def look() -> set[str | None]:
        watch = GraphWatch()
        texts = await asyncio.gather(*(watch.text() for _ in range(100)))
        return {*texts, await watch.text()}

    assert len(look()) == 1
    assert asked == ["default", "default"]


@pytest.mark.usefixtures("database")
def test_who_leaves_does_not_end_the_reading_for_others() -> None:
    new("x1", "orders", "eu")

    @async_to_sync
    async def look() -> str | None:
        watch = GraphWatch()
        first, second = (asyncio.create_task(watch.text()) for _ in range(2))
        # Both are waiting now.
        await asyncio.wait({first}, timeout=0)
        first.cancel()
        return await second

    assert "x1" in (look() or "")


@pytest.mark.usefixtures("database")
def test_a_namespace_that_is_down_is_not_asked_at_each_tick(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(graph, "_AWAY_SECONDS", 3600.0)
    new("x1", "orders", "eu", source_namespace="elsewhere")

    @async_to_sync
    async def look() -> None:
        watch = GraphWatch()
        for _ in range(5):
            await watch.text()

    look()
    assert asked.count("elsewhere") == 1


@pytest.mark.usefixtures("database")
def test_a_database_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "_PATIENCE_SECONDS", 0.2)

    async def hanging(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", hanging)
    assert visitor("view_monitor").get(FIGURES).status_code == 503


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
