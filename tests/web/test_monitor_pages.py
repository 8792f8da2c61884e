"""The monitor's pages as Django serves them: who sees them, what they hold, what they may run."""

import asyncio
import gzip
import operator
import re
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.contrib.admin.models import LogEntry
from django.contrib.staticfiles import finders
from django.http import HttpResponse
from django.test import Client
from django.test.utils import override_script_prefix
from django.utils import timezone, translation
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.models import Auth, Element, Queue, StreamMessage
from psqlmessages.monitor import graph, json_views, queries
from psqlmessages.monitor.json_views import SharedText
from psqlmessages.monitor.names import object_url
from tests.sql.conftest import World
from tests.web.measured import count
from tests.web.pages import LISTS, Admin, Page, logged_in, rule_fields
from tests.web.test_admin_exchanges import new

LIST, RULE, GZIP = "/monitor/topics/", "/monitor/rule/", {"Accept-Encoding": "gzip"}
TOPIC = "/monitor/topics/T/"
PAGES = (
    LIST, TOPIC, "/monitor/topics/?name=T", "/monitor/exchanges/", "/monitor/traffic/",
    "/monitor/traffic/topic/?name=T", "/monitor/streams/", "/monitor/nodes/",
)  # fmt: skip
GRAPH = "/monitor/exchanges/figures/"
FIGURES = (GRAPH, "/monitor/traffic/figures/", "/monitor/history/?topic=T")
HOSTILE = "<script>alert(1)</script>\"'&"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
    " base-uri 'none'"
)


@pytest.fixture(autouse=True)
def node(database: World, settings: Settings) -> None:
    settings.PSQLMESSAGES = {"NODE": "example"}


def tags(response: HttpResponse) -> list[tuple[str, dict[str, str]]]:
    return Page("", response).tags


def test_pages_and_figures_need_the_permission(client: Client):
    for address in PAGES:
        response = client.get(address)
        assert response.status_code == 302, address
        assert response.url.startswith("/admin/login/?next=/monitor/")
    for address in FIGURES:
        assert client.get(address).status_code == 401, address
    others = ("view_bodies", "view_exchange", "view_traffic")
    for is_staff, permissions in ((True, ()), (False, ("view_monitor",)), (True, others)):
        refused = logged_in(*permissions, is_staff=is_staff)
        for address in PAGES + FIGURES:
            response = refused.get(address)
            assert response.status_code == 403, address
            said = response.json()["error"] if address in FIGURES else response.text
            assert "psqlmessages.view_monitor" in said
            assert "data-socket" not in said
    allowed = logged_in("view_monitor")
    for address in PAGES + FIGURES:
        response = allowed.get(address)
        assert response.status_code == 200, address
        assert "no-store" in response.headers["Cache-Control"]
    assert 'data-socket="/ws/monitor/"' in allowed.get(LIST).text
    assert "needs JavaScript" in allowed.get(LIST).text
    with override_script_prefix("/app/"):
        assert 'data-socket="/app/ws/monitor/"' in allowed.get(LIST).text


def test_links_into_the_admin_need_its_permissions():
    nobody = logged_in("view_monitor")
    links = {
        TOPIC: ("auth/?q=T", "topic/?q=T", "auth/0/change/"),
        "/monitor/exchanges/": ("exchange/0/change/", "queue/0/change/"),
        "/monitor/traffic/": ("pipelinejob/",),
    }
    views = ("auth", "topic", "exchange", "queue", "pipelinejob")
    everybody = logged_in("view_monitor", *(f"view_{name}" for name in views))
    for address, expected in links.items():
        assert "/admin/psqlmessages/" not in nobody.get(address).text
        page = everybody.get(address).text
        missing = [link for link in expected if f'"/admin/psqlmessages/{link}"' not in page]
        assert missing == [], address


def test_pages_run_nothing_of_others(settings: Settings):
    client = logged_in("view_monitor")
    for address in PAGES:
        response = client.get(address)
        assert response.headers["Content-Security-Policy"] == POLICY
        for tag, attributes in tags(response):
            assert tag != "style"
            assert not [name for name in attributes if name == "style" or name.startswith("on")]
            assert tag != "script" or attributes["src"].startswith("/")
    settings.STATIC_URL = "https://files.example/s/"
    policy = client.get(LIST).headers["Content-Security-Policy"]
    assert "script-src 'self' https://files.example;" in policy
    assert "connect-src 'self';" in policy


