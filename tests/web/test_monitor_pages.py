"""The monitor's pages as Django serves them: who sees them, what they hold, what they may run."""

import gzip
from html.parser import HTMLParser
from urllib.parse import quote

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.models import Auth
from psqlmessages.monitor import charts
from psqlmessages.monitor.names import topic_url
from tests.sql.conftest import World
from tests.web.desks import lock_timeout, visitor

LIST, RULE = "/monitor/", "/monitor/rule/"
TOPIC = "/monitor/topics/T/"
PAGES = (
    LIST, TOPIC, "/monitor/topics/?name=T", "/monitor/exchanges/", "/monitor/traffic/",
    "/monitor/traffic/topic/?name=T",
)  # fmt: skip
FIGURES = ("/monitor/exchanges/figures/", "/monitor/traffic/figures/")
HOSTILE = "<script>alert(1)</script>\"'&"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
    " base-uri 'none'"
)


@pytest.fixture(autouse=True)
def node(database: World, settings: Settings) -> None:
    settings.PSQLMESSAGES = {"NODE": "example"}


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_pages_and_figures_are_for_who_has_the_permission(client: Client) -> None:
    for address in PAGES:
        response = client.get(address)
        assert response.status_code == 302, address
        assert response.url.startswith("/admin/login/?next=/monitor/")
    for address in FIGURES:
        assert client.get(address).status_code == 401, address
    others = ("view_bodies", "view_exchange", "view_traffic")
    for is_staff, permissions in ((True, ()), (False, ("view_monitor",)), (True, others)):
        refused = visitor(*permissions, is_staff=is_staff)
        for address in PAGES + FIGURES:
            response = refused.get(address)
            assert response.status_code == 403, address
            said = response.json()["error"] if address in FIGURES else response.text
            assert "psqlmessages.view_monitor" in said
            assert "data-socket" not in said
    allowed = visitor("view_monitor")
    for address in PAGES + FIGURES:
        response = allowed.get(address)
        assert response.status_code == 200, address
        assert "no-store" in response.headers["Cache-Control"]
    assert 'data-socket="/ws/monitor/"' in allowed.get(LIST).text
    assert "needs JavaScript" in allowed.get(LIST).text


def test_links_into_the_admin_are_for_who_may_follow_them() -> None:
    nobody = visitor("view_monitor")
    links = {
        TOPIC: ("auth/?q=T", "topic/?q=T", "auth/0/change/"),
        "/monitor/exchanges/": ("exchange/0/change/", "queue/0/change/"),
        "/monitor/traffic/": ("pipelinejob/",),
    }
    views = ("auth", "topic", "exchange", "queue", "pipelinejob")
    everybody = visitor("view_monitor", *(f"view_{name}" for name in views))
    for address, expected in links.items():
        assert "/admin/psqlmessages/" not in nobody.get(address).text
        page = everybody.get(address).text
        missing = [link for link in expected if f'"/admin/psqlmessages/{link}"' not in page]
        assert missing == [], address


def test_pages_run_nothing_of_others(settings: Settings) -> None:
    client = visitor("view_monitor")
    for address in PAGES:
        response = client.get(address)
        assert response.headers["Content-Security-Policy"] == POLICY
        for tag, attributes in Tags(response.text).found:
            assert tag != "style"
            assert not [name for name in attributes if name == "style" or name.startswith("on")]
            assert tag != "script" or (attributes["src"] or "").startswith("/")
    settings.STATIC_URL = "https://files.example/s/"
    policy = client.get(LIST).headers["Content-Security-Policy"]
    assert "script-src 'self' https://files.example;" in policy
    assert "connect-src 'self';" in policy


