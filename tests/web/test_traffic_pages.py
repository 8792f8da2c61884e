"""The pages of the traffic as the server tells them: who, what, from which windows; /metrics."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from math import ceil
from random import Random
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from psqlmessages import traffic
from psqlmessages.models import PipelineJob, Traffic
from psqlmessages.monitor import graph
from psqlmessages.monitor import traffic as monitored
from tests.sql.conftest import World
from tests.web.conftest import PATIENT
from tests.web.measured import begin, forget, job, window
from tests.web.site import Site
from tests.web.test_metrics import METRICS
from tests.web.test_metrics_queues import samples
from tests.web.test_monitor_graph import visitor

PAGE, TOPIC = "/monitor/traffic/", "/monitor/traffic/topic/"
FIGURES = "/monitor/traffic/figures/"
HOSTILE = "</script><script>alert(1)</script>"

SHARES = (50, 95, 99)


def part(values: list[float], share: int) -> float:
    """What a share of ordered values is at most, in percent."""
    return values[ceil(len(values) * share / 100) - 1]


@pytest.fixture
def database(transactional_db: None, world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The database, which may stand still for seconds."""
    monkeypatch.setattr(graph, "_PATIENCE_SECONDS", 60)
    monkeypatch.setattr(monitored, "_PATIENCE_SECONDS", 60.0)
    return world


def figures(client: Client, **query: Any) -> dict[str, Any]:
    response = client.get(FIGURES, query)
    assert response.status_code == 200
    return response.json()


# Who


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(
    ("is_staff", "permissions"),
    [(True, ()), (False, ("view_monitor",)), (True, ("view_traffic",))],
)
@pytest.mark.parametrize("page", [PAGE, f"{TOPIC}?name=A", FIGURES])
def test_who_may_not_see_the_monitor_sees_no_traffic(
    page: str, is_staff: bool, permissions: tuple[str, ...]
) -> None:
    client = visitor(*permissions, is_staff=is_staff)
    assert client.get(page).status_code == 403


@pytest.mark.usefixtures("database")
def test_who_is_not_logged_in_is_led_to_the_login(client: Client) -> None:
    assert client.get(PAGE).url == f"/admin/login/?next={PAGE}"
    assert client.get(FIGURES).status_code == 401


@pytest.mark.usefixtures("database")
def test_the_pages_allow_no_inline_script_and_show_names_as_text() -> None:
    page = visitor("view_monitor").get(TOPIC, {"name": HOSTILE})
    assert "script-src 'self'" in page["Content-Security-Policy"]
    assert HOSTILE not in page.text
    assert "unsafe" not in page["Content-Security-Policy"]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("name", ["", "A*", "x" * 101])
def test_what_can_be_no_topic_is_not_found(name: str) -> None:
    client = visitor("view_monitor")
    assert client.get(TOPIC, {"name": name}).status_code == 404
    assert client.get(FIGURES, {"name": name}).status_code == 404


@pytest.mark.usefixtures("database")
def test_links_into_the_admin_are_for_who_may_follow_them() -> None:
    assert "/admin/psqlmessages/" not in visitor("view_monitor").get(PAGE).text
    page = visitor("view_monitor", "view_pipelinejob").get(PAGE).text
    assert "/admin/psqlmessages/pipelinejob/" in page


# What


@pytest.mark.usefixtures("database")
def test_topics_are_told_with_the_sums_of_their_senders_busiest_first() -> None:
    window("B", "one", count=10, bytes=1000)
    window("B", "two", count=20, bytes=500)
    window("B", "one", back=2, count=5, bytes=5)
    window("A", count=1)
    found = figures(visitor("view_monitor"))["topics"]
    assert [(topic["topic"], topic["count"], topic["bytes"]) for topic in found] == [
        ("B", 35, 1505),
        ("A", 1, 4000),
    ]
    assert found[0]["points"] == [[begin(10, 2), 5], [begin(10, 1), 30]]