def test_a_topic_of_any_name_has_its_page_and_no_other():
    client = logged_in("view_monitor")
    names = ["a/b", "a//b", "..", ".", "a/../b", "ä ö?#%", "two\nlines", "-", "/"]
    names += [HOSTILE, "x" * 100]
    shown = []
    for name in names:
        page = client.get(object_url("topic", name))
        shown += [tag["data-name"] for _, tag in tags(page) if "data-name" in tag]
        assert "<script>alert" not in page.text
    assert shown == names
    for query in ("name=", "name=" + "x" * 101, "name=a%00b", "name=A*"):
        assert client.get(f"/monitor/topics/?{query}").status_code == 404, query
    assert object_url("topic", "DEMO.PRICES") == "/monitor/topics/DEMO.PRICES/"
    assert object_url("topic", "a/b c") == f"/monitor/topics/{quote('a/b c')}/"


def test_a_page_loads_at_most_150_kb_and_only_from_our_own_files(admin: Admin):
    admin.world.rules("user1 N Topic T RW 60", "user1 N Queue Q RW 60")
    # The list of rules has 50 rows.
    admin.world.rules(*(f"user1 a.worker.of.the.shop.{n} Topic T RW 60" for n in range(60)))
    node = admin.world.program("user1")
    node.ok("push", "N", "Q", "x")
    node.got("N", "T")
    names = "", "queues/", "queues/Q/", "streams/T/", "nodes/N/", "stored/?topic=T"
    exchange = new("x", "orders", *(f"queue.of.the.shop.{n} msg.body.eu == {n}" for n in range(40)))
    of_admin = *LISTS, f"/admin/psqlmessages/exchange/{exchange.pk}/change/"
    for address in (*PAGES, *(f"/monitor/{name}" for name in names), *of_admin):
        response = admin.client.get(address)
        assert response.status_code == 200, address
        # Uncompressed, but pages of the admin need large scripts of Django.
        limit, compressed = (120_000, gzip.compress) if address in of_admin else (150_000, bytes)
        linked = [named for tag, named in tags(response) if tag in ("script", "link", "img")]
        waiting = [name for named in linked if (name := named.get("src") or named.get("href"))]
        sizes = {address: len(admin.client.get(address, headers=GZIP).content)}
        for name in waiting:
            assert re.match("/[^/]", name), (address, name)
            if name.startswith("/static/"):
                content = Path(str(finders.find(name.removeprefix("/static/")))).read_bytes()
                sizes[name] = len(compressed(content))
                imports = re.findall(r'^(?:import|}).* "(\S+)";$', content.decode(), re.MULTILINE)
                waiting += {urljoin(name, module) for module in imports} - {*waiting}
            else:
                file = admin.client.get(name)
                assert file.status_code == 200, (address, name)
                sizes[name] = len(file.content)
        assert sum(sizes.values()) < limit, (address, sizes)


def test_a_suggested_rule_is_added_once_by_its_user_and_site_only():
    for permissions in (("view_monitor",), ("add_auth",), ()):
        assert logged_in(*permissions).post(RULE).status_code == 403
    client = logged_in("view_monitor", "add_auth", enforce_csrf_checks=True)
    assert client.get(RULE).status_code == 405, "a link adds none"
    assert client.post(RULE).status_code == 403
    assert not Auth.objects.exists()
    client.handler.enforce_csrf_checks = False
    given = {**rule_fields(client.get(LIST), "*"), "role": Server.owner}
    assert "example.monitor.* (psqlmessages): O" in client.post(RULE, given).text
    assert not Auth.objects.exists(), "it asks first"
    given["confirmed"] = "1"
    assert client.post(RULE, {**given, "back": "//evil"}).headers["Location"] == "/monitor/"
    answer = client.post(RULE, given)
    assert (answer.status_code, "already have a rule" in answer.text) == (400, True)
    (rule,) = Auth.objects.values_list("role", "ident", "type", "dest", "mode")
    assert rule == (Server.owner, "example.monitor.*", "Topic", "*", "O")
    (entry,) = LogEntry.objects.all()
    assert entry.is_addition()


