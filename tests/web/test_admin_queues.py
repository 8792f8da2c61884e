"""Queues in the admin: the list, one queue's page, and what can be done to queues."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, transaction
from pytest_django import DjangoAssertNumQueries

from psqlmessages.models import Element, Queue
from tests.sql.conftest import Program
from tests.web.desks import Desk
from tests.web.visitor import Page, Visitor

QUEUES = "/admin/psqlmessages/queue/"
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def worker(desk: Desk) -> Program:
    """A program of user1 that may do all with every queue, as W."""
    desk.world.rules("user1 W Queue * RW 60")
    return desk.world.program("user1")


def push(worker: Program, queue: str, number: int = 1, **options: object) -> None:
    for _ in range(number):
        named = "".join(f", {name} => %s" for name in options)
        text = f"SELECT messages.push('W', %s, 'x'{named})"
        worker.connection.execute(text, [queue, *options.values()])


def page_of(name: str) -> str:
    return f"{QUEUES}{Queue.objects.get(name=name).pk}/change/"


def act(visitor: Visitor, action: str, *names: str) -> Page:
    keys = [str(Queue.objects.get(name=name).pk) for name in names]
    return visitor.send(visitor.open(QUEUES), "0", action=action, _selected_action=keys, index="0")


# The list


def test_a_queue_is_listed_with_what_it_holds_by_state(desk: Desk, worker: Program) -> None:
    push(worker, "orders", 4)
    push(worker, "orders", 2, delay=60)
    worker.query("SELECT lease FROM messages.reserve('W', 'orders')")
    assert "orders open 6 3 2 1 " in desk.open(QUEUES).text


def test_what_happened_is_counted_in_the_list(desk: Desk, worker: Program) -> None:
    push(worker, "orders", 3)
    worker.query("SELECT id FROM messages.pop('W', 'orders')")
    lease = worker.query("SELECT lease FROM messages.reserve('W', 'orders')")
    worker.ok("commit", "W", lease)
    assert "open 1 1 0 0 - 3 1 1 1 0 0 " in desk.open(QUEUES).text


def test_where_dead_letters_go_is_listed_where_there_are_any(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    Queue.objects.update(max_tries=3)
    assert "0 0 3 tries, to __deadletter__ 1" in desk.open(QUEUES).text


def test_more_than_ten_thousand_are_not_counted_one_by_one(desk: Desk, worker: Program) -> None:
    worker.connection.execute(
        "SELECT messages.push_many('W', 'full', array_fill('x'::text, ARRAY[4000]))"
        " FROM generate_series(1, 3)"
    )
    assert "full open over 10,000 over 10,000 0 0" in desk.open(QUEUES).text


def test_all_numbers_of_the_page_take_one_statement(
    desk: Desk, worker: Program, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(40):
        push(worker, f"queue {number}")
    with django_assert_max_num_queries(10):
        assert "40 queues" in desk.open(QUEUES).text


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("paused", "halted"), ("filled", "orders"), ("empty", "halted"), ("dead", "__deadletter__")
    ],
)  # fmt: skip
def test_queues_are_filtered_by_state(desk: Desk, worker: Program, state: str, shown: str) -> None:
    push(worker, "orders")
    worker.ok("pause", "W", "halted")
    push(worker, "__deadletter__")
    page = desk.open(f"{QUEUES}?state={state}")
    listed = [name for name in ("orders", "halted", "__deadletter__") if name in page.links]
    assert shown in listed
    assert len(listed) < 3


# One queue


def test_settings_are_edited_and_nothing_else_is_written(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    page = desk.open(page_of("orders"))
    # In between, somebody pauses it.
    worker.ok("pause", "W", "orders")
    desk.send(page, "Save", max_tries="3", dead_letter_queue="lost", key_timeout="60")
    queue = Queue.objects.get(name="orders")
    assert (queue.max_tries, queue.dead_letter_queue, queue.key_timeout) == (3, "lost", 60)
    assert queue.is_paused
    assert "Max tries: None → 3" in LogEntry.objects.get().change_message


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("max_tries", "0", "The most tries are 1 or more, or not limited."),
        ("dead_letter_queue", "a*", "ends in *: that is a pattern, and no name."),
        ("key_timeout", "0", "A key counts for 1 second or more."),
    ],
)
def test_settings_that_cannot_be_are_refused(
    desk: Desk, worker: Program, field: str, value: str, sentence: str
) -> None:
    push(worker, "orders")
    page = desk.send(desk.open(page_of("orders")), "Save", **{field: value})
    assert sentence in page.text


def test_a_queue_can_be_made_with_its_settings_before_anybody_uses_it(
    desk: Desk, worker: Program
) -> None:
    desk.send(desk.open(f"{QUEUES}add/"), "Save", name="fresh", max_tries="5")
    queue = Queue.objects.get()
    assert (queue.name, queue.max_tries) == ("fresh", 5)
    # It has the channel that SQL draws, on which readers wait.
    assert worker.ok("queue_listen", "W", "fresh")["Channel"] == queue.channel != ""


def test_a_name_that_is_there_is_refused(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    page = desk.send(desk.open(f"{QUEUES}add/"), "Save", name="orders")
    assert "already exists" in page.text


def test_the_page_shows_the_rules_about_it(desk: Desk, worker: Program) -> None:
    desk.world.rules("user2 R Queue ord* R 60", "user2 NOT Queue other R 60")
    push(worker, "orders")
    page = desk.open(page_of("orders"))
    assert "user2 R ord* R" in page.text
    assert "NOT" not in page.text


def test_names_are_shown_as_text(desk: Desk, worker: Program) -> None:
    push(worker, HOSTILE)
    for page in (desk.open(QUEUES), desk.open(page_of(HOSTILE))):
        assert HOSTILE in page.text
        assert HOSTILE not in page.html


# What can be done


def test_a_paused_queue_gives_nothing_and_a_resumed_one_does(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    page = act(desk, "pause_selected", "orders")
    assert page.messages == ["Paused: orders."]
    assert worker.query("SELECT count(*) FROM messages.pop('W', 'orders')") == 0
    act(desk, "resume_selected", "orders")
    assert worker.query("SELECT count(*) FROM messages.pop('W', 'orders')") == 1
    texts = LogEntry.objects.order_by("id").values_list("change_message", flat=True)
    assert list(texts) == ["Paused.", "Resumed."]


def test_resuming_wakes_who_waits(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    act(desk, "pause_selected", "orders")
    worker.ok("queue_listen", "W", "orders")
    act(desk, "resume_selected", "orders")
    assert worker.headers(1)[0]["Evt"] == "pushed"


def test_what_is_so_already_is_told_and_not_logged(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    page = act(desk, "resume_selected", "orders")
    assert page.messages == ["Resumed already: orders."]
    assert not LogEntry.objects.exists()


def test_the_button_of_the_page_leads_back_to_it(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    page = desk.send(desk.open(page_of("orders")), "Pause")
    assert page.url.endswith(page_of("orders"))
    assert "Resume" in [button for form in page.forms for button in form.buttons]


def test_draining_asks_first_and_leaves_what_cannot_be_taken(desk: Desk, worker: Program) -> None:
    push(worker, "orders", 3)
    push(worker, "orders", delay=60)
    worker.query("SELECT lease FROM messages.reserve('W', 'orders')")
    page = act(desk, "drain_selected", "orders")
    assert "orders: 4 elements now" in page.text
    assert Element.objects.count() == 4
    page = desk.send(page, "Drain")
    assert page.messages == ["Removed from orders: 2 elements."]
    assert Element.objects.count() == 2
    assert LogEntry.objects.get().change_message == "Drained: 2 elements removed."


def test_an_empty_queue_is_deleted_with_what_was_counted(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    worker.query("SELECT count(*) FROM messages.pop('W', 'orders')")
    page = desk.send(act(desk, "delete_empty", "orders"), "Delete")
    assert page.messages == ["Deleted: orders."]
    assert not Queue.objects.exists()
    assert LogEntry.objects.get().change_message == "Deleted."


def test_a_queue_with_elements_is_not_deleted(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    page = desk.send(act(desk, "delete_empty", "orders"), "Delete")
    assert page.messages == ["Not deleted, as it has elements: orders. Drain it first."]
    assert Element.objects.count() == 1
    assert not LogEntry.objects.exists()


def test_deleting_does_not_wait_for_long(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    worker.query("SELECT count(*) FROM messages.pop('W', 'orders')")
    page = act(desk, "delete_empty", "orders")
    worker.connection.autocommit = False
    push(worker, "other")
    page = desk.send(page, "Delete")
    worker.connection.rollback()
    assert "lock timeout" in page.messages[0]
    assert Queue.objects.filter(name="orders").exists()


@pytest.mark.usefixtures("impatient")
def test_pausing_does_not_wait_for_long(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    worker.connection.autocommit = False
    worker.ok("pause", "W", "orders")
    page = act(desk, "pause_selected", "orders")
    worker.connection.rollback()
    assert page.messages == ["Nothing was saved: canceling statement due to lock timeout."]
    assert not Queue.objects.get().is_paused
    assert not LogEntry.objects.exists()


@pytest.mark.usefixtures("impatient")
def test_saving_does_not_wait_for_long(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    page = desk.open(page_of("orders"))
    worker.connection.autocommit = False
    worker.ok("pause", "W", "orders")
    page = desk.send(page, "Save", max_tries="3")
    worker.connection.rollback()
    assert page.messages == ["Nothing was saved: canceling statement due to lock timeout."]
    assert Queue.objects.get().max_tries is None
    assert not LogEntry.objects.exists()


@pytest.mark.usefixtures("impatient")
def test_making_a_queue_that_somebody_makes_does_not_wait_for_long(
    desk: Desk, worker: Program
) -> None:
    page = desk.open(f"{QUEUES}add/")
    worker.connection.autocommit = False
    push(worker, "orders")
    page = desk.send(page, "Save", name="orders")
    worker.connection.rollback()
    assert page.messages == ["Nothing was saved: canceling statement due to lock timeout."]
    assert not Queue.objects.exists()


@pytest.mark.parametrize(
    ("permission", "offered"),
    [
        ("change_queue", {"pause_selected", "resume_selected"}),
        ("delete_element", {"drain_selected"}),
        ("delete_queue", {"delete_empty"}),
    ],
)
def test_each_act_takes_its_permission(
    desk: Desk, worker: Program, permission: str, offered: set[str]
) -> None:
    push(worker, "orders")
    form = desk.staff("view_queue", permission).open(QUEUES).form("0")
    assert set(form.choices["action"]) - {""} == offered


def test_who_may_only_look_can_do_nothing(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    looker = desk.staff("view_queue")
    page = looker.open(page_of("orders"))
    assert not [b for form in page.forms for b in form.buttons if b in ("Pause", "Drain…", "Save")]
    given = {"action": "drain_selected", "confirmed": "yes"}
    key = Queue.objects.get().pk
    looker.client.handler.enforce_csrf_checks = False
    looker.client.post(QUEUES, {**given, "_selected_action": key})
    assert Element.objects.count() == 1


def test_the_secret_channel_is_not_even_read(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    channel = Queue.objects.get().channel
    assert channel
    for path in (QUEUES, page_of("orders")):
        assert channel not in desk.open(path).html


def test_the_sizes_of_a_list_come_by_the_index(desk: Desk, worker: Program) -> None:
    push(worker, "orders")
    from psqlmessages.graph.sizes import SIZES, limits

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN SELECT {SIZES} FROM psqlmessages_queue", limits(10))
        plan = "\n".join(line for (line,) in cursor.fetchall())
    # Which of the indexes begins with the queue and is the cheapest, the statistics of the day say.
    assert plan.count(" on psqlmessages_element ") == plan.count("Index Cond: ((queue_id =") >= 3
