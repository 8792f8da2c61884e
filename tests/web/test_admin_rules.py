"""Rules in the admin: a change tells whom it touches, and only what was meant is saved."""

from itertools import count

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection

from project.postgres import Server
from psqlmessages.admin import base
from psqlmessages.models import Auth
from tests.web.pages import LIST_BUTTON, RULES, SURE, Admin, page_of

SCRIPT = "<script>alert(1)</script>"
BUSY = (
    "Nothing was saved: rules cannot be changed now: another change of rules is not committed yet."
    " Commit it or roll it back, and try again: psqlmessages doctor lists open transactions."
)
UNTOUCHED = "No connected node is affected."


def modes() -> dict[str, str]:
    return dict(Auth.objects.values_list("ident", "mode"))


@pytest.fixture
def board(admin: Admin) -> Admin:
    """BOARD listens to PRICES and sends to NEWS, SENDER sends to PRICES, EYE observes all."""
    world = admin.world
    world.rules(
        "user1 BOARD Topic PRICES RW 10", "user1 BOARD Topic NEWS W 10",
        "user2 SENDER Topic PRICES W 10", "user3 EYE Topic * O 10",
    )  # fmt: skip
    world.node("user1", "BOARD", listen="PRICES", notify="NEWS")
    world.node("user2", "SENDER", notify="PRICES")
    world.node("user3", "EYE", observe="PRI*")
    return admin


def test_a_change_names_the_nodes_that_it_ended_and_affects(board: Admin):
    page = board.open(f"{RULES}add/")
    assert f"This site connects as {Server.owner}." in page.text
    page = board.add_rule("user1 ELSE Topic ORDERS R 10")
    assert UNTOUCHED in page.messages
    page = board.add_rule("user1 B* Topic ORDERS R 10")
    assert "Applies to the connected node BOARD." in page.messages
    assert board.edit_list(board.open(RULES), {}).messages == []
    # Django answers a filter that no name can match with the whole list.
    assert board.client.get(f"{RULES}?ident=%00").headers["Location"] == f"{RULES}?e=1"
    page = board.send(board.open_rule(ident="EYE"), "Save", dest="NEWS*")
    assert "Immediately: EYE no longer observes PRI*." in page.messages
    board.world.rules("user1 BO* Topic PRI* R 10")
    page = board.send(board.open_rule(ident="BOARD", dest="PRICES"), "Save", mode="W")
    # Another rule gives it.
    assert not any(text.startswith("Immediately") for text in page.messages)
    Auth.objects.filter(ident="BO*").delete()
    keys = dict(Auth.objects.filter(dest="PRICES").values_list("ident", "pk"))
    page = board.edit_list(board.open(RULES), {keys["SENDER"]: {"mode": "R"}})
    assert "Immediately: SENDER no longer sends to PRICES." in page.messages
    page = board.send(board.open_rule(ident="SENDER"), "Save", ident="BOARD")
    assert page.messages[1:] == ["Immediately: SENDER is disconnected."], "BOARD is user1's"
    board.world.kill(board.world.programs[3])
    page = board.add_rule("user3 EYE Topic ORDERS R 10")
    assert UNTOUCHED in page.messages, "its connection is gone"


def test_a_deletion_names_the_affected_nodes_before_it_is_done(board: Admin):
    name = f"\u202e{SCRIPT}"
    board.world.rules(f"user2 {name} Topic T R 10")
    board.world.node("user2", name)
    rules = Auth.objects.filter(ident__in=["BOARD", name])
    assert board.client.get(f"{RULES}none/delete/").status_code == 302
    # U+202E reverses only the name.
    shown = f"Affected connected nodes: \u2068{name}\u2069\u2069 . They lose immediately"
    page = board.open(page_of(rules.get(ident=name), "delete"))
    assert shown in page.text
    assert SCRIPT not in page.html
    page = board.act(RULES, "delete_selected", *(rule.pk for rule in rules))
    assert f"Affected connected nodes: BOARD, \u2068{name}" in page.text
    assert rules.count() == 3
    answer = board.send(page, SURE)
    assert SCRIPT not in page.html + answer.html
    ended = answer.messages[1]
    assert "BOARD is disconnected" in ended
    assert f"\u2068{name}\u2069\u2069 is disconnected" in ended


def test_the_history_shows_past_and_present_values(admin: Admin):
    name = "N" * 100
    admin.world.rules(f"user1 {name} Topic T R 10")
    admin.send(admin.open_rule(ident=name), "Save", mode="RW", timeout="20")
    page = admin.follow(admin.open_rule(ident=name), "History")
    assert "Mode: R → RW; Timeout: 10 → 20" in page.text
    page = admin.follow(admin.open_rule(ident=name), "Delete")
    assert "No connected node is affected." in page.text
    admin.send(page, SURE)
    assert LogEntry.objects.latest("pk").change_message == f"Deleted {name} (user1): RW Topic T."


ODD = {
    "nobody A Topic T R 9": "PostgreSQL has no role nobody: the rule has no effect",
    "user1 A*B Topic T R 9": "The * in the node A*B is not at the end, so",
    "user1 A Topic *T* R 9": "The * in the destination *T* is not at the end, so",
}
NOT_FOR_RPC = " is not valid for Rpc: a rule allows calling (W), and answering needs no rule."
REFUSED = {
    "user1 A Rpc B R 9": "Mode R" + NOT_FOR_RPC,
    "user1 A Queue B O 9": "Mode O is for topics only: a queue cannot be observed.",
    "user1 A Topic B R 0": "The timeout must be 1 second or more.",
    "user1 A Topic B R 2147483648": "The timeout must be 2,147,483,647 seconds or less.",
    f"user1 {'A' * 101} Topic B R 9": "Ensure this value has at most 100 characters (it has 101).",
    f"{'r' * 64} A Topic B R 9": "Ensure this value has at most 63 characters (it has 64).",
    "user1 A Stream B R 9": "Select a valid choice. Stream is not one of the available choices.",
    "user1 TAKEN Topic T W 9": "This role, node, type and destination already have a rule.",
}


