"""The queue pages of the monitor: the list, a queue with its elements, and actions on them."""

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.models import Exchange, Queue
from psqlmessages.models.names import list_names
from psqlmessages.monitor import listing
from psqlmessages.monitor.names import object_url
from tests.sql.conftest import World
from tests.web.measured import count
from tests.web.pages import logged_in, rule_fields

ROLE = Server.owner
LIST, ORDERS = "/monitor/queues/", "/monitor/queues/orders/"
NEEDED = dict.fromkeys(("pause", "resume"), "change_queue") | {"push": "send_test_messages"}
NEEDED |= dict.fromkeys(("drain", "delete"), "delete_element") | {"move": "change_element"}
ODD = "a//b \N{RIGHT-TO-LEFT OVERRIDE}<b>"


@pytest.fixture
def queues(database: World, settings: Settings, monkeypatch) -> World:
    """Queue `orders` with four elements, one of them scheduled; a dead letter; an odd name."""
    settings.PSQLMESSAGES = {"NODE": "example"}
    monkeypatch.setattr(listing, "_SHARED_SECONDS", 0.0)
    database.rules(f"{ROLE} example Queue * A 60", "user1 worker.* Queue orders R 60")
    push = "SELECT messages.push('example', %s, %s, headers => %s, delay => %s)"
    elements = (("one", "{}", 0), ("two", '{"country": "it"}', 0), ("three", "{}", 0))
    for body, headers, delay in (*elements, ("late", "{}", 3600)):
        database.owner.query(push, "orders", body, headers, delay)
    database.owner.query(push, ODD, "x", "{}", 0)
    dead = '{"x-dl-from-queue": "orders", "x-dl-tries": 3}'
    database.owner.query(push, "__deadletter__", "failed", dead, 0)
    return database


def operator(*permissions: str) -> Client:
    return logged_in("view_monitor", "view_element", *{*NEEDED.values()}, *permissions)


def names(client: Client, query: str) -> list[str]:
    text = client.get(f"{LIST}{query}&fragment=queues").text
    return [
        unescape(name) for name in re.findall(r'<th scope="row"><a[^>]*><bdi>(.*?)</bdi>', text)
    ]


def key_of(queue: str, position: int = 0) -> int:
    return list(Queue.objects.get(name=queue).elements.order_by("id"))[position].pk


@pytest.mark.usefixtures("queues")
def test_the_list_is_filtered_sorted_and_paged_by_its_url(monkeypatch):
    client = logged_in("view_monitor")
    everything = [ODD, "__deadletter__", "orders"]
    cases = {
        "?q=": ["orders", "__deadletter__", ODD], "?q=ORD": ["orders"], "?q=none": [],
        "?sort=name": sorted(everything), "?sort=-name": sorted(everything, reverse=True),
        "?state=dead": ["__deadletter__"], "?state=empty": [], "?state=paused": [],
        "?state=unread&q=o": ["orders"], "?q=&page=2": [],
    }  # fmt: skip
    shown = {query: names(client, query) for query in cases}
    assert shown | {"?q=": sorted(shown["?q="])} == cases | {"?q=": sorted(everything)}
    assert shown["?q="][0] == "orders"
    exchange = Exchange.objects.create(
        name="X", source_queue="orders", source_namespace="elsewhere"
    )
    count(exchange, ("ok", -1, 1))
    assert names(client, "?state=unread&q=o") == ["orders"]
    Exchange.objects.update(source_namespace="default")
    assert names(client, "?state=unread&q=o") == []
    assert "exchange X" in client.get(LIST).text
    wrong = (
        "?sort=size", "?x=1", "?q=a&q=b", "?fragment=x", "?state=x", "?page=0", "?page=x",
        "?page=0000000019999999", f"?page=000000001{'0' * 5000}", "?page=10001",
    )  # fmt: skip
    assert {client.get(f"{LIST}{query}").status_code for query in wrong} == {400}
    for module in "queues", "listing":
        monkeypatch.setattr(f"psqlmessages.monitor.{module}.PAGE_SIZE", 2)
    assert names(client, "?sort=name&page=2") == sorted(everything)[2:]
    for name in everything:
        page = client.get(object_url("queue", name))
        assert page.status_code == 200
        assert "<b>" not in page.text
    assert client.get(f"{LIST}none/").status_code == 404
    assert re.search("Total size on disk: [1-9]", client.get(LIST).text)
    assert Client().get(f"{LIST}?fragment=queues").status_code == 401


