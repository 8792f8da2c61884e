"""Trial in the admin: where an element would go, why, and what the copies would be."""

from __future__ import annotations

from typing import Any

import pytest

from psqlmessages.models import Destination, Element, Exchange, Queue
from tests.web.desks import Desk
from tests.web.test_admin_exchanges import EXCHANGES, HOSTILE, new
from tests.web.visitor import Page


@pytest.fixture
def sorting(desk: Desk) -> Exchange:
    return new(
        "x1",
        "orders",
        'eu msg.headers["country"].matches("^(it|de|fr)$")',
        'slow {"delay": 30, "headers": {"lane": "slow"}}',
        "audit",
    )


def tried(desk: Desk, exchange: Exchange, **values: Any) -> Page:
    page = desk.open(f"{EXCHANGES}{exchange.pk}/try/")
    return desk.send(page, "Try it", **values)


def test_each_destination_says_yes_or_no_and_why_and_shows_the_copy(
    desk: Desk, sorting: Exchange
) -> None:
    page = tried(desk, sorting, headers='{"country": "it"}', body="an order")
    assert "default/eu yes true" in page.text
    assert "delay: 30 s" in page.text
    assert '"lane": "slow"' in page.text
    assert '"x-hop-count": 1' in page.text
    # The second selector changes the message for the later ones too.
    assert page.html.count("&quot;lane&quot;") == 2
    assert page.text.count("an order") == 4


def test_a_selector_that_fails_says_why(desk: Desk, sorting: Exchange) -> None:
    assert "default/eu no" in tried(desk, sorting).text
    assert "country" in tried(desk, sorting).text.split("default/eu no", 1)[1][:80]


def test_nothing_is_pushed(desk: Desk, sorting: Exchange) -> None:
    tried(desk, sorting, body="an order")
    assert not Element.objects.exists()
    assert not Queue.objects.exists()


def test_a_json_body_is_seen_as_such(desk: Desk) -> None:
    exchange = new("x1", "orders", "big msg.body.amount > 10")
    assert "default/big yes" in tried(desk, exchange, body='{"amount": 11}', is_json="on").text
    assert "default/big no" in tried(desk, exchange, body='{"amount": 11}').text


def test_what_no_destination_wants_would_go_to_no_route(desk: Desk) -> None:
    exchange = new("x1", "orders", "eu false")
    text = tried(desk, exchange).text
    assert "No destination agrees: it would go to default/__no_route__." in text
    assert '"x-exchange-name": "x1"' in text


def test_too_many_hops_ask_no_selector(desk: Desk, sorting: Exchange) -> None:
    text = tried(desk, sorting, headers='{"x-hop-count": 17}').text
    assert "It has made too many hops: it would go to default/__too_many_hops__" in text
    assert "default/eu" not in text


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"headers": "[]"}, "Headers are a JSON object."),
        ({"headers": "{"}, "It is no JSON"),
        ({"headers": '{"a": 1, "a": 2}'}, "twice"),
        ({"body": "{", "is_json": "on"}, "It is no JSON"),
        ({"tries": "-1"}, "greater than or equal to 0"),
        ({"body": "x" * 100_001}, "at most 100000 characters"),
    ],
)
def test_what_is_no_element_is_refused(
    desk: Desk, sorting: Exchange, values: dict[str, str], sentence: str
) -> None:
    page = tried(desk, sorting, **values)
    assert any(sentence in error for error in page.errors), page.errors
    assert "default/eu" not in page.text


def test_a_selector_that_does_not_compile_any_more_is_named(desk: Desk, sorting: Exchange) -> None:
    Destination.objects.filter(queue="eu").update(selector="@gone")
    page = tried(desk, sorting)
    assert any("x1.dst[0].selector" in error for error in page.errors)


def test_headers_and_bodies_are_text(desk: Desk) -> None:
    exchange = new(HOSTILE, HOSTILE, HOSTILE)
    page = tried(desk, exchange, headers=f'{{"{HOSTILE}": "{HOSTILE}"}}', body=HOSTILE)
    assert "<script>alert" not in page.html
    assert page.text.count(HOSTILE) >= 5


def test_trying_is_for_who_may_view_exchanges(desk: Desk, sorting: Exchange) -> None:
    path = f"{EXCHANGES}{sorting.pk}/try/"
    assert desk.staff("view_queue").client.get(path).status_code == 403
    assert "Try it" in desk.staff("view_exchange").open(path).html


def test_an_exchange_that_is_not_there_cannot_be_tried(desk: Desk) -> None:
    assert desk.client.get(f"{EXCHANGES}999/try/").status_code == 404
