"""The monitor's pages as Django serves them: who sees them, what they hold, what they may run."""

import gzip
from html.parser import HTMLParser
from urllib.parse import quote

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.models import Auth
from psqlmessages.monitor import charts
from psqlmessages.monitor.names import topic_url
from tests.sql.conftest import World

pytestmark = pytest.mark.django_db

LIST, RULE = "/monitor/", "/monitor/rule/"
HOSTILE = "<script>alert(1)</script>\"'&"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
    " base-uri 'none'"
)


@pytest.fixture(autouse=True)
def node(settings: Settings) -> None:
    settings.PSQLMESSAGES = {"NODE": "example"}


def visitor(*permissions: str, is_staff: bool = True, **options: bool) -> Client:
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client(**options)
    client.force_login(user)
    return client


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


# Who


@pytest.mark.parametrize("address", [LIST, "/monitor/topics/T/"])
def test_who_is_not_logged_in_is_sent_to_log_in(client: Client, address: str) -> None:
    response = client.get(address)
    assert (response.status_code, response.url) == (302, f"/admin/login/?next={address}")


@pytest.mark.parametrize("address", [LIST, "/monitor/topics/T/"])
@pytest.mark.parametrize(
    ("is_staff", "permissions"), [(True, ()), (False, ("view_monitor",)), (True, ("view_bodies",))]
)
def test_who_may_not_is_told_which_permission_is_missing(
    address: str, is_staff: bool, permissions: tuple[str, ...]
) -> None:
    response = visitor(*permissions, is_staff=is_staff).get(address)
    assert response.status_code == 403
    assert "psqlmessages.view_monitor" in response.text
    assert "data-socket" not in response.text


def test_who_may_see_it_gets_the_page() -> None:
    response = visitor("view_monitor").get(LIST)
    assert response.status_code == 200
    assert 'data-socket="/ws/monitor/"' in response.text
    assert "no-store" in response.headers["Cache-Control"]
    assert "needs JavaScript" in response.text


def test_links_into_the_admin_are_for_who_may_follow_them() -> None:
    address = reverse("psqlmessages:monitor_topic", args=["T"])
    assert "/psqlmessages/auth/" not in visitor("view_monitor").get(address).text
    page = visitor("view_monitor", "view_auth", "view_topic").get(address).text
    assert "/admin/psqlmessages/auth/?q=T" in page
    assert "/admin/psqlmessages/topic/?q=T" in page
    assert 'data-rule-url="/admin/psqlmessages/auth/0/change/"' in page


# What


@pytest.mark.parametrize("address", [LIST, "/monitor/topics/T/", "/monitor/topics/?name=T"])
def test_pages_run_nothing_of_others(address: str) -> None:
    response = visitor("view_monitor").get(address)
    assert response.headers["Content-Security-Policy"] == POLICY
    for tag, attributes in Tags(response.text).found:
        assert tag != "style"
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        assert tag != "script" or attributes["src"].startswith("/")


def test_static_files_of_another_host_are_allowed_by_its_name(settings: Settings) -> None:
    settings.STATIC_URL = "https://files.example/s/"
    policy = visitor("view_monitor").get(LIST).headers["Content-Security-Policy"]
    assert "script-src 'self' https://files.example;" in policy
    assert "connect-src 'self';" in policy


@pytest.mark.parametrize(
    "name",
    [HOSTILE, "a/b", "a//b", "..", ".", "a/../b", "ä ö?#%", "two\nlines", "-", "x" * 100, "/"],
)
def test_a_topic_of_any_name_has_its_page(name: str) -> None:
    response = visitor("view_monitor").get(topic_url(name))
    assert response.status_code == 200
    (live,) = [
        attributes for _, attributes in Tags(response.text).found if "data-name" in attributes
    ]
    assert live["data-name"] == name
    assert "<script>alert" not in response.text


@pytest.mark.parametrize("query", ["", "name=", "name=" + "x" * 101, "name=a%00b", "name=A*"])
def test_what_is_no_topics_name_has_no_page(query: str) -> None:
    assert visitor("view_monitor").get(f"/monitor/topics/?{query}").status_code == 404


# plotly


def plotly_address() -> str:
    return reverse("psqlmessages:monitor_plotly", args=[charts.version()])


