"""Pages as a browser without scripts sees them, and clients that fill in their forms."""

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.contrib.sessions.models import Session
from django.db import connection
from django.db.models import Model
from django.http import HttpResponse
from django.test import Client
from pytest_django import Settings

from psqlmessages.models import Auth, PipelineJob, Traffic, WebIdentity
from tests.sql.conftest import World

LISTS = tuple(
    f"/admin/psqlmessages/{name}/"
    for name in (
        "auth", "client", "topic", "queue", "exchange", "webidentity", "subscription", "traffic",
        "pipelinejob",
    )
)  # fmt: skip
RULES, CLIENTS, TOPICS, QUEUES, EXCHANGES, IDENTITIES, SUBSCRIPTIONS, TRAFFIC, JOBS = LISTS
LIST_BUTTON = "Save"
SURE = "Yes, I\N{RIGHT SINGLE QUOTATION MARK}m sure"
TOO_LONG = "Nothing was saved: canceling statement due to lock timeout."


class Form:
    """A form of a page: its values, buttons and choices."""

    def __init__(self, attributes: dict[str, str]) -> None:
        self.action = attributes.get("action", "")
        self.method = attributes.get("method", "get").lower()
        self.values: dict[str, list[Any]] = {}
        self.buttons: dict[str, str] = {}
        self.choices: dict[str, list[str]] = {}

    def hold(self, name: str, value: str) -> None:
        self.values.setdefault(name, []).append(value)


class Page(HTMLParser):
    def __init__(self, url: str, response: HttpResponse) -> None:
        super().__init__()
        self.url = url
        self.status = response.status_code
        self.html = response.content.decode()
        self.forms: list[Form] = []
        self.links: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.messages: list[str] = []
        self.errors: list[str] = []
        self._texts: list[str] = []
        self._form: Form | None = None
        self._select = self._link = self._into = self._list = ""
        self.feed(self.html)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    @property
    def buttons(self) -> set[str]:
        return {button for form in self.forms for button in form.buttons}

    def form(self, button: str) -> Form:
        (found,) = [form for form in self.forms if button in form.buttons]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append((tag, given))
        if tag == "form":
            self._form = Form(given)
            self.forms.append(self._form)
        elif tag == "a":
            self._link = given.get("href", "")
        elif tag == "ul":
            self._list = given.get("class", "").split(" ")[0]
        elif tag == "li" and self._list in ("messagelist", "errorlist"):
            self._into = self._list
            (self.messages if self._into == "messagelist" else self.errors).append("")
        if self._form is not None and "disabled" not in given:
            self._handle_field(tag, given)

    def _handle_field(self, tag: str, given: dict[str, str]) -> None:
        form, name, kind = self._form, given.get("name", ""), given.get("type", "text")
        assert form is not None
        if tag in ("input", "button") and kind == "submit":
            form.buttons[given.get("value", name)] = name
        elif tag == "button":
            form.buttons[given.get("title", name)] = name
            form.choices[name] = [given.get("value", "")]
        elif tag == "input" and name and kind != "file":
            is_box = kind in ("checkbox", "radio")
            if not is_box or "checked" in given:
                form.hold(name, given.get("value", "on" if is_box else ""))
        elif tag == "textarea":
            form.hold(name, "")
        elif tag == "select":
            self._select = name
        elif tag == "option" and self._select:
            form.choices.setdefault(self._select, []).append(given.get("value", ""))
            if "selected" in given:
                form.hold(self._select, given.get("value", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None
        elif name := {"select": "_select", "ul": "_list", "li": "_into"}.get(tag):
            setattr(self, name, "")

    def handle_data(self, data: str) -> None:
        self._texts.append(data)
        if self._link and data.strip():
            self.links.setdefault(data.strip(), self._link)
            self._link = ""
        if self._into:
            (self.messages if self._into == "messagelist" else self.errors)[-1] += data.strip()


class FormClient:
    """A browser without scripts: it sends forms with the values of their page, and the token."""

    def __init__(self, client: Client | None = None) -> None:
        self.client = client or Client(enforce_csrf_checks=True)

    def open(self, path: str) -> Page:
        return self._page(path, self.client.get(path))

    def follow(self, page: Page, link: str) -> Page:
        return self.open(urljoin(page.url, page.links[link]))

    def send(self, page: Page, button: str, **values: Any) -> Page:
        """Fill in and submit the form with this button; None removes a field."""
        form = page.form(button)
        held = {**form.values, **values}
        if name := form.buttons[button]:
            held[name] = form.choices.get(name, [button])[0]
        path = urljoin(page.url, form.action)
        given = {name: value for name, value in held.items() if value is not None}
        return self._page(path, self.client.post(path, given))

    def _page(self, path: str, response: HttpResponse) -> Page:
        while response.status_code == 302:
            path = urljoin(path, response["Location"])
            response = self.client.get(path)
        return Page(path, response)


def page_of(row: Model, part: str = "change") -> str:
    return f"/admin/psqlmessages/{row._meta.model_name}/{row.pk}/{part}/"


def history() -> list[str]:
    """Return the messages of the admin's history, oldest first."""
    return list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))


