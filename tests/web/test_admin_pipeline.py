"""The pipeline in the admin: traffic to be read, jobs to be forgotten, topics to be archived."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from project.postgres import Server
from psqlmessages.models import PipelineJob, Subscription, Topic, Traffic
from tests.web.desks import SURE, TOPICS, Desk
from tests.web.measured import job, window

TRAFFIC = "/admin/psqlmessages/traffic/"
JOBS = "/admin/psqlmessages/pipelinejob/"
KEEP, KEEP_NO_MORE = "Keep until archived", "Archive it no more"


# Traffic


def test_the_list_shows_windows_of_one_length_those_of_a_minute_first(desk: Desk) -> None:
    window("ORDERS", length=60, count=4711)
    window("SECONDS", length=10)
    page = desk.open(TRAFFIC)
    assert "4711" in page.text.replace(",", "")
    assert "SECONDS" not in page.text
    assert "SECONDS" in desk.open(f"{TRAFFIC}?window_seconds=10").text


def test_it_is_filtered_by_topic_and_date_and_searched(desk: Desk) -> None:
    for topic in ("ORDERS", "PRICES"):
        window(topic, length=60)
        window(topic, length=3600)
    page = desk.open(f"{TRAFFIC}?topic=PRICES")
    assert "1 traffic" in page.text
    # In the first minute of a month the one before it.
    today = timezone.localtime(Traffic.objects.filter(window_seconds=60)[0].starts_at)
    query = f"starts_at__year={today.year}&starts_at__month={today.month}"
    assert "2 traffic" in desk.open(f"{TRAFFIC}?{query}").text
    assert "1 traffic" in desk.open(f"{TRAFFIC}?q=ORD").text


@pytest.mark.parametrize("act", ["add/", "{}/delete/"])
def test_nobody_adds_or_deletes_windows(desk: Desk, act: str) -> None:
    path = f"{TRAFFIC}{act.format(window('ORDERS').pk)}"
    assert desk.client.get(path).status_code == 403


def test_a_window_is_shown_and_cannot_be_changed(desk: Desk) -> None:
    path = f"{TRAFFIC}{window('ORDERS', latency_p99=4321).pk}/change/"
    page = desk.open(path)
    assert "4321" in page.text
    assert "Save" not in page.html
    assert desk.staff("view_topic").client.get(path).status_code == 403
    assert desk.client.post(path, {"count": 1}).status_code == 403


def test_a_thousand_windows_are_listed_in_few_statements(
    desk: Desk, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    Traffic.objects.bulk_create(
        Traffic(
            topic=f"T{number}", sender="S", window_seconds=60, starts_at=timezone.now(), count=1,
            bytes=1, size_p50=1, size_p95=1, size_p99=1,
            latency_p50=1, latency_p95=1, latency_p99=1,
        )
        for number in range(1000)
    )  # fmt: skip
    with django_assert_max_num_queries(16):
        assert "1000 traffic" in desk.open(TRAFFIC).text


# Jobs


def test_a_job_is_shown_as_it_fares(desk: Desk) -> None:
    job("traffic", lag_seconds=2.5)
    text = desk.open(JOBS).text
    assert "traffic running 2.5 s 56.7 " in text


def test_a_job_that_is_silent_is_not_shown_as_if_it_ran(desk: Desk) -> None:
    job("traffic", silent=90 * 60, lag_seconds=2.5)
    text = desk.open(JOBS).text
    assert "traffic no sign for 1" in text
    assert "2.5 s" not in text


def test_a_failed_job_says_why(desk: Desk) -> None:
    made = job("archive", state=PipelineJob.State.FAILED, error="Topic X is gone.")
    assert "Topic X is gone." in desk.open(f"{JOBS}{made.pk}/change/").text


def test_a_dead_job_can_be_forgotten_and_one_that_lives_can_not(desk: Desk) -> None:
    dead, alive = job("archive", silent=60), job("traffic")
    assert desk.client.get(f"{JOBS}{alive.pk}/delete/").status_code == 403
    page = desk.open(f"{JOBS}{dead.pk}/delete/")
    desk.send(page, SURE)
    assert [each.name for each in PipelineJob.objects.all()] == ["traffic"]


def test_one_that_lives_is_not_deleted_from_the_list_either(desk: Desk) -> None:
    for name, silent in (("archive", 60), ("traffic", 0)):
        job(name, silent=silent)
    chosen = [str(each.pk) for each in PipelineJob.objects.all()]
    given = {"action": "delete_selected", "_selected_action": chosen, "index": "0"}
    page = desk.send(desk.open(JOBS), "0", **given)
    assert "traffic, which is alive" in page.text
    assert PipelineJob.objects.count() == 2


def test_who_may_only_view_jobs_deletes_none(desk: Desk) -> None:
    dead = job("archive", silent=60)
    viewer = desk.staff("view_pipelinejob")
    assert viewer.open(JOBS).status == 200
    assert viewer.client.get(f"{JOBS}{dead.pk}/delete/").status_code == 403


# Archive


def topic_page(desk: Desk, *rules: str) -> str:
    desk.world.rules("user1 N Topic ORDERS RW 60", *rules)
    return f"{TOPICS}{Topic.objects.get(name='ORDERS').pk}/change/"


def test_a_topic_is_marked_for_the_archive_and_unmarked(desk: Desk) -> None:
    path = topic_page(desk, f"{Server.owner} pipeline.* Topic * R 60")
    page = desk.send(desk.open(path), KEEP)
    assert "kept until they are archived" in page.messages[0]
    mark = Subscription.objects.get(topic="ORDERS")
    assert (mark.ident, mark.timeout) == ("pipeline.archive", 2**31 - 1)
    page = desk.send(page, KEEP_NO_MORE)
    assert not Subscription.objects.exists()
    assert KEEP in page.form(KEEP).buttons
    assert LogEntry.objects.count() == 2


def test_a_page_that_is_old_says_that_it_was_so_already(desk: Desk) -> None:
    old = desk.open(topic_page(desk, f"{Server.owner} pipeline.* Topic * R 60"))
    desk.send(old, KEEP)
    assert desk.send(old, KEEP).messages == ["It was so already."]
    assert LogEntry.objects.count() == 1


def test_without_a_rule_for_the_archive_it_says_which_is_missing(desk: Desk) -> None:
    page = desk.send(desk.open(topic_page(desk)), KEEP)
    assert f"Add a rule: role {Server.owner}, ident pipeline.*" in page.messages[0]
    assert not Subscription.objects.exists()


def test_who_may_not_change_topics_does_not_mark_them(desk: Desk) -> None:
    path = topic_page(desk)
    viewer = desk.staff("view_topic")
    assert KEEP not in viewer.open(path).html
    address = path.replace("change", "archive")
    assert viewer.client.post(address, {"archive": "yes"}).status_code == 403
    assert desk.client.get(address).status_code == 405