def test_plotly_is_served_compressed_and_for_ever(client: Client) -> None:
    response = client.get(plotly_address(), headers={"Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"
    assert "immutable" in response.headers["Cache-Control"]
    assert len(response.content) < 2_000_000
    plain = client.get(plotly_address())
    assert gzip.decompress(response.content) == plain.content
    assert plain.headers["Content-Type"].startswith("text/javascript")
    assert response.headers["Vary"] == plain.headers["Vary"] == "Accept-Encoding"


def test_plotly_is_not_sent_twice(client: Client) -> None:
    etag = client.get(plotly_address()).headers["ETag"]
    again = client.get(plotly_address(), headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")


def test_another_version_of_plotly_is_not_there(client: Client) -> None:
    assert client.get("/monitor/plotly-0.0.1.min.js").status_code == 404


def test_the_page_brings_the_styles_that_plotly_would_write() -> None:
    found = Tags(visitor("view_monitor").get("/monitor/topics/T/").text).found
    ids = {attributes.get("id"): tag for tag, attributes in found}
    assert ids["plotly.js-style-global"] == "link"
    assert [ids[each] for each in charts.script().style_ids] == ["meta"]


def test_without_plotly_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "script", lambda: None)
    page = visitor("view_monitor").get("/monitor/topics/T/")
    assert page.status_code == 200
    assert "The chart needs plotly" in page.text
    assert "plotly-" not in page.text


# The rule


def test_the_missing_rule_is_added_by_a_button() -> None:
    response = visitor("view_monitor", "add_auth").post(RULE)
    assert (response.status_code, response.json()) == (200, {"error": ""})
    (rule,) = Auth.objects.values_list("role", "ident", "type", "dest", "mode")
    assert rule == (Server.owner, "example.monitor.*", "Topic", "*", "O")
    (entry,) = LogEntry.objects.all()
    assert entry.is_addition()


def test_the_rule_is_added_once() -> None:
    client = visitor("view_monitor", "add_auth")
    assert [client.post(RULE).status_code for _ in range(2)] == [200, 200]
    assert Auth.objects.count() == LogEntry.objects.count() == 1


def test_a_rule_of_another_mode_is_not_changed() -> None:
    client = visitor("view_monitor", "add_auth")
    client.post(RULE)
    Auth.objects.update(mode="R")
    response = client.post(RULE)
    assert (response.status_code, Auth.objects.get().mode) == (409, "R")
    assert "mode R" in response.json()["error"]


@pytest.mark.parametrize("permissions", [("view_monitor",), ("add_auth",), ()])
def test_who_may_not_add_rules_adds_none(permissions: tuple[str, ...]) -> None:
    assert visitor(*permissions).post(RULE).status_code == 403
    assert not Auth.objects.exists()


def test_the_rule_is_added_by_no_other_site() -> None:
    client = visitor("view_monitor", "add_auth", enforce_csrf_checks=True)
    assert client.post(RULE).status_code == 403
    page = client.get(LIST).text
    tags = Tags(page).found
    token = next(a["value"] for _, a in tags if a.get("name") == "csrfmiddlewaretoken")
    assert client.post(RULE, {"csrfmiddlewaretoken": token}).status_code == 200


def test_the_rule_is_not_added_by_a_link() -> None:
    assert visitor("view_monitor", "add_auth").get(RULE).status_code == 405


@pytest.mark.django_db(transaction=True)
def test_a_rule_that_cannot_be_added_says_why(world: World) -> None:
    blocker = world.program()
    blocker.connection.autocommit = False
    blocker.connection.execute("LOCK TABLE psqlmessages_auth IN ACCESS EXCLUSIVE MODE")
    client = visitor("view_monitor", "add_auth")
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '100ms'")
    response = client.post(RULE)
    blocker.connection.rollback()
    assert response.status_code == 503
    assert "lock timeout" in response.json()["error"]


def test_the_address_of_a_topic_is_readable_where_it_can_be() -> None:
    assert topic_url("DEMO.PRICES") == "/monitor/topics/DEMO.PRICES/"
    assert topic_url("a/b c") == f"/monitor/topics/{quote('a/b c')}/"