@pytest.mark.usefixtures("database")
def test_windows_of_another_length_or_time_are_not_added_to_them() -> None:
    window("A", count=1)
    window("A", count=100, back=0, length=60)
    window("A", count=100, back=61)
    client = visitor("view_monitor")
    (topic,) = figures(client)["topics"]
    assert topic["count"] == 1
    (topic,) = figures(client, window="60", seconds="3600")["topics"]
    assert topic["count"] == 100


@pytest.mark.usefixtures("database")
def test_a_topic_is_told_by_window_and_by_sender() -> None:
    window("A", "one", count=10, bytes=10)
    window("A", "two", count=30, bytes=10)
    window("A", "two", back=3, count=60, bytes=10)
    window("OTHER", "one")
    found = figures(visitor("view_monitor"), name="A", window="10", seconds="600")
    assert (found["total"]["count"], found["total"]["bytes"]) == (100, 30)
    assert [(each["sender"], each["count"]) for each in found["senders"]] == [
        ("two", 90),
        ("one", 10),
    ]
    assert [(at, each["count"]) for at, each in found["windows"]] == [
        (begin(10, 3), 60),
        (begin(10, 1), 40),
    ]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("name", ["12", " ", " a", "", HOSTILE])
def test_senders_of_any_name_are_told_as_senders(name: str) -> None:
    window("A", name, count=10)
    found = figures(visitor("view_monitor"), name="A")
    assert [each["sender"] for each in found["senders"]] == [name]
    assert len(found["windows"]) == 1


@pytest.mark.usefixtures("database")
def test_a_window_of_one_sender_has_exactly_its_own_percentiles() -> None:
    window("A", latency_p50=10, latency_p95=20, latency_p99=30, size_p50=1, size_p95=2, size_p99=3)
    total = figures(visitor("view_monitor"), name="A")["total"]
    assert total["latency"] == [10, 20, 30]
    assert total["size"] == [1, 2, 3]


@pytest.mark.usefixtures("database")
def test_so_many_messages_really_are_at_most_what_is_told_for_many_windows() -> None:
    random = Random(7)  # noqa: S311 - the same numbers each time
    everything: list[float] = []
    for back in range(1, 30):
        messages = sorted(random.expovariate(1 / (100 * back)) for _ in range(200 * back))
        parts = {f"latency_p{share}": part(messages, share) for share in SHARES}
        window("A", back=back, count=len(messages), **parts)
        everything += messages
    everything.sort()
    told = figures(visitor("view_monitor"), name="A")["total"]["latency"]
    for share, most in zip(SHARES, told, strict=True):
        real = part(everything, share)
        assert sum(each <= most for each in everything) / len(everything) >= share / 100 - 1e-3
        assert real <= most + 1e-9 <= 2.5 * real


@pytest.mark.usefixtures("database")
def test_one_slow_window_of_few_messages_does_not_make_a_topic_slow() -> None:
    for back in range(2, 30):
        window("A", back=back, count=100)
    window("A", back=1, count=2, latency_p50=30e3, latency_p95=30e3, latency_p99=30e3)
    assert figures(visitor("view_monitor"), name="A")["total"]["latency"][1] <= 800


@pytest.mark.usefixtures("database")
def test_more_topics_than_can_be_listed_are_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitored, "TOPICS", 2)
    for number in range(3):
        window(f"T{number}", count=number + 1)
    found = figures(visitor("view_monitor"))
    assert [topic["topic"] for topic in found["topics"]] == ["T2", "T1"]
    assert found["has_more"]


@pytest.mark.usefixtures("database")
def test_a_job_is_alive_as_long_as_it_gives_signs() -> None:
    job("traffic")
    job("archive", silent=11)
    job("exchange sort", state=PipelineJob.State.STOPPED)
    found = figures(visitor("view_monitor"))
    assert [(each["name"], each["is_alive"]) for each in found["jobs"]] == [
        ("archive", False),
        ("exchange sort", False),
        ("traffic", True),
    ]
    assert found["is_counting"]


