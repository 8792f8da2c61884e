"""Every page that can be clicked to: its forms need their token, and what it shows is text."""

import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from urllib.parse import parse_qsl, urljoin, urlsplit

import pytest
from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client as Browser
from django.urls import reverse
from pytest_django import Settings

from psqlmessages.models import Auth, Client, Exchange, Queue, Topic, WebIdentity
from tests.reliability.counts import report, size
from tests.reliability.marked_data import MarkedData, fill_stores
from tests.sql.conftest import World
from tests.web.pages import Page, logged_in

# The number of pages opened of those that differ only in numbers, names or values.
OF_A_KIND = size(1, 3)
# Attributes with an address to open or to load.
ADDRESSES = {"href", "action", "formaction", "src", "data", "poster"}


def faults(response: HttpResponse, page: Page) -> list[str]:
    """Return what could run code in a page, and a policy that would allow it."""
    policy = response.headers.get("Content-Security-Policy", "")
    found = [f"the policy is {policy!r}"] * (
        not {"default-src 'none'", "script-src 'self'"} <= set(re.split("; *", policy))
        or "unsafe-eval" in policy
    )
    for tag, given in page.tags:
        if tag == "script" and "src" not in given and given.get("type") != "application/json":
            found.append("an inline script")
        found += [f"{name} in <{tag}>" for name in given if name.startswith("on")]
        found += [
            f"{value[:60]!r} in <{tag}>"
            for name, value in given.items()
            if name in ADDRESSES
            and re.match(r"[\s\x00-\x1f]*(javascript|vbscript|data):", value, re.IGNORECASE)
            and not value.startswith("data:image/")
        ]
    return found


class Crawl:
    def __init__(self, client: Browser, starts: Iterable[str], most: int = size(80, 600)) -> None:
        self.client = client
        self.pages: dict[str, HttpResponse] = {}
        self.html: dict[str, Page] = {}
        self._kinds: Counter[str] = Counter()
        self._known: set[str] = set()
        self._waiting: deque[str] = deque()
        for start in starts:
            self._found("/", start)
        while self._waiting and len(self.pages) < most:
            self._open(self._waiting.popleft())

    def _found(self, page: str, link: str) -> None:
        parts = urlsplit(urljoin(f"http://testserver{page}", link))
        address = parts._replace(scheme="", netloc="", fragment="").geturl()
        kind = re.sub(r"\d+|%[^/]*", "#", parts.path)
        kind += "?" + "&".join(sorted({name for name, _ in parse_qsl(parts.query)}))
        if parts.netloc != "testserver" or address in self._known or "/static/" in address:
            return
        self._known.add(address)
        self._kinds[kind] += 1
        if self._kinds[kind] <= OF_A_KIND:
            self._waiting.append(address)

    def _open(self, address: str) -> None:
        response = self.client.get(address)
        self.pages[address] = response
        if response.status_code in (301, 302):
            self._found(address, response["Location"])
        elif response["Content-Type"].startswith("text/html"):
            page = self.html[address] = Page(address, response)
            links = [given["href"] for tag, given in page.tags if tag == "a" and "href" in given]
            links += [form.action or address for form in page.forms if form.method == "get"]
            for link in links:
                self._found(address, link)


SCRIPT = "'\"><script>alert(1)</script>"
BODY = "<script>alert('canary in one')</script>"
STARTS = [
    "/", "/chat/", "/login/", "/admin/", "/monitor/", "/monitor/topics/", "/monitor/queues/",
    "/monitor/exchanges/", "/monitor/traffic/", "/monitor/exchanges/figures/",
    "/monitor/traffic/figures/", "/monitor/rule/", "/healthz", "/metrics", "/api/docs",
    "/api/openapi.json", "/none/<script>alert(1)</script>", "/api/none",
]  # fmt: skip
MODELS = (
    "auth", "client", "topic", "webidentity", "queue", "exchange", "subscription", "pipelinejob",
    "traffic",
)  # fmt: skip
OF_ONE = {
    "auth_delete": Auth, "auth_change": Auth, "client_change": Client, "topic_change": Topic,
    "queue_change": Queue, "queue_elements": Queue, "exchange_change": Exchange,
    "exchange_dry_run": Exchange, "exchange_rules": Exchange,
}  # fmt: skip
# The number of pages that a user without `view_bodies` opens.
FEW = size(40, 60)


@pytest.fixture
def marked(transactional_db: None, settings: Settings, world: World) -> Iterator[MarkedData]:
    settings.STORAGES = {
        **settings.STORAGES,
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    }
    settings.PSQLMESSAGES = {"NODE": "example"}
    with fill_stores(world, mark=SCRIPT, body=BODY) as marked:
        yield marked


@pytest.fixture
def chief(marked: MarkedData) -> Browser:
    """The browser of a superuser who may be a node with a hostile name."""
    user = User.objects.create_superuser("chief", first_name=SCRIPT)
    WebIdentity.objects.create(user=user, ident=SCRIPT)
    client = Browser(enforce_csrf_checks=True, raise_request_exception=False)
    client.force_login(user)
    return client