def test_suspicious_values_are_saved_with_a_warning(admin: Admin):
    assert [rule for rule in ODD if ODD[rule] not in " ".join(admin.add_rule(rule).messages)] == []
    page = admin.add_rule("user1 A Topic T R 9", dest="T ")
    blank = "The destination “T ” begins or ends with a space, which is part of the name."
    assert blank in page.messages
    assert Auth.objects.filter(dest="T ").exists()
    assert Auth.objects.count() == len(ODD) + 1
    for ordinary in ("user1 A Queue Q RW 9", "user1 A* Topic T.* R 9"):
        assert admin.add_rule(ordinary).messages[1:] == [UNTOUCHED]


def test_meaningless_options_are_refused(admin: Admin):
    admin.world.rules("user1 TAKEN Topic T R 9", "user1 ASKER Rpc B W 9")
    answers = {rule: admin.add_rule(rule).errors for rule in REFUSED}
    assert answers == {rule: [text] for rule, text in REFUSED.items()}
    assert admin.add_rule("user1 A Topic T R 9", ident="").errors == ["This field is required."]
    rpc, topic = Auth.objects.get(type="Rpc").pk, Auth.objects.get(type="Topic").pk
    page = admin.edit_list(admin.open(RULES), {rpc: {"mode": "RW"}, topic: {"timeout": "20"}})
    assert page.errors == ["Mode RW" + NOT_FOR_RPC]
    assert Auth.objects.get(type="Topic").timeout == 9, "all or nothing"
    assert Auth.objects.count() == 2


def test_a_save_that_times_out_keeps_the_input(admin: Admin, monkeypatch):
    admin.world.rules("user1 A Topic T R 9", "user1 B Topic T R 9")
    waits, lock_rules = count(), base.lock_rules
    monkeypatch.setattr(base, "lock_rules", lambda: (next(waits), lock_rules()))
    form, listed = admin.open_rule(ident="A"), admin.open(RULES)
    asked = admin.follow(form, "Delete")
    keys = list(Auth.objects.values_list("pk", flat=True))
    selected = admin.act(RULES, "delete_selected", keys[0])
    # Another administrator has not committed.
    sitter = admin.world.program().connection
    with sitter.transaction(force_rollback=True), connection.cursor() as cursor:
        sitter.execute("UPDATE messages.auth SET timeout = 10 WHERE ident = 'NOBODY'")
        cursor.execute("SET lock_timeout = '50ms'")
        form = admin.send(form, "Save", mode="W", timeout="77")
        assert (form.status, form.errors, next(waits)) == (200, [BUSY], 1)
        assert form.form("Save").values["timeout"] == ["77"]
        listed = admin.edit_list(listed, {key: {"mode": "W"} for key in keys})
        assert (listed.errors, next(waits)) == ([BUSY, BUSY], 3), "it waits once for all rows"
        for question in (asked, selected):
            page = admin.send(question, SURE)
            assert (page.status, page.messages) == (200, [BUSY])
        cursor.execute("RESET lock_timeout")
    assert modes() == {"A": "R", "B": "R"}
    assert not LogEntry.objects.exists(), "nothing was done, so the history says nothing"
    admin.send(listed, LIST_BUTTON)
    assert modes() == {"A": "W", "B": "W"}


def test_changes_of_another_user_are_not_overwritten(admin: Admin):
    admin.world.rules("user1 A Topic T RW 9", "user1 B Topic T RW 9")
    page, listed = admin.open_rule(ident="A"), admin.open(RULES)
    Auth.objects.filter(ident="A").update(mode="W")
    (error,) = admin.send(page, "Save", timeout="20").errors
    assert error.startswith("Somebody else changed this rule: Mode is now W.")
    admin.edit_list(listed, {Auth.objects.get(ident="B").pk: {"timeout": "20"}})
    assert modes() == {"A": "W", "B": "RW"}, "the list gives back no right that was revoked"
    assert Auth.objects.get(ident="B").timeout == 20
    page, listed = admin.open_rule(ident="A"), admin.open(RULES)
    key = Auth.objects.get(ident="A").pk
    Auth.objects.filter(ident="A").delete()
    assert "exist. Perhaps it was deleted?" in admin.send(page, "Save", timeout="20").text
    admin.edit_list(listed, {key: {"timeout": "20"}})
    assert list(modes()) == ["B"]


def test_a_change_during_a_save_is_not_overwritten(admin: Admin, monkeypatch):
    admin.world.rules("user1 A Topic T RW 9")
    other, listed = admin.world.owner.connection, admin.open(RULES)
    lock_rules, acts = base.lock_rules, ["UPDATE messages.auth SET ident = 'B'"]

    def act_and_lock() -> None:
        while acts:
            other.execute(acts.pop())
        lock_rules()

    # After the rule was read, and before all rules are locked.
    monkeypatch.setattr(base, "lock_rules", act_and_lock)
    admin.edit_list(listed, {Auth.objects.get().pk: {"timeout": "20"}})
    assert list(Auth.objects.values_list("ident", "timeout")) == [("B", 20)]
    page = admin.open_rule(ident="B")
    acts.append("DELETE FROM messages.auth")
    assert admin.send(page, "Save", timeout="30").errors == ["Somebody else deleted this rule."]
    assert not Auth.objects.exists()
