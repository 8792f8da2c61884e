"""Exchanges in the admin: defined, refused with faults at their fields, started, stopped."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from pytest_django import DjangoAssertNumQueries

from project.postgres import Server
from psqlmessages.models import Auth, Destination, Exchange, ExchangeCount
from tests.web.desks import Desk
from tests.web.visitor import Page, Visitor

EXCHANGES = "/admin/psqlmessages/exchange/"
HOSTILE = "<script>alert(1)</script>"
Outcome = ExchangeCount.Outcome
# When a process that runs an exchange was last seen, for who looks within the next decades.
ALIVE = "2100-01-01T00:00:00Z"


def new(name: str, source: str, *targets: str, **fields: Any) -> Exchange:
    """An exchange; each target is a queue, and behind a blank its selector."""
    exchange = Exchange.objects.create(name=name, source_queue=source, **fields)
    for position, target in enumerate(targets):
        queue, _, selector = target.partition(" ")
        Destination.objects.create(
            exchange=exchange, position=position, queue=queue, selector=selector
        )
    return exchange


def counted(exchange: Exchange, number: int) -> None:
    """Write what a process would that runs the exchange."""
    for outcome, destination in ((Outcome.OK, -1), (Outcome.TO, 0)):
        ExchangeCount.objects.create(
            exchange=exchange, worker=uuid.uuid4(), outcome=outcome, destination=destination,
            count=number, seen_at=ALIVE,
        )  # fmt: skip


def page_of(exchange: Exchange) -> str:
    return f"{EXCHANGES}{exchange.pk}/change/"


def add(desk: Visitor, **values: str) -> Page:
    given = {"name": "x1", "source_queue": "orders", "destinations-0-queue": "eu"}
    return desk.send(desk.open(f"{EXCHANGES}add/"), "Save", **{**given, **values})


def stored(exchange: str = "x1") -> list[tuple[str, str]]:
    rows = Destination.objects.filter(exchange__name=exchange).order_by("position")
    return list(rows.values_list("queue", "selector"))


# Defined


def test_an_exchange_is_defined_with_its_destinations(desk: Desk) -> None:
    page = add(desk, **{"destinations-0-selector": "msg.tries > 1"})
    assert "was added successfully" in page.messages[0]
    exchange = Exchange.objects.get()
    assert (exchange.name, exchange.source_queue, exchange.is_running) == ("x1", "orders", True)
    assert stored() == [("eu", "msg.tries > 1")]
    assert "'queue': 'eu', 'selector': 'msg.tries > 1'" in LogEntry.objects.get().change_message


REFUSED = {
    ("name", "a*"): "ends in *: that is a pattern, and no name.",
    ("name", "n" * 91): "Ensure this value has at most 90 characters (it has 91).",
    ("source_queue", "a*"): "ends in *: that is a pattern, and no name.",
    ("source_namespace", "nowhere"): "There is no namespace 'nowhere'",
    ("parallel", "17"): "It is 17, and must be 1 to 16.",
    ("wsize", "4097"): "It is 4,097, and must be 1 to 4,096.",
    ("destinations-0-namespace", "nowhere"): "There is no namespace 'nowhere'",
    ("destinations-0-queue", "a*"): "ends in *: that is a pattern, and no name.",
    ("destinations-0-selector", "msg.headers["): "line 1",
    ("destinations-0-selector", "[1].map(x, x)"): "map",
    ("destinations-0-selector", "@nobody"): "nobody",
    ("destinations-0-queue", ""): "It has 0 destinations",
}


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_what_cannot_be_is_refused_with_a_sentence_and_nothing_is_made(
    desk: Desk, field: str, value: str
) -> None:
    page = add(desk, **{field: value})
    assert any(REFUSED[field, value] in error for error in page.errors), page.errors
    assert not Exchange.objects.exists()
    assert not Destination.objects.exists()


def test_a_fault_of_a_selector_stands_at_its_field(desk: Desk) -> None:
    html = add(desk, **{"destinations-0-selector": "msg.headers["}).html
    before, after = html.index('class="errorlist"'), html.index('name="destinations-0-selector"')
    assert before < after
    assert "</tr>" not in html[before:after]


def test_a_fault_of_each_field_is_told_once(desk: Desk) -> None:
    page = add(desk, source_queue="a*", parallel="0", **{"destinations-0-queue": "b*"})
    assert len(page.errors) == 3


def test_a_blank_in_a_name_is_kept(desk: Desk) -> None:
    add(desk, source_queue=" a ")
    assert Exchange.objects.get().source_queue == " a "


def test_names_and_selectors_are_shown_as_text(desk: Desk) -> None:
    exchange = new(HOSTILE, HOSTILE, f"{HOSTILE} msg.body == '{HOSTILE}'")
    for path in (EXCHANGES, page_of(exchange), f"{EXCHANGES}{exchange.pk}/delete/"):
        page = desk.open(path)
        assert HOSTILE in page.text
        assert "<script>alert" not in page.html


# Changed


@pytest.fixture
def sorting(desk: Desk) -> Exchange:
    return new("x1", "orders", "eu", "slow", "audit")


def test_the_order_of_destinations_is_edited(desk: Desk, sorting: Exchange) -> None:
    desk.send(desk.open(page_of(sorting)), "Save", **{"destinations-2-order": "1"})
    assert [queue for queue, _ in stored()] == ["audit", "eu", "slow"]
    desk.send(desk.open(page_of(sorting)), "Save", **{"destinations-0-order": "3"})
    assert [queue for queue, _ in stored()] == ["eu", "slow", "audit"]


def test_a_destination_that_is_removed_leaves_no_gap(desk: Desk, sorting: Exchange) -> None:
    page = desk.open(page_of(sorting))
    desk.send(page, "Save", **{"destinations-0-DELETE": "on", "destinations-3-queue": "new"})
    rows = Destination.objects.order_by("position").values_list("position", "queue")
    assert list(rows) == [(0, "slow"), (1, "audit"), (2, "new")]


def test_the_last_destination_cannot_be_removed(desk: Desk) -> None:
    exchange = new("x1", "orders", "eu")
    page = desk.send(desk.open(page_of(exchange)), "Save", **{"destinations-0-DELETE": "on"})
    assert any("It has 0 destinations" in error for error in page.errors)
    assert stored() == [("eu", "")]


def test_running_loops_are_told_when_only_a_destination_changes(
    desk: Desk, sorting: Exchange
) -> None:
    before = sorting.changed_at
    desk.send(desk.open(page_of(sorting)), "Save", **{"destinations-0-selector": "msg.tries == 0"})
    sorting.refresh_from_db()
    assert sorting.changed_at > before


def test_what_somebody_else_changed_meanwhile_is_not_overwritten(
    desk: Desk, sorting: Exchange
) -> None:
    page = desk.open(page_of(sorting))
    desk.send(desk.open(page_of(sorting)), "Save", parallel="2")
    answer = desk.send(page, "Save", wsize="7")
    assert any("Somebody changed this exchange meanwhile" in error for error in answer.errors)
    sorting.refresh_from_db()
    assert (sorting.parallel, sorting.wsize) == (2, 100)


# Started and stopped


def act(visitor: Visitor, action: str, *exchanges: Exchange) -> Page:
    keys = [str(exchange.pk) for exchange in exchanges]
    page = visitor.open(EXCHANGES)
    return visitor.send(page, "0", action=action, _selected_action=keys, index="0")


def test_exchanges_are_stopped_and_started_from_the_list(desk: Desk, sorting: Exchange) -> None:
    assert act(desk, "stop_selected", sorting).messages == ["Stopped: x1."]
    sorting.refresh_from_db()
    assert not sorting.is_running
    assert act(desk, "stop_selected", sorting).messages == ["Stopped already: x1."]
    assert act(desk, "start_selected", sorting).messages == ["Started: x1."]
    texts = LogEntry.objects.order_by("id").values_list("change_message", flat=True)
    assert list(texts) == ["Stopped.", "Started."]


def test_the_button_of_the_page_leads_back_to_it(desk: Desk, sorting: Exchange) -> None:
    page = desk.send(desk.open(page_of(sorting)), "Stop it")
    assert page.url.endswith(page_of(sorting))
    assert "It is stopped: elements wait in orders." in page.text


def test_who_may_only_look_changes_nothing(desk: Desk, sorting: Exchange) -> None:
    looker = desk.staff("view_exchange", "view_destination")
    page = looker.open(page_of(sorting))
    buttons = {button for form in page.forms for button in form.buttons}
    assert not buttons & {"Save", "Stop it", "Add those of this database"}
    looker.client.handler.enforce_csrf_checks = False
    given = {"action": "stop_selected", "_selected_action": sorting.pk}
    looker.client.post(EXCHANGES, given)
    looker.client.post(f"{EXCHANGES}{sorting.pk}/rules/")
    sorting.refresh_from_db()
    assert sorting.is_running
    assert not Auth.objects.exists()


def test_an_exchange_is_deleted_with_what_was_counted(desk: Desk, sorting: Exchange) -> None:
    ExchangeCount.objects.create(exchange=sorting, worker=uuid.uuid4(), outcome=Outcome.OK)
    page = desk.open(f"{EXCHANGES}{sorting.pk}/delete/")
    page = desk.send(page, "Yes, I\N{RIGHT SINGLE QUOTATION MARK}m sure")
    assert "was deleted successfully" in page.messages[0]
    assert not Exchange.objects.exists()
    assert not ExchangeCount.objects.exists()
    assert "'queue': 'orders'" in LogEntry.objects.get().change_message


# Rules


def test_the_rules_that_are_missing_are_named_and_added_by_the_button(
    desk: Desk, sorting: Exchange
) -> None:
    page = desk.open(page_of(sorting))
    assert f"VALUES ('{Server.owner}', 'exchange.x1', 'Queue', 'orders', 'R', 60);" in page.text
    page = desk.send(page, "Add those of this database")
    assert page.messages == ["Added: 4 rules."]
    assert "exchange.x1 may do what it needs." in page.text
    rules = Auth.objects.order_by("dest").values_list("role", "ident", "type", "dest", "mode")
    role = Server.owner
    assert list(rules) == [
        (role, "exchange.x1", "Queue", "audit", "W"),
        (role, "exchange.x1", "Queue", "eu", "W"),
        (role, "exchange.x1", "Queue", "orders", "R"),
        (role, "exchange.x1", "Queue", "slow", "W"),
    ]
    assert LogEntry.objects.filter(change_message__startswith="Rule added: INSERT").count() == 4


def test_rules_are_added_by_who_may_add_rules(desk: Desk, sorting: Exchange) -> None:
    changer = desk.staff("view_exchange", "change_exchange", "view_destination")
    page = changer.open(page_of(sorting))
    assert "these rules are missing" in page.text
    assert "Add those of this database" not in [b for form in page.forms for b in form.buttons]


# What was counted


def test_the_list_is_sorted_by_each_of_its_columns(desk: Desk) -> None:
    new("x1", "b", "eu")
    new("x2", "a", "eu")
    texts = {number: desk.open(f"{EXCHANGES}?o={number}").text for number in range(1, 10)}
    assert texts[2].index("x2") < texts[2].index("x1")


def test_the_list_and_the_page_add_up_what_all_workers_counted(
    desk: Desk, sorting: Exchange
) -> None:
    buckets = [0, 0, 0, 50, 50, *[0] * 8]
    for seen in (ALIVE, "2020-01-01T00:00:00Z"):
        given = {"exchange": sorting, "worker": uuid.uuid4(), "seen_at": seen}
        ExchangeCount.objects.create(
            **given, outcome=Outcome.OK, count=100, seconds=1, buckets=buckets, selector_seconds=0.1
        )
        ExchangeCount.objects.create(**given, outcome=Outcome.NO_ROUTE, count=3)
        ExchangeCount.objects.create(**given, outcome=Outcome.TO, destination=1, count=70)
        ExchangeCount.objects.create(**given, outcome=Outcome.BAD_SELECTOR, destination=1, count=4)
    assert " 1 200 6 0 0 " in desk.open(EXCHANGES).text
    text = desk.open(page_of(sorting)).text
    assert "1 process runs it." in text
    assert "routed 200 10 ms 10 ms 19 ms" in text
    assert "default/slow 140 8" in text
    assert "971 µs" in text


def test_an_exchange_that_no_process_runs_says_how_to_start_one(
    desk: Desk, sorting: Exchange
) -> None:
    assert "python manage.py psqlmessages exchange run" in desk.open(page_of(sorting)).text


def test_the_list_takes_few_statements(
    desk: Desk, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(60):
        new(f"x{number}", "orders", "eu", "slow")
    with django_assert_max_num_queries(10):
        assert "60 exchanges" in desk.open(EXCHANGES).text
