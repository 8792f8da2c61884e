"""The admin's doors: who may what, hostile names, many rows."""

import pytest
from django.core import checks
from pytest_django import DjangoAssertNumQueries

from psqlmessages.models import Auth
from tests.web.desks import CLIENTS, IDENTITIES, RULES, SURE, TOPICS, Desk


def modes() -> dict[str, str]:
    return dict(Auth.objects.values_list("ident", "mode"))


# Hostile names, many rules


def test_scripts_in_names_are_shown_as_text(desk: Desk) -> None:
    script = "<script>alert(1)</script>"
    desk.world.rule("user1", script, "Topic", f"{script}T", "RW", 9)
    node = desk.world.node("user1", script)
    node.ok("topic_listen", f"{script}T")
    listed = desk.open(RULES)
    form = desk.open_rule(ident=script)
    saved = desk.send(form, "Save", mode="W")
    asked = desk.follow(desk.open_rule(ident=script), "Delete")
    refused = desk.add_rule(f"user1 {script} Topic {script}T R 9")
    deleted = desk.send(asked, SURE)
    assert f"At once, {script} no longer listens to {script}T." in saved.messages
    assert f"At once, {script} is disconnected." in deleted.messages
    pages = [listed, form, saved, asked, refused, deleted, desk.open("/admin/")]
    assert not any("<script>alert" in page.html for page in pages)


def test_ten_thousand_rules_are_listed_in_few_statements(
    desk: Desk, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    Auth.objects.bulk_create(
        Auth(role="user1", ident=f"N{n}", type="Topic", dest=f"T{n}", mode="R", timeout=9)
        for n in range(10_000)
    )
    with django_assert_max_num_queries(12):
        page = desk.open(RULES)
    assert "N9999" not in page.text
    assert len(page.html) < 400_000, "the filters do not list all idents"


# Who may


def test_who_may_only_view_rules_can_change_none(desk: Desk) -> None:
    desk.world.rules("user1 A Topic T R 9")
    key = Auth.objects.get().pk
    viewer = desk.staff("view_auth")
    page = viewer.open(RULES)
    assert "A" in page.links
    assert not any("Save" in form.buttons for form in page.forms)
    token = viewer.open(f"{RULES}{key}/change/").forms[-1].values["csrfmiddlewaretoken"][0]
    attempts = {
        f"{RULES}{key}/change/": {"mode": "W", "timeout": "9"},
        f"{RULES}{key}/delete/": {"post": "yes"},
        f"{RULES}add/": {"role": "user1"},
        f"{RULES}import/": {},
    }
    for path, values in attempts.items():
        response = viewer.client.post(path, {**values, "csrfmiddlewaretoken": token})
        assert response.status_code == 403, path
    form = {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 1, "form-0-id": key, "form-0-mode": "W"}
    for values in (
        {**form, "form-0-timeout": "9", "_save": "Save"},
        {"action": "delete_selected", "_selected_action": key, "post": "yes"},
    ):
        viewer.client.post(RULES, {**values, "csrfmiddlewaretoken": token})
    assert modes() == {"A": "R"}


@pytest.mark.parametrize("path", [RULES, f"{RULES}export/", CLIENTS, TOPICS, IDENTITIES])
def test_staff_without_a_permission_sees_nothing(desk: Desk, path: str) -> None:
    assert desk.staff().client.get(path).status_code == 403


@pytest.mark.parametrize("path", [RULES, f"{RULES}export/", f"{RULES}import/", CLIENTS])
def test_who_is_no_staff_is_asked_to_log_in(desk: Desk, path: str) -> None:
    desk.client.logout()
    assert desk.client.get(path)["Location"].startswith("/admin/login/")


def test_no_form_is_taken_without_its_token(desk: Desk) -> None:
    desk.world.rules("user1 A Topic T R 9")
    key = Auth.objects.get().pk
    for path in (
        f"{RULES}{key}/change/",
        f"{RULES}{key}/delete/",
        f"{RULES}add/",
        f"{RULES}import/",
        RULES,
        CLIENTS,
        f"{IDENTITIES}add/",
    ):
        assert desk.client.post(path, {"post": "yes", "plan": "x"}).status_code == 403, path
    assert modes() == {"A": "R"}


def test_the_admin_passes_its_own_checks() -> None:
    assert checks.run_checks(tags=["admin"]) == []
