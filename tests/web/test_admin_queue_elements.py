"""A look inside a queue: page by page, as text, bodies for who may; dead letters put back."""

from __future__ import annotations

import json

import pytest
from django.contrib.admin.models import LogEntry
from pytest_django import DjangoAssertNumQueries

from psqlmessages.admin.queue_elements import BODY_CHARACTERS, PAGE
from psqlmessages.models import Element, Queue
from tests.sql.conftest import Program
from tests.web.desks import Desk

QUEUES = "/admin/psqlmessages/queue/"
HOSTILE = "</pre><script>alert(1)</script>"


@pytest.fixture
def worker(desk: Desk) -> Program:
    """A program of user1 that may do all with every queue, as W."""
    desk.world.rules("user1 W Queue * RW 60")
    return desk.world.program("user1")


def push(worker: Program, queue: str, *bodies: str, headers: object = None) -> None:
    worker.connection.execute(
        "SELECT messages.push_many('W', %s, %s, headers => %s)",
        [queue, list(bodies), headers and [json.dumps(headers)] * len(bodies)],
    )


def inside(name: str) -> str:
    return f"{QUEUES}{Queue.objects.get(name=name).pk}/elements/"


def test_elements_are_shown_with_headers_bodies_and_state(desk: Desk, worker: Program) -> None:
    push(worker, "orders", "first body", headers={"country": "it"})
    worker.connection.execute("SELECT messages.push('W', 'orders', 'later', delay => 3600)")
    text = desk.open(inside("orders")).text
    assert '{"country": "it"}' in text
    assert "text, 10 bytes first body" in text
    assert "scheduled until" in text


def test_the_queues_page_leads_inside(desk: Desk, worker: Program) -> None:
    push(worker, "orders", "x")
    page = desk.open(f"{QUEUES}{Queue.objects.get().pk}/change/")
    assert "Elements of orders" in desk.follow(page, "Look inside").text


def test_names_headers_and_bodies_are_text_and_never_markup(desk: Desk, worker: Program) -> None:
    push(worker, HOSTILE, HOSTILE, headers={HOSTILE: HOSTILE, "x-dl-from-queue": HOSTILE})
    page = desk.open(inside(HOSTILE))
    assert "<script>alert" not in page.html
    assert page.text.count("<script>alert(1)</script>") >= 4


def test_bodies_are_for_who_has_the_permission(desk: Desk, worker: Program) -> None:
    push(worker, "orders", "the secret", headers={"country": "it"})
    page = desk.staff("view_queue", "view_element").open(inside("orders"))
    assert "the secret" not in page.html
    assert "psqlmessages.view_bodies" in page.text
    assert '{"country": "it"}' in page.text
    page = desk.staff("view_queue", "view_element", "view_bodies").open(inside("orders"))
    assert "the secret" in page.text


@pytest.mark.parametrize("permissions", [("view_queue",), ("view_element",), ()])
def test_a_look_inside_takes_both_permissions(
    desk: Desk, worker: Program, permissions: tuple[str, ...]
) -> None:
    push(worker, "orders", "x")
    visitor = desk.staff(*permissions)
    assert visitor.client.get(inside("orders")).status_code == 403


def test_no_lease_is_ever_shown(desk: Desk, worker: Program) -> None:
    push(worker, "orders", "x")
    lease = worker.query("SELECT lease FROM messages.reserve('W', 'orders')")
    page = desk.open(inside("orders"))
    assert "reserved until" in page.text
    assert str(Element.objects.get().lease) not in page.html
    assert lease not in page.html


def test_a_lease_that_ran_out_leaves_the_element_available(desk: Desk, worker: Program) -> None:
    push(worker, "orders", "x")
    worker.query("SELECT lease FROM messages.reserve('W', 'orders', 1, 0.001)")
    desk.world.wait_for("SELECT bool_and(available_at < now()) FROM psqlmessages_element")
    assert " available " in desk.open(inside("orders")).text


def test_a_long_body_is_shortened(desk: Desk, worker: Program) -> None:
    push(worker, "orders", "y" * 100_000)
    html = desk.open(inside("orders")).html
    assert html.count("y" * BODY_CHARACTERS + "…") == 1
    assert "y" * (BODY_CHARACTERS + 1) not in html


def test_every_element_is_on_one_page_in_both_orders(desk: Desk, worker: Program) -> None:
    # All are available from the same moment on: the id decides.
    push(worker, "orders", *(f"body-{number}-" for number in range(PAGE + 20)))
    for order in ("first", "last"):
        page = desk.open(f"{inside('orders')}?order={order}")
        texts = [page.text, desk.follow(page, "Next page").text]
        found = [n for text in texts for n in range(PAGE + 20) if f" body-{n}- " in f"{text} "]
        assert sorted(found) == list(range(PAGE + 20))
        assert (f"body-{0}-" in texts[0]) == (order == "first")


