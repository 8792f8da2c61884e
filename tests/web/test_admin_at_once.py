"""Rules in the admin that somebody else is changing, or holds up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from psycopg.errors import LockNotAvailable

from psqlmessages.admin import calls, touched
from psqlmessages.models import Auth
from tests.web.desks import LIST_BUTTON, RULES, SURE, Desk
from tests.web.visitor import Page

BUSY = (
    "Nothing was saved: rules cannot be changed now: another change of rules is not committed yet."
    " End it, and try again: psqlmessages doctor names who sits in a transaction."
)


def modes() -> dict[str, str]:
    return dict(Auth.objects.values_list("ident", "mode"))


# Rules that cannot be changed now


@contextmanager
def held_up(desk: Desk) -> Iterator[None]:
    """Within, another administrator has not committed; whoever waits gives up early."""
    sitter = desk.world.program()
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '50ms'")
    sitter.connection.execute("BEGIN")
    sitter.connection.execute("UPDATE messages.auth SET timeout = 10 WHERE ident = 'NOBODY'")
    yield
    sitter.connection.execute("ROLLBACK")
    with connection.cursor() as cursor:
        cursor.execute("RESET lock_timeout")


def test_a_rule_that_must_wait_too_long_is_kept_in_the_form(desk: Desk) -> None:
    desk.world.rules("user1 A Topic T R 9")
    page = desk.open_rule(ident="A")
    with held_up(desk):
        page = desk.send(page, "Save", mode="W", timeout="77")
        assert (page.status, page.errors) == (200, [BUSY])
        assert page.form("Save").values["timeout"] == ["77"]
        assert modes()["A"] == "R"
    page = desk.send(page, "Save")
    assert modes()["A"] == "W"


def test_a_list_that_must_wait_too_long_is_kept_and_waits_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.world.rules("user1 A Topic T R 9", "user1 B Topic T R 9")
    waits, close_gate = count(), calls.close_gate
    monkeypatch.setattr(calls, "close_gate", lambda: (next(waits), close_gate()))
    page = desk.open(RULES)
    keys = list(Auth.objects.values_list("pk", flat=True))
    with held_up(desk):
        page = desk.edit_list(page, {key: {"mode": "W"} for key in keys})
        assert page.errors == [BUSY, BUSY]
        assert next(waits) == 1
    desk.send(page, LIST_BUTTON)
    assert [modes()["A"], modes()["B"]] == ["W", "W"]


@pytest.mark.parametrize("path", ["one", "many"])
def test_a_deletion_that_must_wait_too_long_says_why(desk: Desk, path: str) -> None:
    desk.world.rules("user1 A Topic T R 9")
    page = ask_for_deletion(desk, path)
    with held_up(desk):
        page = desk.send(page, SURE)
        assert (page.status, page.messages) == (200, [BUSY])
        assert "A" in modes()
    assert not LogEntry.objects.exists(), "nothing was deleted, so the history says nothing"


def ask_for_deletion(desk: Desk, path: str) -> Page:
    if path == "one":
        return desk.follow(desk.open_rule(ident="A"), "Delete")
    key = Auth.objects.get(ident="A").pk
    return desk.send(
        desk.open(RULES), "0", action="delete_selected", _selected_action=[key], index="0"
    )


# Two administrators


def while_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have something done, once, between the look at a rule and the hold-up of all others."""
    close_gate, acts = calls.close_gate, [act]

    def act_and_close() -> None:
        while acts:
            acts.pop()()
        close_gate()

    monkeypatch.setattr(calls, "close_gate", act_and_close)


def test_a_right_revoked_meanwhile_is_not_given_back_by_the_list(desk: Desk) -> None:
    desk.world.rules("user1 A Topic T RW 9", "user1 B Topic T RW 9")
    page = desk.open(RULES)
    Auth.objects.filter(ident="A").update(mode="W")
    page = desk.edit_list(page, {Auth.objects.get(ident="B").pk: {"timeout": "20"}})
    assert modes() == {"A": "W", "B": "RW"}


def test_a_rule_changed_by_both_is_refused_to_the_second(desk: Desk) -> None:
    desk.world.rules("user1 A Topic T RW 9")
    page = desk.open_rule(ident="A")
    Auth.objects.update(mode="W")
    page = desk.send(page, "Save", timeout="20")
    (error,) = page.errors
    assert error.startswith("Somebody changed this rule meanwhile: Mode is now W.")
    assert modes() == {"A": "W"}


def test_a_rule_deleted_meanwhile_is_not_brought_back(desk: Desk) -> None:
    desk.world.rules("user1 A Topic T RW 9")
    page, listed, key = desk.open_rule(ident="A"), desk.open(RULES), Auth.objects.get().pk
    Auth.objects.all().delete()
    assert "exist. Perhaps it was deleted?" in desk.send(page, "Save", timeout="20").text
    desk.edit_list(listed, {key: {"timeout": "20"}})
    assert not Auth.objects.exists()


def test_a_rule_deleted_while_the_change_waits_is_not_brought_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.world.rules("user1 A Topic T RW 9")
    page, other = desk.open_rule(ident="A"), desk.world.owner.connection
    while_waiting(monkeypatch, lambda: other.execute("DELETE FROM messages.auth"))
    page = desk.send(page, "Save", timeout="20")
    assert page.errors == ["Somebody deleted this rule meanwhile."]
    assert not Auth.objects.exists()


def test_a_rule_renamed_while_the_list_waits_keeps_its_new_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.world.rules("user1 A Topic T RW 9")
    page, other = desk.open(RULES), desk.world.owner.connection
    while_waiting(monkeypatch, lambda: other.execute("UPDATE messages.auth SET ident = 'B'"))
    desk.edit_list(page, {Auth.objects.get().pk: {"timeout": "20"}})
    assert list(Auth.objects.values_list("ident", "timeout")) == [("B", 20)]


def test_no_node_leaves_between_the_looks_before_and_after(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.world.rules("user1 A Topic T RW 9")
    node = desk.world.node("user1", "A")
    node.ok("topic_listen", "T")
    node.connection.execute("SET lock_timeout = '50ms'")
    doings = touched._doings

    def look_and_leave(nodes: list[int]) -> set[touched.Doing]:
        with pytest.raises(LockNotAvailable):
            node.call("topic_unlisten", "T")
        return doings(nodes)

    page = desk.follow(desk.open_rule(ident="A"), "Delete")
    monkeypatch.setattr(touched, "_doings", look_and_leave)
    assert "At once, A is disconnected." in desk.send(page, SURE).messages
