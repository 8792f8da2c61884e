"""The fixture `desk`: administrators at work in the admin, over an empty message system."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from pytest_django import Settings

from psqlmessages.models import Auth
from tests.sql.conftest import World
from tests.web.visitor import Page, Visitor

RULES = "/admin/psqlmessages/auth/"
CLIENTS = "/admin/psqlmessages/client/"
TOPICS = "/admin/psqlmessages/topic/"
IDENTITIES = "/admin/psqlmessages/webidentity/"
LIST_BUTTON = "Save"
SURE = "Yes, I\N{RIGHT SINGLE QUOTATION MARK}m sure"


class Desk(Visitor):
    """The chief administrator, and others made by `staff`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.user = User.objects.create_superuser("chief")
        self.client.force_login(self.user)

    def staff(self, *permissions: str) -> Visitor:
        """Make one of the staff with these permissions, as in "view_auth"."""
        user = User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        visitor = Visitor()
        visitor.client.force_login(user)
        return visitor

    def add_rule(self, rule: str, **values: Any) -> Page:
        """Fill in the form of a new rule, written as "role ident type dest mode timeout"."""
        names = ("role", "ident", "type", "dest", "mode", "timeout")
        given = dict(zip(names, rule.split(), strict=True))
        return self.send(self.open(f"{RULES}add/"), "Save", **{**given, **values})

    def open_rule(self, **which: Any) -> Page:
        """Open the page of a rule."""
        return self.open(f"{RULES}{Auth.objects.get(**which).pk}/change/")

    def edit_list(self, page: Page, values: dict[int, dict[str, Any]]) -> Page:
        """Change fields of rules, by their keys, in an opened list; then save it."""
        form = page.form(LIST_BUTTON)
        rows = {
            int(value[0]): name.removesuffix("-id")
            for name, value in form.values.items()
            if name.endswith("-id")
        }
        changes = {
            f"{rows[key]}-{name}": value
            for key, fields in values.items()
            for name, value in fields.items()
        }
        return self.send(page, LIST_BUTTON, **changes)


@pytest.fixture
def desk(transactional_db: None, settings: Settings, world: World) -> Iterator[Desk]:
    """A superuser's browser on the admin; `desk.world` has the nodes."""
    settings.STORAGES = {
        **settings.STORAGES,
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    }
    return Desk(world)


@pytest.fixture
def impatient(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks are waited for for a moment; where that has no bound, for some seconds."""
    monkeypatch.setattr("psqlmessages.admin.calls._PATIENCE", "50ms")
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '60s'")
    yield
    with connection.cursor() as cursor:
        cursor.execute("RESET statement_timeout")
