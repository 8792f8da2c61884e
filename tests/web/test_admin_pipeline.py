"""The pipeline in the admin: traffic to be read, jobs to be forgotten."""

from __future__ import annotations

from django.utils import timezone

from psqlmessages.models import PipelineJob, Traffic
from tests.web.desks import SURE, Desk
from tests.web.measured import job, window

TRAFFIC = "/admin/psqlmessages/traffic/"
JOBS = "/admin/psqlmessages/pipelinejob/"


def test_windows_are_listed_by_length_topic_and_date(desk: Desk) -> None:
    key = window("ORDERS", length=60, count=4711).pk
    window("PRICES", length=60)
    window("PRICES", length=3600)
    window("SECONDS", length=10)
    page = desk.open(TRAFFIC)
    assert "4711" in page.text.replace(",", "")
    assert "4711" in desk.open(f"{TRAFFIC}{key}/change/").text.replace(",", "")
    assert "SECONDS" not in page.text, "those of a minute come first"
    assert "SECONDS" in desk.open(f"{TRAFFIC}?window_seconds=10").text
    assert "1 traffic" in desk.open(f"{TRAFFIC}?topic=PRICES").text
    assert "1 traffic" in desk.open(f"{TRAFFIC}?q=ORD").text
    # In the first minute of a month the one before it.
    today = timezone.localtime(Traffic.objects.filter(window_seconds=60)[0].starts_at)
    query = f"starts_at__year={today.year}&starts_at__month={today.month}"
    assert "2 traffic" in desk.open(f"{TRAFFIC}?{query}").text


def test_jobs_are_shown_as_they_fare(desk: Desk) -> None:
    job("traffic", lag_seconds=2.5)
    job("exchange sort", silent=90 * 60, lag_seconds=7.5)
    failed = job("archive", state=PipelineJob.State.FAILED, error="Topic X is gone.")
    text = desk.open(JOBS).text
    assert "traffic running 2.5 s 56.7 " in text
    assert "exchange sort no sign for 1" in text
    assert "7.5 s" not in text, "what is silent is not shown as if it ran"
    assert "Topic X is gone." in desk.open(f"{JOBS}{failed.pk}/change/").text


def test_a_dead_job_can_be_forgotten_and_one_that_is_alive_can_not(desk: Desk) -> None:
    dead, alive = job("archive", silent=60), job("traffic")
    page = desk.act(JOBS, "delete_selected", dead.pk, alive.pk)
    assert "traffic, which is alive" in page.text
    assert PipelineJob.objects.count() == 2
    assert desk.client.get(f"{JOBS}{alive.pk}/delete/").status_code == 403
    desk.send(desk.open(f"{JOBS}{dead.pk}/delete/"), SURE)
    assert [each.name for each in PipelineJob.objects.all()] == ["traffic"]
