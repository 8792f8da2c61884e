"""The fixture `desk`: administrators at work in the admin, over an empty message system."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.contrib.sessions.models import Session
from django.db import connection
from django.db.models import Model
from django.test import Client
from pytest_django import Settings

from psqlmessages.models import Auth, PipelineJob, Traffic, WebIdentity
from tests.sql.conftest import World
from tests.web.visitor import Page, Visitor

RULES, CLIENTS, TOPICS, QUEUES, EXCHANGES, IDENTITIES, SUBSCRIPTIONS, TRAFFIC, JOBS = (
    f"/admin/psqlmessages/{name}/"
    for name in (
        "auth", "client", "topic", "queue", "exchange", "webidentity", "subscription", "traffic",
        "pipelinejob",
    )
)  # fmt: skip
LIST_BUTTON = "Save"
SURE = "Yes, I\N{RIGHT SINGLE QUOTATION MARK}m sure"
TOO_LONG = "Nothing was saved: canceling statement due to lock timeout."


def page_of(row: Model, part: str = "change") -> str:
    return f"/admin/psqlmessages/{row._meta.model_name}/{row.pk}/{part}/"


def history() -> list[str]:
    """What the admin's history says, oldest first."""
    return list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))


class Desk(Visitor):
    """The chief administrator, and others made by `staff`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.user = User.objects.create_superuser("chief")
        self.client.force_login(self.user)

    def act(self, path: str, action: str, *keys: int) -> Page:
        """Choose rows of a list and do something with them."""
        chosen = [str(key) for key in keys]
        return self.send(self.open(path), "0", action=action, _selected_action=chosen, index="0")

    def staff(self, *permissions: str) -> Visitor:
        """Make one of the staff with these permissions, as in "view_auth"."""
        member = Visitor()
        member.client = visitor(*permissions, enforce_csrf_checks=True)
        return member

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
def desk(settings: Settings, database: World) -> Desk:
    """A superuser's browser on the admin; `desk.world` has the nodes."""
    settings.STORAGES = {
        **settings.STORAGES,
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    }
    return Desk(database)


@pytest.fixture
def impatient(database: World, monkeypatch) -> Iterator[None]:
    """Wait for locks a moment; if that has no bound, for some seconds."""
    monkeypatch.setattr("psqlmessages.admin.base.LOCK_TIMEOUT", "50ms")
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '60s'")
    yield
    with connection.cursor() as cursor:
        cursor.execute("RESET statement_timeout")


def visitor(*permissions: str, is_staff: bool = True, **options: bool) -> Client:
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    client = Client(**options)
    client.force_login(user)
    return client
