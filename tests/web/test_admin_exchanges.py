"""Exchanges in the admin: defined, refused with faults at their fields, tried, started, stopped."""

from typing import Any, ClassVar

import pytest
from django.contrib.admin import ModelAdmin, site
from django.contrib.admin.models import LogEntry
from django.forms import Script

from project.postgres import Server
from psqlmessages.admin.exchanges import ExchangeAdmin
from psqlmessages.models import Auth, Destination, Element, Exchange, ExchangeCount, Queue
from tests.web.measured import count
from tests.web.pages import EXCHANGES, SURE, Admin, FormClient, Page, history, page_of

HOSTILE = "<script>alert(1)</script>"
Outcome = ExchangeCount.Outcome


def new(name: str, source: str, *destinations: str, **fields: Any) -> Exchange:
    """Create an exchange; a destination is a queue, a blank and its selector."""
    exchange = Exchange.objects.create(name=name, source_queue=source, **fields)
    for position, destination in enumerate(destinations):
        queue, _, selector = destination.partition(" ")
        given = {"position": position, "queue": queue, "selector": selector}
        Destination.objects.create(exchange=exchange, **given)
    return exchange


def add(admin: FormClient, **values: str) -> Page:
    given = {"name": "x1", "source_queue": "orders", "destinations-0-queue": "eu"}
    return admin.send(admin.open(f"{EXCHANGES}add/"), "Save", **{**given, **values})


def stored(*fields: str) -> list[Any]:
    return list(Destination.objects.order_by("position").values_list(*fields, flat=not fields[1:]))


def test_an_exchange_is_defined_with_its_destinations(admin: Admin):
    page = add(admin, source_queue=" orders ", **{"destinations-0-selector": "msg.tries > 1"})
    assert "was added successfully" in page.messages[0]
    exchange = Exchange.objects.get()
    assert (exchange.name, exchange.source_queue, exchange.is_running) == ("x1", " orders ", True)
    assert stored("queue", "selector") == [("eu", "msg.tries > 1")]
    assert "'queue': 'eu', 'selector': 'msg.tries > 1'" in LogEntry.objects.get().change_message


REFUSED = {
    ("name", "a*"): "ends in *: this is a pattern, not a name.",
    ("name", "n" * 91): "Ensure this value has at most 90 characters (it has 91).",
    ("source_queue", "a*"): "ends in *: this is a pattern, not a name.",
    ("source_namespace", "nowhere"): "Unknown namespace 'nowhere'",
    ("parallel", "17"): "It is 17, but must be 1 to 16.",
    ("wsize", "4097"): "It is 4,097, but must be 1 to 4,096.",
    ("destinations-0-namespace", "nowhere"): "Unknown namespace 'nowhere'",
    ("destinations-0-queue", "a*"): "ends in *: this is a pattern, not a name.",
    ("destinations-0-selector", "msg.headers["): "line 1",
    ("destinations-0-selector", "[1].map(x, x)"): "map",
    ("destinations-0-selector", "@nobody"): "nobody",
    ("destinations-0-queue", ""): "An exchange must have 1 to 1,000 destinations",
}


def test_invalid_values_are_refused_at_their_field_and_nothing_is_made(admin: Admin):
    answers = {case: add(admin, **{case[0]: case[1]}) for case in REFUSED}
    assert [c for c, page in answers.items() if REFUSED[c] not in " ".join(page.errors)] == []
    html = answers["destinations-0-selector", "msg.headers["].html
    before, after = html.index('class="errorlist"'), html.index('name="destinations-0-selector"')
    assert before < after
    assert "</tr>" not in html[before:after]
    page = add(admin, source_queue="a*", parallel="0", **{"destinations-0-queue": "b*"})
    assert len(page.errors) == 3, "each fault once"
    assert not Exchange.objects.exists()
    assert not Destination.objects.exists()


@pytest.fixture
def sorting(admin: Admin) -> Exchange:
    return new("x1", "orders", "eu", "slow", "audit")


