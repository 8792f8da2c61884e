"""The pages of the traffic as the server tells them: who, what, from which windows; /metrics."""

from datetime import timedelta
from math import ceil
from random import Random
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from psqlmessages import traffic_windows
from psqlmessages.models import PipelineJob, Traffic
from psqlmessages.monitor import json_views
from psqlmessages.monitor import traffic as monitored
from tests.sql.conftest import World
from tests.web.measured import begin, job, window
from tests.web.pages import SURE, Admin, logged_in

TOPIC = "/monitor/traffic/topic/"
FIGURES = "/monitor/traffic/figures/"
HOSTILE = "</script><script>alert(1)</script>"
SHARES = (50, 95, 99)


def part(values: list[float], share: int) -> float:
    """Return a percentile of ordered values."""
    return values[ceil(len(values) * share / 100) - 1]


@pytest.fixture
def database(database: World, monkeypatch) -> World:
    """The database, which may be slow."""
    monkeypatch.setattr(monitored, "_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(monitored, "_JOBS_TIMEOUT_SECONDS", 60.0)
    return database


@pytest.fixture
def viewer(database: World) -> Client:
    return logged_in("view_monitor")


def figures(client: Client, **query: Any) -> dict[str, Any]:
    json_views._texts.clear()
    response = client.get(FIGURES, query)
    assert response.status_code == 200
    return response.json()


def test_the_busiest_topics_come_first_with_sums(viewer: Client, monkeypatch):
    found = figures(viewer)
    assert (found["topics"], found["jobs"], found["is_counting"]) == ([], [], False)
    assert (found["since"], found["until"]) == (None, None)
    window("B", "one", count=10, bytes=1000)
    window("B", "two", count=20, bytes=500)
    window("B", "one", back=2, count=5, bytes=5)
    window("A", count=1)
    # Of another length, or too old.
    window("A", count=100, back=0, length=60)
    window("A", count=100, back=61)
    found = figures(viewer)["topics"]
    sums = [(topic["topic"], topic["count"], topic["bytes"]) for topic in found]
    assert sums == [("B", 35, 1505), ("A", 1, 4000)]
    assert found[0]["points"] == [[begin(10, 2), 5], [begin(10, 1), 30]]
    (topic,) = figures(viewer, window="60", seconds="3600")["topics"]
    assert topic["count"] == 100
    monkeypatch.setattr(monitored, "MAX_TOPICS", 1)
    found = figures(viewer)
    assert [topic["topic"] for topic in found["topics"]] == ["B"]
    assert found["has_more"]


def test_a_topic_is_shown_by_window_and_by_sender(viewer: Client):
    window("A", "one", count=10, bytes=10)
    window("A", "two", count=30, bytes=10)
    window("A", "two", back=3, count=60, bytes=10)
    window("OTHER", "one")
    found = figures(viewer, name="A", window="10", seconds="600")
    assert (found["total"]["count"], found["total"]["bytes"]) == (100, 30)
    senders = [(each["sender"], each["count"]) for each in found["senders"]]
    assert senders == [("two", 90), ("one", 10)]
    windows = [(start, each["count"]) for start, each in found["windows"]]
    assert windows == [(begin(10, 3), 60), (begin(10, 1), 40)]
    for name in ("", "A*", "x" * 101):
        for address in (TOPIC, FIGURES):
            assert viewer.get(address, {"name": name}).status_code == 404, (address, name)
    assert figures(viewer, window="7", seconds="-1")["window"] == 10
    for number, name in enumerate((" a", "", HOSTILE)):
        window(f"N{number}", name)
        (sender,) = figures(viewer, name=f"N{number}")["senders"]
        assert sender["sender"] == name


def test_percentiles_of_many_windows_are_never_too_low(viewer: Client):
    for back in range(2, 30):
        window("FEW", back=back, count=100)
    window("FEW", back=1, count=2, latency_p50=30e3, latency_p95=30e3, latency_p99=30e3)
    assert figures(viewer, name="FEW")["total"]["latency"][1] <= 800, "few slow ones"

    random = Random(7)  # noqa: S311 - the same numbers each time
    everything: list[float] = []
    for back in range(1, 30):
        messages = sorted(random.expovariate(1 / (100 * back)) for _ in range(200 * back))
        parts = {f"latency_p{share}": part(messages, share) for share in SHARES}
        window("A", back=back, count=len(messages), **parts)
        everything += messages
    everything.sort()
    for share, most in zip(SHARES, figures(viewer, name="A")["total"]["latency"], strict=True):
        real = part(everything, share)
        assert sum(each <= most for each in everything) / len(everything) >= share / 100 - 1e-3
        assert real <= most + 1e-9 <= 2.5 * real


def test_a_job_is_alive_as_long_as_it_gives_signs(viewer: Client):
    job("traffic", lag_seconds=12.5)
    job("archive", silent=11, lag_seconds=99)
    job("exchange sort", state=PipelineJob.State.STOPPED)
    found = figures(viewer)
    alive = {each["name"]: each["is_alive"] for each in found["jobs"]}
    assert alive == {"archive": False, "exchange sort": False, "traffic": True}
    assert (found["is_counting"], found["lag"]) == (True, 12.5)
    PipelineJob.objects.update(state=PipelineJob.State.STOPPED)
    assert figures(viewer)["lag"] == 0


@pytest.mark.usefixtures("database")
def test_windows_over_their_age_are_removed_in_batches(settings: Settings, capsys, monkeypatch):
    monkeypatch.setattr(traffic_windows, "_BATCH", 2)
    settings.PSQLMESSAGES = {"TRAFFIC_DAYS_OF_TEN_SECONDS": 1, "TRAFFIC_DAYS_OF_MINUTES": 3}
    now = timezone.now()
    for length in (10, 60, 3600):
        for days in (0, 2, 4):
            window("A", length=length, starts_at=now - timedelta(days=days))
    call_command("psqlmessages", "prune")
    assert "removed traffic windows: 3" in capsys.readouterr().out
    left = Traffic.objects.values_list("window_seconds", flat=True).order_by("window_seconds")
    assert list(left) == [10, 60, 60, 3600, 3600, 3600]
    assert traffic_windows.prune() == 0


TRAFFIC = "/admin/psqlmessages/traffic/"
JOBS = "/admin/psqlmessages/pipelinejob/"


def test_windows_are_listed_by_length_topic_and_date(admin: Admin):
    key = window("ORDERS", length=60, count=4711).pk
    window("PRICES", length=60)
    window("PRICES", length=3600)
    window("SECONDS", length=10)
    page = admin.open(TRAFFIC)
    assert "4711" in page.text.replace(",", "")
    assert "4711" in admin.open(f"{TRAFFIC}{key}/change/").text.replace(",", "")
    assert "SECONDS" not in page.text, "those of a minute come first"
    assert "SECONDS" in admin.open(f"{TRAFFIC}?window_seconds=10").text
    assert "1 traffic" in admin.open(f"{TRAFFIC}?topic=PRICES").text
    assert "1 traffic" in admin.open(f"{TRAFFIC}?q=ORD").text
    today = timezone.localtime(Traffic.objects.filter(window_seconds=60)[0].starts_at)
    query = f"starts_at__year={today.year}&starts_at__month={today.month}"
    assert "2 traffic" in admin.open(f"{TRAFFIC}?{query}").text


def test_jobs_are_shown_as_they_fare_and_dead_ones_can_be_deleted(admin: Admin):
    alive = job("traffic", lag_seconds=2.5)
    dead = job("exchange sort", silent=90 * 60, lag_seconds=7.5)
    failed = job("archive", state=PipelineJob.State.FAILED, error="Topic X is gone.")
    text = admin.open(JOBS).text
    assert "traffic running 2.5 s 56.7 " in text
    assert "exchange sort no heartbeat for 1" in text
    assert "7.5 s" not in text, "what is silent is not shown as if it ran"
    assert "Topic X is gone." in admin.open(f"{JOBS}{failed.pk}/change/").text
    assert "traffic, which is alive" in admin.act(JOBS, "delete_selected", dead.pk, alive.pk).text
    assert PipelineJob.objects.count() == 3
    assert admin.client.get(f"{JOBS}{alive.pk}/delete/").status_code == 403
    admin.send(admin.open(f"{JOBS}{dead.pk}/delete/"), SURE)
    assert {each.name for each in PipelineJob.objects.all()} == {"archive", "traffic"}
