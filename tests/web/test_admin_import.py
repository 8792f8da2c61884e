"""Export and import in the admin, shown first and then done exactly so; web identities."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User
from django.core.files.uploadedfile import SimpleUploadedFile

from psqlmessages.admin import rule_transfer
from psqlmessages.models import Auth, WebIdentity
from psqlmessages.rules import changes, document
from psqlmessages.rules.document import Identity, RuleEntry
from tests.web.pages import IDENTITIES, RULES, SURE, Admin, FormClient, Page, history, page_of

IMPORT, SHOW, DO = f"{RULES}import/", "Show changes", "Import this"
OLD, NEW = (
    RuleEntry("user1", "OLD", "Topic", "T", "R", 9),
    RuleEntry("user1", "NEW", "Topic", "T", "R", 9),
)
CHANGED = OLD._replace(mode="W", timeout=10)
DANGER = ("input", {"type": "submit", "class": "psqlmessages-danger", "value": DO})
SCRIPT = "<script>alert(1)</script>"
ALICE = Identity("alice", None, "a")


def upload(visitor: FormClient, *rules: RuleEntry, replace: bool = False, **parts: Any) -> Page:
    text = document.write(document.Definitions(rules or None, **parts))
    return send(visitor, text.encode(), replace=replace)


def send(visitor: FormClient, content: bytes, *, replace: bool = False) -> Page:
    given = {"document": SimpleUploadedFile("rules.json", content)}
    if replace:
        given["replace"] = "on"
    return visitor.send(visitor.open(IMPORT), SHOW, **given)


@pytest.fixture
def listener(admin: Admin) -> Admin:
    """OLD is connected and listens to T."""
    admin.world.rule(*OLD)
    admin.world.node("user1", "OLD").ok("topic_listen", "T")
    return admin


def rules() -> set[RuleEntry]:
    return set(changes.read_current().rules or ())


def test_a_confirmed_change_is_made_and_names_affected_nodes(listener: Admin):
    listener.world.rule(*NEW._replace(ident="GONE"))
    page = upload(listener, CHANGED, NEW)
    assert "1 added, 1 changed, 0 removed" in page.text, "what it does not name stays"
    assert DANGER not in page.tags
    page = upload(listener, CHANGED, NEW, replace=True)
    assert "Affected connected nodes: OLD ." in page.text
    assert DANGER in page.tags
    assert "1 added, 1 changed, 1 removed" in page.text
    assert "added user1 NEW Topic T R 9" in page.text
    assert "changed user1 OLD Topic T R → W 9 → 10" in page.text
    assert "removed user1 GONE Topic T R 9" in page.text
    assert rules() == {OLD, NEW._replace(ident="GONE")}, "nothing is done yet"
    page = listener.send(page, DO)
    assert page.messages == [
        "Imported: 1 added, 1 changed, 1 removed.", "Immediately: OLD no longer listens to T.",
        "Applies to the connected node OLD.",
    ]  # fmt: skip
    assert rules() == {CHANGED, NEW}
    assert set(history()) == {
        "Import: added NEW (user1): R Topic T, 9 s.", "Import: mode: R → W; timeout: 9 → 10.",
        "Import: deleted GONE (user1): R Topic T.",
    }  # fmt: skip
    exported = listener.client.get(f"{RULES}export/")
    assert exported["Content-Type"] == "application/json"
    assert exported["Content-Disposition"].startswith('attachment; filename="psqlmessages-')
    page = send(listener, exported.content, replace=True)
    assert "there is nothing to change" in page.text


def test_web_identities_are_imported_and_removed_by_their_names(admin: Admin):
    admin.world.rule(*OLD)
    alice = User.objects.create_user("alice")
    WebIdentity.objects.create(user=alice, ident="gone")
    page = upload(admin, web_identities=(ALICE,), replace=True)
    assert "added alice a removed alice gone" in page.text
    admin.send(page, DO)
    assert list(WebIdentity.objects.values_list("user", "ident")) == [(alice.pk, "a")]
    assert "removed user1" not in page.text, "a part that is not in the document stays"
    page = upload(admin, web_identities=(Identity("alice", None, "b"),))
    alice.delete()
    refusal = "Nothing was saved. There is no user alice for the node b."
    assert admin.send(page, DO).messages == [refusal]


def test_a_change_meanwhile_is_not_overwritten_but_shown(listener: Admin):
    page = upload(listener, CHANGED, NEW)
    Auth.objects.update(mode="RW")
    page = listener.send(page, DO)
    assert "somebody else changed rules or web identities" in page.messages[0]
    assert "changed user1 OLD Topic T RW → W 9 → 10" in page.text
    assert rules() == {OLD._replace(mode="RW")}
    listener.send(page, DO)
    assert rules() == {CHANGED, NEW}, "the page kept the plan"


UNREADABLE = {
    b"\xff": "The document is not UTF-8 text: byte 0 is not valid.",
    b"{": "The document is not JSON: ",
    b'{"version":1,"rules":[{"role":"r"}]}': "Rule 1, ident: it is missing.",
    b'{"version":1,"web_identities":[{"user":"x","group":null,"ident":"i"}]}': (
        "There is no user x for the node i."
    ),
    b'{"version":1,"web_identities":[{"user":null,"group":"x","ident":"i"}]}': (
        "There is no group x for the node i."
    ),
    b"": "The submitted file is empty.",
}


def test_an_invalid_document_says_why(admin: Admin, settings: Any, monkeypatch):
    answers = {content: send(admin, content).errors[0] for content in UNREADABLE}
    wrong = [content for content in answers if not answers[content].startswith(UNREADABLE[content])]
    assert wrong == []
    assert admin.send(admin.open(IMPORT), SHOW).errors == ["This field is required."]
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10_100
    page = upload(admin, *(NEW._replace(ident=f"N{n}") for n in range(100)))
    assert "manage.py psqlmessages definitions import FILE" in page.text
    assert DO not in page.buttons
    monkeypatch.setattr(document, "MAX_BYTES", 99)
    monkeypatch.setattr(document, "read", None)
    assert send(admin, b" " * 100).errors == ["The document has 100 bytes; at most 99 are allowed."]


def test_an_altered_old_or_foreign_plan_is_not_done(admin: Admin, monkeypatch):
    page = upload(admin, NEW)
    plan = page.form(DO).values["plan"][0]
    other = admin.staff("view_auth", "add_auth", "change_auth")
    answers = [
        admin.send(page, DO, plan=plan[:-1] + ("A" if plan[-1] != "A" else "B")),
        other.send(upload(other, NEW), DO, plan=plan),
    ]
    monkeypatch.setattr(rule_transfer, "_LIFETIME", timedelta(seconds=-1))
    answers.append(admin.send(page, DO))
    text = "Nothing was saved: the page has expired or was altered. Choose the document again."
    assert [answer.messages for answer in answers] == [[text]] * 3
    assert not rules()


def test_import_takes_its_permissions_also_when_it_is_done(listener: Admin):
    for held in ("add_auth", "change_auth"):
        staff = listener.staff("view_auth", "delete_auth", held)
        assert staff.client.get(IMPORT).status_code == 403
        assert {"Import", "Export"} & set(staff.open(RULES).links) == {"Export"}
    staff = listener.staff("view_auth", "add_auth", "change_auth")
    assert "0 removed" in upload(staff, NEW, replace=True).text, "who may not is not asked"
    staff = listener.staff("view_auth", "add_auth", "change_auth", "delete_auth")
    page = upload(staff, NEW, replace=True)
    given = User.objects.latest("pk").user_permissions
    given.remove(given.get(codename="delete_auth"))
    assert staff.send(page, DO).status == 403
    assert rules() == {OLD}


LACKING = "You need these permissions: psqlmessages.add_webidentity."


def test_importing_and_exporting_web_identities_needs_the_permission(admin: Admin):
    admin.world.rule(*OLD)
    alice = User.objects.create_user("alice")
    staff = admin.staff("view_auth", "add_auth", "change_auth")
    page = upload(staff, web_identities=(ALICE,))
    assert LACKING in page.text
    assert DO not in page.buttons
    WebIdentity.objects.create(user=alice, ident="a")
    page = upload(staff, NEW, web_identities=(ALICE,))
    WebIdentity.objects.all().delete()
    assert LACKING in staff.send(page, DO).text, "the plan has come to need more"
    assert rules() == {OLD}
    staff = admin.staff("view_auth")
    assert set(json.loads(staff.client.get(f"{RULES}export/").content)) == {"version", "rules"}
    everything = json.loads(admin.client.get(f"{RULES}export/").content)
    assert everything["web_identities"] == []
    assert everything["rules"] == [OLD._asdict()]


def add(admin: Admin, **values: object) -> Page:
    return admin.send(admin.open(f"{IDENTITIES}add/"), "Save", **values)


def test_a_user_or_a_group_is_given_an_ident(admin: Admin):
    alice, traders = User.objects.create_user("alice"), Group.objects.create(name=SCRIPT)
    one = "Choose either a user or a group."
    assert add(admin, user=alice.pk, group=traders.pk, ident="x").errors == [one]
    assert add(admin, ident="x").errors == [one]
    assert add(admin, user=alice.pk, ident="").errors == ["This field is required."]
    pages = [add(admin, group=traders.pk, ident=f"{SCRIPT}*{SCRIPT}")]
    assert any("is not at the end, so" in message for message in pages[0].messages)
    pages.append(admin.open(page_of(WebIdentity.objects.get(group=traders))))
    assert all(SCRIPT in page.text for page in pages)
    assert not any("<script>alert" in page.html for page in pages)
    LogEntry.objects.all().delete()
    add(admin, user=alice.pk, ident="x")
    answer = add(admin, user=alice.pk, ident="x")
    assert answer.errors == ["This user or group already has this node."]
    path = f"{IDENTITIES}{WebIdentity.objects.get(user=alice).pk}"
    admin.send(admin.open(f"{path}/change/"), "Save", ident="y")
    admin.send(admin.open(f"{path}/delete/"), SURE)
    assert set(history()) == {"Added alice as x.", "Node: x → y", "Deleted alice as y."}
