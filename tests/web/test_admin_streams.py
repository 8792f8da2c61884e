"""Streams in the admin: subscriptions with what waits, and the retention of topics."""

import pytest
from django.contrib.admin.models import LogEntry
from pytest_django import DjangoAssertNumQueries

from project.postgres import Server
from psqlmessages.models import Subscription, Topic
from tests.sql.conftest import Program
from tests.web.desks import TOPICS, Desk

SUBSCRIPTIONS = "/admin/psqlmessages/subscription/"


@pytest.fixture
def reader(desk: Desk) -> Program:
    """READER subscribes to PRICES for a minute; three messages wait."""
    desk.world.rules("user1 READER Topic PRICES RW 10", "user1 N* Topic PRICES RW 10")
    reader = desk.world.program("user1")
    reader.query("SELECT count(*) FROM messages.subscribe('READER', 'PRICES', 60)")
    for _ in range(3):
        reader.ok("publish", "READER", "PRICES", "x")
    return reader


@pytest.mark.usefixtures("reader")
def test_a_subscription_is_listed_with_what_waits(desk: Desk) -> None:
    assert "READER PRICES 3 " in desk.open(SUBSCRIPTIONS).text


def test_what_was_read_waits_no_more(desk: Desk, reader: Program) -> None:
    reader.query("SELECT count(*) FROM messages.subscribe('READER', 'PRICES', 60)")
    assert "READER PRICES 0 " in desk.open(SUBSCRIPTIONS).text


@pytest.mark.usefixtures("reader")
def test_a_subscription_that_timed_out_says_so_and_is_found_by_its_state(desk: Desk) -> None:
    Subscription.objects.update(timeout=1, pinged_at="2020-01-01T00:00:00Z")
    assert "timed out" in desk.open(f"{SUBSCRIPTIONS}?state=over").text
    assert "0 subscriptions" in desk.open(f"{SUBSCRIPTIONS}?state=alive").text


@pytest.mark.usefixtures("reader")
def test_a_gap_is_told(desk: Desk) -> None:
    Subscription.objects.update(is_recovered=False)
    assert "alive, after a gap" in desk.open(SUBSCRIPTIONS).text


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("act", ["add/", "{}/delete/"])
def test_nobody_adds_or_deletes_subscriptions(desk: Desk, act: str) -> None:
    path = f"{SUBSCRIPTIONS}{act.format(Subscription.objects.get().pk)}"
    assert desk.client.get(path).status_code == 403


def test_hundreds_of_subscriptions_are_listed_in_few_statements(
    desk: Desk, reader: Program, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(120):
        reader.query("SELECT count(*) FROM messages.subscribe(%s, 'PRICES', 60)", f"N{number}")
    with django_assert_max_num_queries(10):
        page = desk.open(SUBSCRIPTIONS)
    assert "121 subscriptions" in page.text


def test_the_retention_of_a_topic_is_edited_and_nothing_else_is_written(
    desk: Desk, reader: Program
) -> None:
    topic = Topic.objects.get(name="PRICES")
    page = desk.open(f"{TOPICS}{topic.pk}/change/")
    # In between, SQL writes to the same row.
    reader.ok("init", "READER")
    reader.ok("topic_listen", "PRICES")
    desk.send(page, "Save", retention="3600")
    topic.refresh_from_db()
    assert (topic.retention, topic.listeners, topic.subscriptions) == (3600, 1, 1)
    assert "Retention" in LogEntry.objects.get().change_message


@pytest.mark.usefixtures("impatient")
def test_what_a_transaction_holds_is_not_waited_for_long(desk: Desk, reader: Program) -> None:
    desk.world.rules(f"{Server.owner} pipeline.* Topic * R 10")
    topic = Topic.objects.get(name="PRICES")
    page = desk.open(f"{TOPICS}{topic.pk}/change/")
    reader.connection.autocommit = False
    reader.ok("init", "READER")
    reader.ok("topic_listen", "PRICES")
    saved = desk.send(page, "Save", retention="3600")
    marked = desk.send(page, "Keep until archived")
    reader.connection.rollback()
    for answer in (saved, marked):
        assert answer.messages == ["Nothing was saved: canceling statement due to lock timeout."]
    topic.refresh_from_db()
    assert (topic.retention, topic.subscriptions) == (0, 1)
    assert not LogEntry.objects.exists()


def test_a_negative_retention_is_refused(desk: Desk, reader: Program) -> None:
    topic = Topic.objects.get(name="PRICES")
    page = desk.send(desk.open(f"{TOPICS}{topic.pk}/change/"), "Save", retention="-1")
    assert "A retention is of 0 seconds or more." in page.text