@pytest.mark.usefixtures("queues")
def test_elements_are_shown_and_found_with_the_permission():
    blind = logged_in("view_monitor", *{*NEEDED.values()})
    assert "permission <code>psqlmessages.view_element" in blind.get(ORDERS).text
    assert blind.post(ORDERS, {"action": "move", "all": "1", "search": "one"}).status_code == 403
    some, everything = operator(), operator("view_bodies")
    for search, found in {"one": 1, "ITALY": 0, "it": 1, "": 4, str(key_of("orders")): 1}.items():
        text = everything.get(ORDERS, {"search": search}).text
        assert text.count('name="element"') == found, search
    assert everything.get(ORDERS, {"page": f"000000001{'0' * 5000}"}).status_code == 400
    assert "one</pre>" not in some.get(ORDERS).text
    assert 'name="element"' not in some.get(ORDERS, {"search": "one"}).text
    for client, status in (some, 400), (everything, 200):
        given = {"action": "delete", "all": "1", "search": "one", "may_see_bodies": "yes"}
        assert client.post(ORDERS, given).status_code == status


def test_long_lists_of_names_are_cut(queues: World):
    texts = ["", "a", "a, b", "a, b and more", "a, b and 2 more"]
    assert [list_names("abcd"[:length], 2) for length in range(5)] == texts
    queues.rules(*(f"user1 a{number:02} Queue orders R 60" for number in range(15)))
    assert "a09 and more</bdi>" in operator().get(ORDERS).text


def test_the_rule_that_a_call_lacked_is_added(queues: World):
    queues.execute("DELETE FROM messages.auth WHERE ident = 'example'")
    assert "permission <code>psqlmessages.add_auth" in operator().get(ORDERS).text
    client, given = operator("add_auth"), {"action": "move", "element": key_of("orders")}
    assert rule_fields(client.get(ORDERS), "orders")["mode"] == "R"
    given |= {"to_queue": "NEW", "confirmed": "1"}
    for name, mode in ("orders", "A"), ("NEW", "W"):
        fields = rule_fields(client.post(ORDERS, given), name)
        assert (fields["mode"], fields["back"]) == (mode, ORDERS)
        added = client.post("/monitor/rule/", {**fields, "confirmed": "1"})
        assert added.headers["Location"] == ORDERS
    assert client.post(ORDERS, given).status_code == 302
    log = LogEntry.objects.filter(content_type__model="auth")
    assert [entry.is_addition() for entry in log] == [True, True]


# The action, its fields, what the confirmation says, what is said afterwards, elements in `orders`.
ACTIONS: tuple[tuple[str, dict[str, Any], str, str, int], ...] = (
    ("pause", {}, "3 available, 1 scheduled and 0 reserved", "Paused.", 4),
    ("resume", {}, "worker.*", "The queue was not paused.", 4),
    ("drain", {}, "3 available, 1 scheduled", "Drained: 3 elements removed.", 1),
    ("push", {"body": "1", "format": "json", "delay": "5"}, "1 byte will", "Pushed a test", 5),
    ("delete", {"element": 0}, "1 element of", "Deleted: 1 element.", 3),
    ("move", {"all": "1", "to_queue": "NEW"}, "It will be created", "Moved to NEW: 4 elements.", 0),
    ("delete", {"all": "1", "search": "country"}, "1 element of", "Deleted: 1 element.", 3),
)
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("push", {"body": "{", "format": "json"}, "The body is not JSON"),
    ("push", {"body": '"\\ud800"', "format": "json"}, "The body: "),
    ("push", {"body": "x", "headers": "{"}, "The header text is not JSON"),
    ("push", {"body": "x", "headers": "[]"}, "The headers are not a JSON object."),
    ("push", {"body": "x", "delay": "-1"}, "The delay is not a number of seconds"),
    ("delete", {}, "No element was chosen."),
    ("delete", {"ids": "1,x"}, "The chosen elements are not valid."),
    ("move", {"element": 0}, "Name the queue"),
    ("move", {"element": 0, "to_queue": "orders"}, "Name another queue"),
    ("redrive", {"element": 0}, "None of the chosen elements is a dead letter"),
)