def test_a_topic_of_any_name_has_its_page_and_no_other() -> None:
    client = visitor("view_monitor")
    names = [
        HOSTILE,
        "a/b",
        "a//b",
        "..",
        ".",
        "a/../b",
        "ä ö?#%",
        "two\nlines",
        "-",
        "x" * 100,
        "/",
    ]
    shown = []
    for name in names:
        page = client.get(topic_url(name)).text
        (tag,) = [each for _, each in Tags(page).found if "data-name" in each]
        shown.append(tag["data-name"])
        assert "<script>alert" not in page
    assert shown == names
    for query in ("", "name=", "name=" + "x" * 101, "name=a%00b", "name=A*"):
        assert client.get(f"/monitor/topics/?{query}").status_code == 404, query
    assert topic_url("DEMO.PRICES") == "/monitor/topics/DEMO.PRICES/"
    assert topic_url("a/b c") == f"/monitor/topics/{quote('a/b c')}/"


# plotly


def test_plotly_is_served_compressed_once_and_for_ever(client: Client) -> None:
    address = reverse("psqlmessages:monitor_plotly", args=[charts.version()])
    response = client.get(address, headers={"Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"
    assert "immutable" in response.headers["Cache-Control"]
    assert len(response.content) < 2_000_000
    plain = client.get(address)
    assert gzip.decompress(response.content) == plain.content
    assert plain.headers["Content-Type"].startswith("text/javascript")
    assert response.headers["Vary"] == plain.headers["Vary"] == "Accept-Encoding"
    again = client.get(address, headers={"If-None-Match": plain.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/monitor/plotly-0.0.1.min.js").status_code == 404


def test_the_page_brings_the_styles_of_plotly_or_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = visitor("view_monitor")
    found = Tags(client.get(TOPIC).text).found
    ids = {attributes.get("id"): tag for tag, attributes in found}
    script = charts.script()
    assert script is not None
    assert ids["plotly.js-style-global"] == "link"
    assert [ids[each] for each in script.style_ids] == ["meta"]
    monkeypatch.setattr(charts, "script", lambda: None)
    page = client.get(TOPIC)
    assert page.status_code == 200
    assert "The chart needs plotly" in page.text
    assert "plotly-" not in page.text


# The rule


def test_the_missing_rule_is_added_once_by_a_button() -> None:
    client = visitor("view_monitor", "add_auth")
    for _ in range(2):
        response = client.post(RULE)
        assert (response.status_code, response.json()) == (200, {"error": ""})
    (rule,) = Auth.objects.values_list("role", "ident", "type", "dest", "mode")
    assert rule == (Server.owner, "example.monitor.*", "Topic", "*", "O")
    (entry,) = LogEntry.objects.all()
    assert entry.is_addition()
    Auth.objects.update(mode="R")
    response = client.post(RULE)
    assert (response.status_code, Auth.objects.get().mode) == (409, "R")
    assert "mode R" in response.json()["error"]


def test_the_rule_is_added_by_nobody_else_and_by_no_other_site() -> None:
    for permissions in (("view_monitor",), ("add_auth",), ()):
        assert visitor(*permissions).post(RULE).status_code == 403
    client = visitor("view_monitor", "add_auth", enforce_csrf_checks=True)
    assert client.get(RULE).status_code == 405, "a link adds none"
    assert client.post(RULE).status_code == 403
    assert not Auth.objects.exists()
    tags = Tags(client.get(LIST).text).found
    token = next(a["value"] for _, a in tags if a.get("name") == "csrfmiddlewaretoken")
    assert client.post(RULE, {"csrfmiddlewaretoken": token}).status_code == 200


def test_a_rule_that_cannot_be_added_says_why(database: World) -> None:
    blocker = database.program()
    blocker.connection.autocommit = False
    blocker.connection.execute("LOCK TABLE psqlmessages_auth IN ACCESS EXCLUSIVE MODE")
    client = visitor("view_monitor", "add_auth")
    with lock_timeout():
        response = client.post(RULE)
    blocker.connection.rollback()
    assert response.status_code == 503
    assert "lock timeout" in response.json()["error"]
