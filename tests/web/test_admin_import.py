"""Export and import in the admin: shown first, then done exactly as it was shown."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection

from psqlmessages.admin import importing
from psqlmessages.definitions import changes, document
from psqlmessages.definitions.entries import Identity, Rule
from psqlmessages.models import Auth, WebIdentity
from tests.web.desks import RULES, Desk
from tests.web.visitor import Page, Visitor

IMPORT, SHOW, DO = f"{RULES}import/", "Show what would change", "Import this"
OLD, NEW = Rule("user1", "OLD", "Topic", "T", "R", 9), Rule("user1", "NEW", "Topic", "T", "R", 9)
STAR = (
    "In the destination T*X a * stands before the end: there it is a plain character, and matches"
    " nothing but itself."
)
CHANGED = OLD._replace(mode="W", timeout=10)


def upload(visitor: Visitor, *rules: Rule, replace: bool = False, **parts: Any) -> Page:
    """Choose a file with these rules; the page that shows what it would change."""
    text = document.write(document.Definitions(rules, **parts))
    return send(visitor, text.encode(), replace=replace)


def send(visitor: Visitor, content: bytes, *, replace: bool = False) -> Page:
    given = {"document": SimpleUploadedFile("rules.json", content)}
    if replace:
        given["replace"] = "on"
    return visitor.send(visitor.open(IMPORT), SHOW, **given)


@pytest.fixture
def listener(desk: Desk) -> Desk:
    """OLD is connected and listens to T."""
    desk.world.rule(*OLD)
    node = desk.world.node("user1", "OLD")
    node.ok("topic_listen", "T")
    return desk


def rules() -> set[Rule]:
    return set(changes.present().rules or ())


def test_what_is_exported_can_be_imported_and_changes_nothing(listener: Desk) -> None:
    response = listener.client.get(f"{RULES}export/")
    assert response["Content-Type"] == "application/json"
    assert response["Content-Disposition"].startswith('attachment; filename="psqlmessages-')
    page = send(listener, response.content, replace=True)
    assert "there is nothing to change" in page.text


def test_the_difference_is_shown_and_nothing_done(listener: Desk) -> None:
    page = upload(listener, CHANGED, NEW)
    assert "1 added, 1 changed, 0 removed" in page.text
    assert "added user1 NEW Topic T R 9" in page.text
    assert "changed user1 OLD Topic T R → W 9 → 10" in page.text
    assert rules() == {OLD}


def test_what_was_shown_is_done_and_tells_whom_it_touched(listener: Desk) -> None:
    page = listener.send(upload(listener, CHANGED, NEW), DO)
    assert page.messages == [
        "Imported: 1 added, 1 changed, 0 removed.",
        "At once, OLD no longer listens to T.",
        "Applies to the connected node OLD.",
    ]
    assert rules() == {CHANGED, NEW}


def test_replacing_removes_what_the_document_does_not_name(listener: Desk) -> None:
    page = upload(listener, NEW, replace=True)
    assert "removed user1 OLD Topic T R 9" in page.text
    page = listener.send(page, DO)
    assert "At once, OLD is disconnected." in page.messages
    assert rules() == {NEW}


def test_without_replacing_what_the_document_does_not_name_stays(listener: Desk) -> None:
    listener.send(upload(listener, NEW), DO)
    assert rules() == {OLD, NEW}


def test_web_identities_are_imported_and_removed_by_their_names(desk: Desk) -> None:
    alice = User.objects.create_user("alice")
    WebIdentity.objects.create(user=alice, ident="gone")
    wanted = (Identity("alice", None, "a.*"),)
    page = upload(desk, web_identities=wanted, replace=True)
    assert "added alice a.* removed alice gone" in page.text
    desk.send(page, DO)
    assert list(WebIdentity.objects.values_list("user", "ident")) == [(alice.pk, "a.*")]


def test_the_history_says_what_an_import_did(listener: Desk) -> None:
    listener.world.rule(*NEW._replace(ident="GONE"))
    listener.send(upload(listener, CHANGED, NEW, replace=True), DO)
    assert set(LogEntry.objects.values_list("change_message", flat=True)) == {
        "Import: added NEW (user1): R Topic T, 9 s.",
        "Import: mode: R → W; timeout: 9 → 10.",
        "Import: deleted GONE (user1): R Topic T.",
    }


def test_a_change_meanwhile_is_not_overwritten_but_shown(listener: Desk) -> None:
    page = upload(listener, CHANGED, NEW)
    Auth.objects.update(mode="RW")
    page = listener.send(page, DO)
    assert "somebody changed rules or web identities meanwhile" in page.messages[0]
    assert "changed user1 OLD Topic T RW → W 9 → 10" in page.text
    assert rules() == {OLD._replace(mode="RW")}
    listener.send(page, DO)
    assert rules() == {CHANGED, NEW}


def test_an_import_that_must_wait_too_long_says_why_and_keeps_the_plan(listener: Desk) -> None:
    page = upload(listener, NEW)
    sitter = listener.world.program()
    sitter.connection.execute("BEGIN")
    sitter.connection.execute("DELETE FROM messages.auth WHERE ident = 'NOBODY'")
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '50ms'")
        page = listener.send(page, DO)
        cursor.execute("RESET lock_timeout")
    assert page.messages[0].startswith("Nothing was saved: rules cannot be changed now:")
    assert rules() == {OLD}
    sitter.connection.execute("ROLLBACK")
    listener.send(page, DO)
    assert rules() == {OLD, NEW}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff", "The document is not UTF-8 text: byte 0 does not fit."),
        (b"{", "The document is no JSON: "),
        (b'{"version":1,"rules":[{"role":"r"}]}', "Rule 1, ident: it is missing."),
        (
            b'{"version":1,"web_identities":[{"user":"x","group":null,"ident":"i"}]}',
            "There is no user x, whom the ident i is for.",
        ),
        (
            b'{"version":1,"web_identities":[{"user":null,"group":"x","ident":"i"}]}',
            "There is no group x, which the ident i is for.",
        ),
        (b"", "The submitted file is empty."),
    ],
)
def test_a_document_that_cannot_be_read_says_why(desk: Desk, content: bytes, sentence: str) -> None:
    page = send(desk, content)
    assert page.errors[0].startswith(sentence)


def test_an_upload_that_is_too_large_is_not_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "MOST_BYTES", 99)
    monkeypatch.setattr(document, "read", None)
    assert send(desk, b" " * 100).errors == ["The document has 100 bytes; 99 are the most."]


def test_no_file_at_all_is_told(desk: Desk) -> None:
    assert desk.send(desk.open(IMPORT), SHOW).errors == ["This field is required."]


def test_a_plan_that_was_altered_is_not_done(desk: Desk) -> None:
    page = upload(desk, NEW)
    plan = page.form(DO).values["plan"][0]
    page = desk.send(page, DO, plan=plan[:-1] + ("A" if plan[-1] != "A" else "B"))
    assert page.messages == [
        "Nothing was saved: the page was too old, or was altered. Choose the document again."
    ]
    assert not rules()


def test_a_plan_of_another_user_is_not_done(desk: Desk) -> None:
    plan = upload(desk, NEW).form(DO).values["plan"]
    other = desk.staff("view_auth", "add_auth", "change_auth")
    page = other.send(upload(other, NEW), DO, plan=plan)
    assert "was too old, or was altered" in page.messages[0]
    assert not rules()


def test_an_old_plan_is_not_done(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    page = upload(desk, NEW)
    monkeypatch.setattr(importing, "_LIFETIME", timedelta(seconds=-1))
    assert "was too old, or was altered" in desk.send(page, DO).messages[0]
    assert not rules()


def test_a_plan_for_a_user_who_is_gone_by_now_is_not_done(desk: Desk) -> None:
    User.objects.create_user("alice")
    page = upload(desk, web_identities=(Identity("alice", None, "a"),))
    User.objects.get(username="alice").delete()
    assert desk.send(page, DO).messages == [
        "Nothing was saved. There is no user alice, whom the ident a is for."
    ]


def test_a_document_too_large_for_the_page_leads_to_the_command(desk: Desk, settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10_100
    page = upload(desk, *(NEW._replace(ident=f"N{n}") for n in range(100)))
    assert "manage.py psqlmessages definitions import FILE" in page.text
    assert not any(DO in form.buttons for form in page.forms)


def test_ten_thousand_rules_are_imported(desk: Desk) -> None:
    wanted = [NEW._replace(ident=f"N{n}", dest=f"T{n}") for n in range(10_000)]
    page = desk.send(upload(desk, *wanted), DO)
    assert page.messages[0] == "Imported: 10,000 added, 0 changed, 0 removed."
    assert Auth.objects.count() == 10_000


def test_what_is_hardly_meant_is_remarked_before_it_is_done(desk: Desk) -> None:
    page = upload(desk, NEW._replace(role="nobody", dest="T*X"))
    assert page.messages == [
        "PostgreSQL has no role nobody: a rule for it lets nobody in until the role is made.",
        STAR,
    ]


def test_scripts_in_a_document_are_shown_as_text(desk: Desk) -> None:
    script = "<script>alert(1)</script>"
    page = upload(desk, NEW._replace(ident=script, role=script, dest=f"*{script}"))
    done = desk.send(page, DO)
    wrong = send(desk, json.dumps({"version": 1, "rules": [], script: 1}).encode())
    assert script in page.text
    assert not any("<script>alert" in shown.html for shown in (page, done, wrong))


# Who may


@pytest.mark.parametrize("lacking", ["add_auth", "change_auth"])
def test_importing_takes_the_permissions_to_add_and_to_change(desk: Desk, lacking: str) -> None:
    given = {"view_auth", "add_auth", "change_auth", "delete_auth"} - {lacking}
    staff = desk.staff(*given)
    assert staff.client.get(IMPORT).status_code == 403
    assert "Import" not in staff.open(RULES).links
    assert "Export" in staff.open(RULES).links


def test_replacing_takes_the_permission_to_delete(listener: Desk) -> None:
    staff = listener.staff("view_auth", "add_auth", "change_auth")
    page = upload(staff, NEW, replace=True)
    assert "0 removed" in page.text, "who may not is not asked"


def test_a_plan_needs_its_permissions_when_it_is_done(listener: Desk) -> None:
    staff = listener.staff("view_auth", "add_auth", "change_auth", "delete_auth")
    page = upload(staff, NEW, replace=True)
    user = User.objects.get(username=User.objects.latest("pk").username)
    user.user_permissions.filter(codename="delete_auth").delete()
    assert staff.send(page, DO).status == 403
    assert rules() == {OLD}


def test_a_plan_that_has_come_to_need_more_is_shown_again(desk: Desk) -> None:
    alice = User.objects.create_user("alice")
    WebIdentity.objects.create(user=alice, ident="a")
    staff = desk.staff("view_auth", "add_auth", "change_auth")
    page = upload(staff, NEW, web_identities=(Identity("alice", None, "a"),))
    WebIdentity.objects.all().delete()
    page = staff.send(page, DO)
    assert "You lack the permission for this: psqlmessages.add_webidentity." in page.text
    assert not rules()


def test_web_identities_are_imported_by_who_may_add_them(desk: Desk) -> None:
    User.objects.create_user("alice")
    staff = desk.staff("view_auth", "add_auth", "change_auth")
    page = upload(staff, web_identities=(Identity("alice", None, "a"),))
    assert "You lack the permission for this: psqlmessages.add_webidentity." in page.text
    assert not any(DO in form.buttons for form in page.forms)


def test_web_identities_are_exported_to_who_may_see_them(desk: Desk) -> None:
    desk.world.rule(*OLD)
    staff = desk.staff("view_auth")
    assert set(json.loads(staff.client.get(f"{RULES}export/").content)) == {"version", "rules"}
    everything = json.loads(desk.client.get(f"{RULES}export/").content)
    assert everything["web_identities"] == []
    assert everything["rules"] == [OLD._asdict()]