def test_destinations_are_moved_changed_added_and_removed(admin: Admin, sorting: Exchange):
    path, before = page_of(sorting), sorting.changed_at
    admin.send(admin.open(path), "Save", **{"destinations-2-order": "1"})
    assert stored("queue") == ["audit", "eu", "slow"]
    admin.send(admin.open(path), "Save", **{"destinations-0-order": "3"})
    assert stored("queue") == ["eu", "slow", "audit"]
    sorting.refresh_from_db()
    assert sorting.changed_at > before, "running loops see that a destination changed"
    change = {"destinations-0-DELETE": "on", "destinations-3-queue": "new"}
    admin.send(admin.open(path), "Save", **change)
    assert stored("position", "queue") == [(0, "slow"), (1, "audit"), (2, "new")]
    change = {f"destinations-{number}-DELETE": "on" for number in range(3)}
    page = admin.send(admin.open(path), "Save", **change)
    assert any("An exchange must have 1 to 1,000 destinations" in error for error in page.errors)
    assert len(stored("queue")) == 3
    # A change by another user is not overwritten.
    page = admin.open(path)
    admin.send(admin.open(path), "Save", parallel="2")
    answer = admin.send(page, "Save", wsize="7")
    assert any("Somebody else changed this exchange" in error for error in answer.errors)
    sorting.refresh_from_db()
    assert (sorting.parallel, sorting.wsize) == (2, 100)


def test_exchanges_are_stopped_started_and_deleted(admin: Admin, sorting: Exchange):
    page = admin.act(EXCHANGES, "stop_selected", sorting.pk)
    assert page.messages == ["Stopped: x1."]
    sorting.refresh_from_db()
    assert not sorting.is_running
    page = admin.act(EXCHANGES, "stop_selected", sorting.pk)
    assert page.messages == ["Stopped already: x1."]
    page = admin.act(EXCHANGES, "start_selected", sorting.pk)
    assert page.messages == ["Started: x1."]
    state = {"missing_rules": ["default: INSERT"], "failing_since": "2026-11-27T12:03:05Z"}
    count(sorting, (Outcome.OK, -1, 1), **state)
    page = admin.open(page_of(sorting))
    assert "It is blocked: missing rule in default: INSERT" in page.text
    assert "It has had errors or lacked rules since 2026-11-27 12:03:05 UTC" in page.text
    page = admin.send(page, "Stop")
    assert page.url.endswith(page_of(sorting)), "the button leads back"
    assert "It is stopped: elements wait in orders ." in page.text
    page = admin.send(admin.open(page_of(sorting, "delete")), SURE)
    assert "was deleted successfully" in page.messages[0]
    assert not Exchange.objects.exists()
    assert not ExchangeCount.objects.exists()
    texts = history()
    assert texts[:3] == ["Stopped.", "Started.", "Stopped."]
    assert "'queue': 'orders'" in texts[3]


def test_missing_rules_are_named_and_added_by_the_button(admin: Admin, sorting: Exchange):
    changer = admin.staff("view_exchange", "change_exchange", "view_destination")
    page = changer.open(page_of(sorting))
    assert "these rules are missing" in page.text
    assert "Add the rules of this database" not in page.buttons, "it takes the permission"
    page, role = admin.open(page_of(sorting)), Server.owner
    assert f"VALUES ('{role}', 'exchange.x1', 'Queue', 'orders', 'R', 60);" in page.text
    page = admin.send(page, "Add the rules of this database")
    assert page.messages == ["Added: 4 rules."]
    assert "exchange.x1 has all the rules that it needs." in page.text
    rules = Auth.objects.filter(role=role, ident="exchange.x1", type="Queue")
    expected = {"audit": "W", "eu": "W", "orders": "R", "slow": "W"}
    assert dict(rules.values_list("dest", "mode")) == expected
    assert Auth.objects.count() == 4
    assert LogEntry.objects.filter(change_message__startswith="Rule added: INSERT").count() == 4