def test_a_test_message_needs_the_permission_a_rule_and_a_valid_body():
    send, post = "/monitor/send/?topic=T", {"body": "{", "format": "text", "as": "stored"}
    assert logged_in("view_monitor").post(send, post).status_code == 403
    assert "monitor/send" not in logged_in("view_monitor").get(TOPIC).text
    client = logged_in("view_monitor", "send_test_messages")
    assert f'action="{send}"' in client.get(TOPIC).text
    assert client.get(send).status_code == 405
    assert client.post("/monitor/send/", post).status_code == 404
    cases = {
        "json": ("not JSON", {**post, "format": "json"}),
        "NUL": ("NUL character", {**post, "body": "a\0"}),
        "rule": ("INSERT INTO messages.auth", {**post, "confirmed": "1"}),
    }
    for case, (text, fields) in cases.items():
        response = client.post(send, fields)
        assert (response.status_code, text in response.text) == (400, True), case
    rule = {"ident": "example", "type": "Topic", "dest": "T", "mode": "W", "timeout": 60}
    Auth.objects.create(role=Server.owner, **rule)
    assert "1 byte will be sent" in client.post(send, post).text
    assert not LogEntry.objects.exists(), "it asks first"
    assert client.post(send, {**post, "confirmed": "1"}).status_code == 302
    assert LogEntry.objects.get().change_message.startswith("Published a test message")


def test_stored_messages_are_found_by_time_and_text(database: World, monkeypatch):
    database.rules("user1 S Topic T W 60", "user2 L Topic T R 60")
    database.program("user2").got("L", "T")
    sender = database.program("user1")
    for text in "one", "two", "three":
        sender.ok("publish", "S", "T", f"<b>{text}")
    middle = StreamMessage.objects.order_by("id").values_list("published_at", flat=True)[1]
    everything, some = logged_in("view_monitor", "view_bodies"), logged_in("view_monitor")

    def shown(query: str = "", client: Client = everything) -> list[str]:
        response = client.get(f"/monitor/stored/?topic=T{query}")
        assert response.status_code == 200, query
        return re.findall(r"<pre>(?:&lt;b&gt;)?(.*?)</pre>", response.text)

    cases = {
        "": ["one", "two", "three"], "&search=T": ["two", "three"], "&search=nobody": [],
        f"&time={quote(middle.isoformat())}": ["two", "three"], "&after=0": ["one", "two", "three"],
        "&time=2100-01-01T00:00": [], "&search=s": ["one", "two", "three"],
    }  # fmt: skip
    assert {query: shown(query) for query in cases} == cases
    assert shown(client=some) == []
    monkeypatch.setattr("psqlmessages.monitor.stored_messages.PAGE_SIZE", 2)
    assert shown() == ["two", "three"]
    page = everything.get("/monitor/stored/?topic=T").text
    ((earlier,),) = [re.findall(r'rel="prev" href="\?topic=T(.*?)"', page)]
    assert shown(unescape(earlier)) == ["one", "two"]
    paths = [f"&search={path}" for path in ("$.", "$..id", "$.id>1", "$.x ? (1 == 1)", "x" * 201)]
    for query in ("&x=1", "&after=x", f"&after={'1' * 5000}", "&time=x", *paths):
        assert everything.get(f"/monitor/stored/?topic=T{query}").status_code == 400, query
    assert everything.get("/monitor/stored/?topic=NONE").status_code == 404
    for text in '{"id": 42, "of": [{"x": "1"}, null]}', '{"id": "\\u0000"}', "{", '[{"id": "42"}]':
        sender.ok("publish", "S", "T", text)
    numbers = {
        "$.id": 2, "$.id=42": 2, '$.id == "42"': 1, "$.id=4": 0, "$.of.x=1": 1, "$.of[1]": 1,
        "$.of[1].x": 0, "$.of = null": 1, "$.id = $value": 0,
        '$.id = "\\u0000"': 0, "$.id=1e200000": 0,
    }  # fmt: skip
    assert {path: len(shown(f"&search={quote(path)}")) for path in numbers} == numbers
    for text in "two", "$.id":
        assert "No message matches" in some.get(f"/monitor/stored/?topic=T&search={text}").text
    assert "Not a JSON path: $.." in everything.get("/monitor/stored/?topic=T&search=$..id").text


@pytest.fixture
def database(database: World, monkeypatch) -> World:
    """The database, which may be slow."""
    monkeypatch.setattr(graph, "_TIMEOUT_SECONDS", 60)
    return database


def figures(client: Client) -> dict[str, Any]:
    response = client.get(GRAPH)
    assert response.status_code == 200
    return response.json()