@pytest.mark.parametrize("case", ACTIONS, ids=lambda case: f"{case[0]} {case[1]}")
@pytest.mark.usefixtures("queues")
def test_an_action_says_what_it_affects_and_is_logged(case: Any):
    action, fields, question, text, left = case
    given = {name: key_of("orders") if name == "element" else fields[name] for name in fields}
    own, orders = NEEDED[action], Queue.objects.get(name="orders")
    client = logged_in("view_monitor", "view_element", own)
    others = logged_in("view_monitor", "view_element", *{*NEEDED.values()} - {own})
    refused = others.post(ORDERS, {"action": action, "confirmed": "1"})
    assert (refused.status_code, f"psqlmessages.{own}<" in refused.text) == (403, True)
    shown = [f'value="{action}"' in each.get(ORDERS).text for each in (client, others)]
    assert shown == [action != "resume", False]
    asked = client.post(ORDERS, {"action": action, **given})
    assert question in re.sub("[\u2068\u2069]", "", asked.text)
    assert (orders.elements.count(), LogEntry.objects.count()) == (4, 0)
    hidden = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', asked.text)
    done = client.post(ORDERS, {**{n: unescape(v) for n, v in hidden}, "confirmed": "1"})
    assert (done.status_code, done.headers["Location"]) == (302, ORDERS)
    assert orders.elements.count() == left
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.object_id) == ("orders", str(orders.pk))
    assert entry.change_message.startswith(text)
    assert entry.change_message in client.get(ORDERS).text


def test_a_wrong_action_changes_nothing_and_says_why(queues: World):
    client, said = operator(), {}
    for action, fields, text in REFUSED:
        given = {name: key_of("orders") if name == "element" else fields[name] for name in fields}
        for more in {}, {"confirmed": "1"}:
            answer = client.post(ORDERS, {"action": action, **given, **more})
            shown = re.sub("[\u2068\u2069]", "", answer.text)
            said[action, text] = answer.status_code, text in shown
    assert set(said.values()) == {(400, True)}, said
    assert client.post(ORDERS, {"action": "x"}).status_code == 400
    queues.execute("UPDATE messages.auth SET mode = 'R' WHERE ident = 'example'")
    for action, fields, *_ in ACTIONS:
        given = {name: key_of("orders") if name == "element" else fields[name] for name in fields}
        answer = client.post(ORDERS, {"action": action, **given, "confirmed": "1"})
        said[action, ""] = (answer.status_code, "and node example in messages.auth" in answer.text)
    assert set(said.values()) == {(400, True)}, said
    assert not LogEntry.objects.exists()
    assert Queue.objects.get(name="orders").elements.count() == 4


def test_dead_letters_go_back_to_their_queue_or_to_a_chosen_one(queues: World):
    client, address = operator(), object_url("queue", "__deadletter__")
    assert "failed 3 times in" in client.get(address).text
    other = logged_in("view_monitor", "view_element", "delete_element")
    assert ["redrive" in each.get(address).text for each in (client, other)] == [True, False]
    assert other.post(address, {"action": "redrive", "ids": "1"}).status_code == 403
    key = key_of("__deadletter__")
    given = {"action": "redrive", "ids": str(key), "confirmed": "1"}
    asked = client.post(address, {"action": "redrive", "ids": f"{key},1"})
    assert "1 element will stay: it is not a dead letter of a known queue." in asked.text
    client.post(address, given)
    assert Queue.objects.get(name="orders").elements.get(pk=key).headers == {}
    move = "SELECT messages.move_elements('example', 'orders', '__deadletter__', %s)"
    queues.owner.query(move, [key])
    client.post(address, {**given, "to_queue": "REPAIRED"})
    assert Queue.objects.get(name="REPAIRED").elements.count() == 1
    texts = ["Redriven to REPAIRED: 1 element.", "Redriven to orders: 1 element."]
    assert sorted(LogEntry.objects.values_list("change_message", flat=True)) == texts