class Admin(FormClient):
    """A superuser, and other users made by `staff`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.user = User.objects.create_superuser("chief")
        self.client.force_login(self.user)

    def act(self, path: str, action: str, *keys: int) -> Page:
        """Select rows of a list, and run an action on them."""
        chosen = [str(key) for key in keys]
        return self.send(self.open(path), "0", action=action, _selected_action=chosen, index="0")

    def staff(self, *permissions: str) -> FormClient:
        """Log in a new member of the staff with these permissions, as in "view_auth"."""
        return FormClient(logged_in(*permissions, enforce_csrf_checks=True))

    def add_rule(self, rule: str, **values: Any) -> Page:
        names = ("role", "ident", "type", "dest", "mode", "timeout")
        given = dict(zip(names, rule.split(), strict=True))
        return self.send(self.open(f"{RULES}add/"), "Save", **{**given, **values})

    def open_rule(self, **which: Any) -> Page:
        return self.open(page_of(Auth.objects.get(**which)))

    def edit_list(self, page: Page, values: dict[int, dict[str, Any]]) -> Page:
        """Change fields of rules, by their keys, in an opened list; then save it."""
        changes = {}
        for name, value in page.form(LIST_BUTTON).values.items():
            row, _, field = name.rpartition("-")
            if field == "id":
                given = values.get(int(value[0]), {})
                changes |= {f"{row}-{each}": given[each] for each in given}
        return self.send(page, LIST_BUTTON, **changes)


@pytest.fixture
def database(world: World, django_db_blocker) -> Iterator[World]:
    made = (LogEntry, WebIdentity, User, Group, Session, Traffic, PipelineJob)
    with django_db_blocker.unblock():
        yield world
        connection.rollback()
        for model in made:
            model.objects.all().delete()


@pytest.fixture
def admin(settings: Settings, database: World) -> Admin:
    """The client of a superuser; `admin.world` has the nodes."""
    static = {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    settings.STORAGES = {**settings.STORAGES, "staticfiles": static}
    return Admin(database)


@pytest.fixture
def impatient(database: World, monkeypatch) -> Iterator[None]:
    """Shorten the lock timeout of the admin."""
    monkeypatch.setattr("psqlmessages.admin.base.LOCK_TIMEOUT", "50ms")
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '60s'")
    yield
    with connection.cursor() as cursor:
        cursor.execute("RESET statement_timeout")


def logged_in(*permissions: str, is_staff: bool = True, **options: bool) -> Client:
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert {*user.user_permissions.values_list("codename", flat=True)} == {*permissions}
    client = Client(**options)
    client.force_login(user)
    return client


def rule_fields(response: HttpResponse, dest: str) -> dict[str, str]:
    """Return the fields of the form that adds a missing rule about this destination."""
    (form,) = (form for form in Page("", response).forms if form.values.get("dest") == [dest])
    assert form.action == "/monitor/rule/"
    return {name: values[0] for name, values in form.values.items()}