@pytest.mark.parametrize(
    "query", ["time=x&id=1", "time=2026-13-45&id=1", "time=2026-01-01&id=y", "id=9", "order=zzz",
              "time=2026-01-01T00:00:00%2B00:00&id=99999999999999999999999"],
)  # fmt: skip
def test_an_address_that_means_nothing_is_the_first_page(
    desk: Desk, worker: Program, query: str
) -> None:
    push(worker, "orders", "the body")
    assert "the body" in desk.open(f"{inside('orders')}?{query}").text


def test_a_page_takes_few_statements(
    desk: Desk, worker: Program, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    push(worker, "orders", *("x" for _ in range(200)))
    path = inside("orders")
    with django_assert_max_num_queries(6):
        desk.open(path)


def test_a_queue_that_is_not_there_has_no_page(desk: Desk) -> None:
    assert desk.client.get(f"{QUEUES}999/elements/").status_code == 404


# Dead letters


@pytest.fixture
def dead(desk: Desk, worker: Program) -> Program:
    """Two elements of orders and one of bills are dead letters."""
    for queue, number in (("orders", 2), ("bills", 1)):
        push(worker, queue, *(["x"] * number))
        Queue.objects.filter(name=queue).update(max_tries=1)
        for _ in range(number):
            lease = worker.query("SELECT lease FROM messages.reserve('W', %s)", queue)
            worker.connection.execute("SELECT messages.rollback('W', 0, %s)", [lease])
    assert Element.objects.filter(queue__name="__deadletter__").count() == 3
    return worker


def held(queue: str) -> int:
    return Element.objects.filter(queue__name=queue).count()


def test_chosen_dead_letters_go_back_where_they_came_from(desk: Desk, dead: Program) -> None:
    page = desk.open(inside("__deadletter__"))
    chosen = Element.objects.filter(headers__contains={"x-dl-from-queue": "orders"}).first()
    page = desk.send(page, "Put back selected", element=[str(chosen.pk)])
    text = "1 of 1 dead letters were put back: 1 into orders."
    assert page.messages == [text]
    assert (held("orders"), held("bills"), held("__deadletter__")) == (1, 0, 2)
    assert LogEntry.objects.get().change_message == text
    element = Element.objects.get(queue__name="orders")
    assert (element.tries, element.headers) == (0, {})


def test_all_dead_letters_go_back_at_once(desk: Desk, dead: Program) -> None:
    page = desk.send(desk.open(inside("__deadletter__")), "Put back all (up to 10000)")
    assert "3 of 3 dead letters were put back: 2 into orders, 1 into bills." in page.messages
    assert (held("orders"), held("bills"), held("__deadletter__")) == (2, 1, 0)


def test_dead_letters_that_somebody_has_stay(desk: Desk, dead: Program) -> None:
    page = desk.open(inside("__deadletter__"))
    dead.query("SELECT count(*) FROM messages.reserve('W', '__deadletter__', 2)")
    page = desk.send(page, "Put back all (up to 10000)")
    assert page.messages[0].startswith("1 of 3 dead letters")
    assert "Those that are reserved stay." in page.messages[0]
    assert held("__deadletter__") == 2


def test_nothing_chosen_is_said(desk: Desk, dead: Program) -> None:
    page = desk.send(desk.open(inside("__deadletter__")), "Put back selected")
    assert page.messages == ["No dead letter was chosen."]
    assert held("__deadletter__") == 3


def test_elements_of_other_queues_are_not_put_back_from_here(desk: Desk, dead: Program) -> None:
    push(dead, "other", "x", headers={"x-dl-from-queue": "orders"})
    stranger = Element.objects.get(queue__name="other")
    page = desk.open(inside("__deadletter__"))
    desk.send(page, "Put back selected", element=[str(stranger.pk), "no number"])
    assert (held("orders"), held("other")) == (0, 1)


def test_putting_back_takes_the_permission(desk: Desk, dead: Program) -> None:
    looker = desk.staff("view_queue", "view_element")
    page = looker.open(inside("__deadletter__"))
    assert not [b for form in page.forms for b in form.buttons if b.startswith("Put")]
    looker.client.handler.enforce_csrf_checks = False
    answer = looker.client.post(inside("__deadletter__"), {"all": "yes"})
    assert (answer.status_code, held("__deadletter__")) == (403, 3)


def test_putting_back_from_another_site_is_refused(desk: Desk, dead: Program) -> None:
    answer = desk.client.post(inside("__deadletter__"), {"all": "yes"})
    assert (answer.status_code, held("__deadletter__")) == (403, 3)