def test_the_list_and_the_page_sum_the_counts_of_all_workers(admin: Admin, sorting: Exchange):
    assert "python manage.py psqlmessages exchange run" in admin.open(page_of(sorting)).text
    buckets = [0, 0, 0, 50, 50, *[0] * 8]
    rows = ((Outcome.OK, -1, 100), (Outcome.NO_ROUTE, -1, 3), (Outcome.TO, 1, 70))
    rows = (*rows, (Outcome.BAD_SELECTOR, 1, 4))
    count(sorting, *rows, seconds=1, buckets=buckets, selector_seconds=0.1)
    assert " 1 200 6 0 0 " in admin.open(EXCHANGES).text
    text = admin.open(page_of(sorting)).text
    assert "1 process runs it." in text
    assert "routed 200 10 ms 10 ms 19 ms" in text
    assert "default/slow 140 8" in text
    assert "971 µs" in text
    new("x2", "a", "eu", "slow")
    texts = {number: admin.open(f"{EXCHANGES}?o={number}").text for number in range(1, 10)}
    assert texts[2].index("x2") < texts[2].index("x1 "), "sorted by the source"


def tried(admin: Admin, exchange: Exchange, **values: Any) -> Page:
    return admin.send(admin.open(page_of(exchange, "dry-run")), "Run", **values)


NO_ELEMENTS = (
    ({"headers": "[]"}, "Headers must be a JSON object."), ({"headers": "{"}, "It is not JSON"),
    ({"headers": '{"a": 1, "a": 2}'}, "twice"), ({"body": "{", "is_json": "on"}, "It is not JSON"),
    ({"tries": "-1"}, "greater than or equal to 0"),
    ({"body": "x" * 100_001}, "at most 100000 characters"),
)  # fmt: skip


def test_each_destination_says_yes_or_no_and_why_and_shows_the_copy(admin: Admin):
    by_country = 'eu msg.headers["country"].matches("^(it|de|fr)$")'
    slow = 'slow {"delay": 30, "headers": {"lane": "slow"}}'
    choosing = new("x1", "orders", by_country, slow, "audit")
    for values, sentence in NO_ELEMENTS:
        page = tried(admin, choosing, **values)
        assert any(sentence in error for error in page.errors), (values, page.errors)
        assert "default/eu" not in page.text
    page = tried(admin, choosing, headers='{"country": "it"}', body="an order")
    assert "default/eu yes true" in page.text
    assert "delay: 30 s" in page.text
    assert '"lane": "slow"' in page.text
    assert '"x-hop-count": 1' in page.text
    # A changed header is seen by later destinations.
    assert page.html.count("&quot;lane&quot;") == 2
    assert page.text.count("an order") == 4
    failed = tried(admin, choosing).text
    assert "country" in failed.split("default/eu no", 1)[1][:80], "why it failed"
    text = tried(admin, choosing, headers='{"x-hop-count": 17}').text
    assert "The element exceeds the hop limit: it would go to default/__too_many_hops__" in text
    assert "default/eu" not in text, "no selector was asked"
    unrouted = new("x2", "orders", "big msg.body.amount > 10", no_route_action="discard")
    text = tried(admin, unrouted, body='{"amount": 11}', is_json="on").text
    assert "default/big yes" in text
    assert "default/big no" in tried(admin, unrouted, body='{"amount": 11}').text
    text = tried(admin, unrouted, body='{"amount": 9}', is_json="on").text
    assert "No selector accepts the element: it would be discarded." in text
    Destination.objects.filter(queue="eu").update(selector="@gone")
    assert any("x1.dst[0].selector" in error for error in tried(admin, choosing).errors)
    assert not Element.objects.exists(), "nothing is pushed"
    assert not Queue.objects.exists()
    path = page_of(choosing, "dry-run")
    assert admin.staff("view_queue").client.get(path).status_code == 403
    assert "Dry run" in admin.staff("view_exchange").open(path).html
    assert admin.client.get(f"{EXCHANGES}999/dry-run/").status_code == 404


class Styled(ModelAdmin):
    class Media:
        css: ClassVar = {"all": ["own.css"]}
        js = (Script("own.js", type="module"),)


class AdminOfProject(ExchangeAdmin, Styled):
    """A project's own admin, which may have prepopulated fields."""


def test_only_a_projects_subclass_loads_its_own_files_and_all_scripts_of_django():
    files = "own.css", "own.js", "urlify.js", "prepopulate.js", "xregexp.min.js"
    for admin, loaded in (ExchangeAdmin, ()), (AdminOfProject, files):
        media = str(admin(Exchange, site).media)
        assert [name for name in files if f"/{name}" in media] == [*loaded]