@pytest.mark.usefixtures("database")
def test_how_far_the_counting_is_behind_is_told_while_it_goes_on() -> None:
    job("traffic", lag_seconds=12.5)
    job("archive", lag_seconds=99)
    client = visitor("view_monitor")
    assert figures(client)["lag"] == 12.5
    PipelineJob.objects.update(state=PipelineJob.State.STOPPED)
    monitored._watches.clear()
    assert figures(client)["lag"] == 0


@pytest.mark.usefixtures("database")
def test_without_a_pipeline_all_is_empty_and_nothing_is_counting() -> None:
    found = figures(visitor("view_monitor"))
    assert (found["topics"], found["jobs"], found["is_counting"]) == ([], [], False)
    assert (found["since"], found["until"]) == (None, None)


@pytest.mark.usefixtures("database")
def test_a_query_of_nonsense_gives_the_first_choice() -> None:
    client = visitor("view_monitor")
    assert figures(client, window="7", seconds="-1")["window"] == 10
    assert client.get(PAGE, {"window": HOSTILE}).status_code == 200


@pytest.mark.usefixtures("database")
def test_half_a_day_of_a_busy_topic_is_told() -> None:
    with connection.cursor() as cursor:
        cursor.execute("""
            INSERT INTO psqlmessages_traffic (topic, sender, window_seconds, starts_at, count,
                bytes, size_p50, size_p95, size_p99, latency_p50, latency_p95, latency_p99)
            SELECT 'A', 'S' || s, 60, date_bin('1 minute', now(), 'epoch') - w * interval '1 min',
                w, w, s, s + w, s + w, w, w + s, w + s
            FROM generate_series(1, 10) AS s, generate_series(1, 700) AS w
        """)
    found = figures(visitor("view_monitor"), name="A", window="60", seconds="43200")
    assert len(found["windows"]) == 700


# How long


@pytest.mark.usefixtures("database")
def test_windows_go_when_they_are_older_than_those_of_their_length_are_kept(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.PSQLMESSAGES = {"TRAFFIC_DAYS_OF_TEN_SECONDS": 1, "TRAFFIC_DAYS_OF_MINUTES": 3}
    now = timezone.now()
    for length in (10, 60, 3600):
        for days in (0, 2, 4):
            window("A", length=length, starts_at=now - timedelta(days=days))
    call_command("psqlmessages", "prune")
    assert "removed 3 windows of traffic" in capsys.readouterr().out
    kept = Traffic.objects.values_list("window_seconds", flat=True).order_by("window_seconds")
    assert list(kept) == [10, 60, 60, 3600, 3600, 3600]
    assert traffic.prune() == 0


@pytest.mark.usefixtures("database")
def test_old_windows_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_BATCH", 2)
    for number in range(5):
        window("A", f"S{number}", starts_at=timezone.now() - timedelta(days=1000))
    assert traffic.prune() == 5
    assert not Traffic.objects.exists()


# /metrics


def test_metrics_tell_how_the_jobs_fare(new_site: Callable[..., Site], world: World) -> None:
    site = new_site(PSQLMESSAGES=METRICS, PATCHED=PATIENT)
    forget()
    job("traffic", lag_seconds=1.5)
    job("archive", silent=60, lag_seconds=1.5)
    job("exchange sort", state=PipelineJob.State.FAILED)
    found = samples(site)
    assert found["pipeline_alive", "traffic"] == 1
    assert found["pipeline_lag_seconds", "traffic"] == 1.5
    assert found["pipeline_rows", "traffic"] == 1234
    assert found["pipeline_seen_timestamp_seconds", "traffic"] > 1e9
    assert found["pipeline_alive", "archive"] == 0
    assert ("pipeline_lag_seconds", "archive") not in found
    assert found["pipeline_failed", "exchange sort"] == 1
    forget()