def test_metrics_of_exchanges_and_queues_contain_counts_and_no_secret(database: World):
    database.rules("user1 W Queue * RW 60")
    worker = database.program("user1")
    worker.ok("push_many", "W", "orders", ["x", "y", "z"])
    worker.query("SELECT lease FROM messages.reserve('W', 'orders')")
    worker.ok("pause", "W", "orders")
    exchange = new("x1", "orders", "eu true", "orders")
    copies = (("to", 0, 5), ("no_route", -1, 1))
    later = timezone.now() + timedelta(minutes=2)
    failed = Element.objects.filter(pk=Element.objects.filter(lease=None).first().pk)
    failed.update(tries=1, mature_at=later, available_at=later)
    state = {"missing_rules": ["default: INSERT"], "failing_since": timezone.now()}
    count(exchange, ("ok", -1, 7), *copies, **state)
    answer = logged_in("view_monitor").get(GRAPH)
    assert Queue.objects.get(name="orders").channel not in answer.text
    assert "no-store" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    found = answer.json()
    (told,) = found["exchanges"]
    assert (told["id"], told["name"], told["source"]) == (exchange.pk, "x1", ["default", "orders"])
    assert (told["is_running"], told["workers"]) == (True, 1)
    assert told["missing_rules"] == ["default: INSERT"]
    assert told["failing_since"] == state["failing_since"].timestamp()
    assert told["counts"] == {"ok": 14, "no_route": 2}
    copies = [(each["to"][1], each["count"], each["is_in_cycle"]) for each in told["destinations"]]
    assert copies == [("eu", 10, False), ("orders", 0, True)]
    shown = operator.itemgetter("sizes", "is_paused", "failed", "next_try_at")
    queues = {queue["queue"]: shown(queue) for queue in found["queues"]}
    empty = ([0, 0, 0], False, 0, None)
    orders = ([1, 1, 1], True, 1, later.timestamp())
    assert queues == {"orders": orders, "eu": empty, "__no_route__": empty}


def test_exchanges_too_many_to_draw_are_left_out_and_that_is_said(monkeypatch):
    monkeypatch.setattr(graph, "MAX_EXCHANGES", 2)
    for name in ("a", "b", "c"):
        new(name, "orders", "eu")
    found = figures(logged_in("view_monitor"))
    assert [exchange["name"] for exchange in found["exchanges"]] == ["a", "b"]
    assert found["has_more"]


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The databases that were queried, in order."""
    found: list[str] = []
    run_queries = queries.run_queries

    async def counted(name: str, alias: str, *question: Any) -> Any:
        found.append(alias)
        return await run_queries(name, alias, *question)

    monkeypatch.setattr(queries, "run_queries", counted)
    return found


def test_a_hundred_viewers_cost_as_much_as_one(asked: list[str], monkeypatch):
    monkeypatch.setattr(json_views, "READ_INTERVAL_SECONDS", 3600.0)
    new("x1", "orders", "eu")

    @async_to_sync
    async def look() -> set[str | None]:
        shared = SharedText(graph.read_graph)
        first, second = (asyncio.create_task(shared.get()) for _ in range(2))
        # If one of the waiting viewers leaves, the query continues for the others.
        await asyncio.wait({first}, timeout=0)
        first.cancel()
        texts = await asyncio.gather(second, *(shared.get() for _ in range(100)))
        return {*texts, await shared.get()}

    (text,) = look()
    assert text is not None
    assert "x1" in text
    assert asked == ["default", "default"]


def test_an_unreadable_database_holds_up_nothing(asked: list[str], monkeypatch):
    new("x1", "orders", "eu", source_namespace="elsewhere")
    (source,) = [q for q in figures(logged_in("view_monitor"))["queues"] if q["queue"] == "orders"]
    assert (source["ns"], source["sizes"]) == ("elsewhere", None)
    monkeypatch.setattr(json_views, "READ_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(graph, "_SKIP_SECONDS", 3600.0)
    asked.clear()
    graph._skipped_until.clear()

    @async_to_sync
    async def look() -> None:
        shared = SharedText(graph.read_graph)
        for _ in range(5):
            await shared.get()

    look()
    assert asked.count("elsewhere") == 1, "it is left alone for a while"

    async def hanging(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(graph, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", hanging)
    viewer, health = logged_in("view_monitor"), "/healthz?full"
    assert viewer.get(GRAPH).status_code == 503
    # A translation that puts each text in brackets.
    monkeypatch.setattr(translation._trans, "gettext", "[{}]".format)
    others = (Client(), GRAPH, health, f"{LIST}?fragment=rows"), (logged_in(), GRAPH, health)
    for client, *addresses in ((viewer, GRAPH), *others):
        assert all("[" in client.get(address).text for address in addresses), addresses