def starts() -> list[str]:
    addresses = []
    for page, model in OF_ONE.items():
        found = model.objects.order_by("pk").first()
        assert found is not None, page
        addresses.append(reverse(f"admin:psqlmessages_{page}", args=[found.pk]))
    addresses += STARTS
    for model in MODELS:
        addresses.append(reverse(f"admin:psqlmessages_{model}_changelist"))
        addresses.append(reverse(f"admin:psqlmessages_{model}_add"))
    topics = Topic.objects.values_list("name", flat=True)
    addresses += [reverse("psqlmessages:monitor_topic", args=[topic]) for topic in topics]
    return addresses


@pytest.mark.timeout(400)
def test_forms_need_tokens_and_no_text_runs(chief: Browser, marked: MarkedData, monkeypatch):
    crawl = Crawl(chief, starts())
    # Without a token, send each form, and a POST to each page.
    forms = {
        (urljoin(address, form.action), tuple(sorted(form.values)))
        for address, page in crawl.html.items()
        for form in page.forms
        if form.method == "post"
    }
    forms |= {(address.partition("?")[0], ("action", "post")) for address in crawl.html}
    taken = []
    for address, fields in sorted(forms):
        answer = chief.post(address, dict.fromkeys({*fields} - {"csrfmiddlewaretoken"}, "1"))
        if answer.status_code not in (404, 405):  # where no form is taken at all
            is_refused = answer.status_code == 403 and b"CSRF" in answer.content
            taken += [address] * (not is_refused)
    report(
        "cross-site requests", "forms without their CSRF token", pages=len(crawl.pages),
        forms=len(forms), accepted=len(taken),
    )  # fmt: skip
    assert taken == []
    assert len(forms) > 60

    # Check what each page would run, also the page of an error.
    monkeypatch.setattr("project.views.render", None)
    failed = Crawl(chief, ["/"])
    crawl.pages |= failed.pages
    crawl.html |= failed.html
    pages = {page: crawl.pages[page] for page in crawl.html}
    found = {page: faults(answer, crawl.html[page]) for page, answer in pages.items()}
    found = {page: wrong for page, wrong in found.items() if wrong}
    sniffed = {page: answer.get("X-Content-Type-Options") for page, answer in crawl.pages.items()}
    raw = [page for page, answer in pages.items() if b"<script>alert(" in answer.content]
    shown = [page for page, answer in pages.items() if b"&lt;script&gt;alert(1" in answer.content]
    report(
        "scripts in names and bodies", "pages", pages=len(pages), with_escaped_scripts=len(shown),
        with_raw_scripts=len(raw), with_inline_script_or_weak_policy=len(found),
    )  # fmt: skip
    assert (found, raw, {*sniffed.values()}) == ({}, [], {"nosniff"}), sniffed
    assert {200, 404} <= {answer.status_code for answer in pages.values()}
    assert len(shown) > 20
    assert {page for page, answer in crawl.pages.items() if answer.status_code == 500} == {"/"}
    assert marked.rows() == marked.before


def test_every_call_of_the_api_by_a_session_needs_the_token(chief: Browser, marked: MarkedData):
    paths = json.loads(chief.get("/api/openapi.json").content)["paths"]
    calls = [
        (method.upper(), re.sub(r"{\w+}", "1", path), b"{}" if "requestBody" in operation else b"")
        for path, methods in paths.items()
        for method, operation in methods.items()
        if method.upper() not in {"GET", "HEAD", "OPTIONS", "TRACE"}
    ]
    taken = [
        (method, path)
        for method, path, body in calls
        if chief.generic(method, path, body, content_type="application/json").status_code != 403
    ]
    report(
        "cross-site requests", "calls of the API without the CSRF token", calls=len(calls),
        accepted=len(taken),
    )  # fmt: skip
    assert taken == []
    assert len(calls) > 8
    assert marked.rows() == marked.before


@pytest.mark.timeout(400)
def test_no_page_shows_a_body_without_the_permission(marked: MarkedData):
    ours = Permission.objects.filter(content_type__app_label="psqlmessages")
    names = set(ours.values_list("codename", flat=True)) - {"view_bodies"}
    sets = [names, *[set(), *({name} for name in sorted(names)[::4])] * size(0, 1)]
    pages, with_body = 0, []
    for given in sets:
        crawl = Crawl(logged_in(*given), starts(), most=FEW)
        pages += len(crawl.pages)
        answers = crawl.pages.items()
        with_body += [page for page, answer in answers if b"canary in one" in answer.content]
    pages_with_it = Crawl(logged_in(*names, "view_bodies"), starts(), most=FEW).pages.values()
    seen = sum(b"canary in one" in answer.content for answer in pages_with_it)
    report(
        "users without the permission to see bodies", "pages", permission_sets=len(sets),
        pages=pages, with_a_body=len(with_body), with_a_body_if_permitted=seen,
    )  # fmt: skip
    assert with_body == []
    assert seen > 0
