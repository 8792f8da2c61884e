"""Web identities in the admin: a user or a group, and the ident it may use."""

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User

from psqlmessages.models import WebIdentity
from tests.web.desks import IDENTITIES, SURE, Desk
from tests.web.visitor import Page


@pytest.fixture
def alice(desk: Desk) -> User:
    return User.objects.create_user("alice")


@pytest.fixture
def traders(desk: Desk) -> Group:
    return Group.objects.create(name="traders")


def add(desk: Desk, **values: object) -> Page:
    return desk.send(desk.open(f"{IDENTITIES}add/"), "Save", **values)


def test_a_user_is_given_an_ident(desk: Desk, alice: User) -> None:
    add(desk, user=alice.pk, ident="alice.*")
    assert WebIdentity.objects.get().user == alice


def test_a_group_is_given_an_ident(desk: Desk, traders: Group) -> None:
    add(desk, group=traders.pk, ident="desk")
    assert WebIdentity.objects.get().group == traders


def test_a_user_and_a_group_together_are_refused(desk: Desk, alice: User, traders: Group) -> None:
    page = add(desk, user=alice.pk, group=traders.pk, ident="x")
    assert page.errors == ["Choose a user or a group: one of them, and not both."]


def test_neither_user_nor_group_is_refused(desk: Desk) -> None:
    page = add(desk, ident="x")
    assert page.errors == ["Choose a user or a group: one of them, and not both."]


def test_an_empty_ident_is_refused(desk: Desk, alice: User) -> None:
    assert add(desk, user=alice.pk, ident="").errors == ["This field is required."]


def test_the_same_identity_twice_is_refused(desk: Desk, alice: User) -> None:
    add(desk, user=alice.pk, ident="x")
    page = add(desk, user=alice.pk, ident="x")
    assert page.errors == ["This user or group has this ident already."]


def test_a_star_amid_an_ident_is_remarked(desk: Desk, alice: User) -> None:
    page = add(desk, user=alice.pk, ident="a*b")
    assert any("a * stands before the end" in message for message in page.messages)


def test_the_history_says_what_was_given_and_taken(desk: Desk, alice: User) -> None:
    add(desk, user=alice.pk, ident="x")
    path = f"{IDENTITIES}{WebIdentity.objects.get().pk}"
    desk.send(desk.open(f"{path}/change/"), "Save", ident="y")
    desk.send(desk.open(f"{path}/delete/"), SURE)
    assert list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True)) == [
        "Added alice as x.",
        "Ident: x → y",
        "Deleted alice as y.",
    ]


def test_who_may_only_view_identities_changes_none(desk: Desk, alice: User) -> None:
    WebIdentity.objects.create(user=alice, ident="x")
    path = f"{IDENTITIES}{WebIdentity.objects.get().pk}"
    viewer = desk.staff("view_webidentity")
    page = viewer.open(f"{path}/change/")
    assert "alice" in page.text
    token = page.forms[-1].values["csrfmiddlewaretoken"]
    for address in (f"{path}/change/", f"{path}/delete/", f"{IDENTITIES}add/"):
        values = {"post": "yes", "csrfmiddlewaretoken": token}
        assert viewer.client.post(address, values).status_code == 403
    assert WebIdentity.objects.get().ident == "x"


def test_a_project_whose_admin_cannot_search_users_asks_for_their_number(
    desk: Desk, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "admin-autocomplete" in desk.open(f"{IDENTITIES}add/").html
    monkeypatch.delitem(admin.site._registry, User)
    page = desk.open(f"{IDENTITIES}add/")
    assert '<input type="text" name="user"' in page.html


def test_scripts_in_names_are_shown_as_text(desk: Desk) -> None:
    script = "<script>alert(1)</script>"
    group = Group.objects.create(name=script)
    page = add(desk, group=group.pk, ident=f"{script}*{script}")
    pages = [page, desk.open(f"{IDENTITIES}{WebIdentity.objects.get().pk}/change/")]
    assert all(script in page.text for page in pages)
    assert not any("<script>alert" in page.html for page in pages)
