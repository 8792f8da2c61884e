"""Queues in the admin: the list, one queue's page, its elements, and what can be done to queues."""

import json
import re

import pytest

from psqlmessages.admin.queue_elements import BODY_CHARACTERS, PAGE_SIZE
from psqlmessages.models import Element, Queue
from tests.sql.conftest import Program
from tests.web.pages import QUEUES, TOO_LONG, Admin, Page, history, page_of

HOSTILE = "</pre><script>alert(1)</script>"
TAKE = "SELECT lease FROM messages.reserve('W', %s)"


@pytest.fixture
def worker(admin: Admin) -> Program:
    admin.world.rules("user1 W Queue * RW 60")
    return admin.world.program("user1")


def push(worker: Program, queue: str, *bodies: str, headers: object = None) -> None:
    worker.connection.execute(
        "SELECT messages.push_many('W', %s, %s, headers => %s)",
        [queue, list(bodies), headers and [json.dumps(headers)] * len(bodies)],
    )


def push_later(worker: Program, queue: str) -> None:
    worker.connection.execute("SELECT messages.push('W', %s, 'later', delay => 3600)", [queue])


def queue_page(name: str, part: str = "change") -> str:
    return page_of(Queue.objects.get(name=name), part)


def act(admin: Admin, action: str, name: str) -> Page:
    return admin.act(QUEUES, action, Queue.objects.get(name=name).pk)


def held(queue: str) -> int:
    return Element.objects.filter(queue__name=queue).count()


def test_the_list_tells_sizes_by_state_counters_and_dead_letters(admin: Admin, worker: Program):
    push(worker, "orders", *"xxxx")
    push_later(worker, "orders")
    push_later(worker, "orders")
    worker.query(TAKE, "orders")
    assert "orders open 6 3 2 1 " in admin.open(QUEUES).text
    push(worker, "done", *"xxx")
    worker.query("SELECT id FROM messages.pop('W', 'done')")
    worker.ok("commit", "W", worker.query(TAKE, "done"))
    assert "done open 1 1 0 0 0 - " in admin.open(QUEUES).text
    assert "Removed 3 1 1 1 0 0 0 " in admin.open(page_of(Queue.objects.get(name="done"))).text
    Queue.objects.filter(name="done").update(max_tries=3)
    assert "0 0 0 3 failed attempts, to __deadletter__" in admin.open(QUEUES).text
    worker.connection.execute(
        "SELECT messages.push_many('W', 'full', array_fill('x'::text, ARRAY[4000]))"
        " FROM generate_series(1, 3)"
    )
    # The largest backlog is first.
    text = admin.open(f"{QUEUES}?o=3").text
    assert "full open 12,000 over 1,000 0 0" in text
    assert text.index("full open") < text.index("orders open") < text.index("done open")
    assert (
        "open over 10,000 over 10,000 0 0"
        in admin.open(page_of(Queue.objects.get(name="full"))).text
    )


def test_the_list_is_filtered_by_state(admin: Admin, worker: Program):
    push(worker, "orders", "x")
    worker.ok("queue_listen", "W", "halted")
    worker.ok("pause", "W", "halted")
    push(worker, "__deadletter__", "x")
    found = {}
    for state in ("paused", "filled", "empty", "dead"):
        links = admin.open(f"{QUEUES}?state={state}").links
        found[state] = {"orders", "halted", "__deadletter__"} & links.keys()
    assert found["paused"] == found["empty"] == {"halted"}
    assert {"orders"} <= found["filled"] <= {"orders", "__deadletter__"}
    assert found["dead"] == {"__deadletter__"}


def test_settings_are_edited_and_nothing_else_is_written(admin: Admin, worker: Program):
    admin.world.rules("user2 R Queue ord* R 60", "user2 NOT Queue other R 60")
    push(worker, "orders", "x")
    page = admin.open(queue_page("orders"))
    assert "user2 R ord* R" in page.text
    assert "NOT" not in page.text
    # Another session pauses it.
    worker.ok("pause", "W", "orders")
    admin.send(page, "Save", max_tries="3", dead_letter_queue="lost", key_timeout="60")
    queue = Queue.objects.get(name="orders")
    assert (queue.max_tries, queue.dead_letter_queue, queue.key_timeout) == (3, "lost", 60)
    assert queue.is_paused
    assert "Max attempts: None → 3" in history()[0]
    refused = {
        ("max_tries", "0"): "The number of attempts is 1 or more, or empty for no limit.",
        ("dead_letter_queue", "a*"): "ends in *: this is a pattern, not a name.",
        ("key_timeout", "0"): "The key timeout is 1 second or more.",
    }
    for (field, value), said in refused.items():
        text = admin.send(admin.open(queue_page("orders")), "Save", **{field: value}).text
        assert said in text, (field, value)


def test_a_queue_is_made_with_its_settings_before_anybody_uses_it(admin: Admin, worker: Program):
    admin.send(admin.open(f"{QUEUES}add/"), "Save", name="fresh", max_tries="5")
    queue = Queue.objects.get()
    assert (queue.name, queue.max_tries) == ("fresh", 5)
    # Readers wait on its channel.
    assert worker.ok("queue_listen", "W", "fresh")["Channel"] == queue.channel != ""
    assert "already exists" in admin.send(admin.open(f"{QUEUES}add/"), "Save", name="fresh").text
    # The channel is secret.
    assert queue.channel not in admin.open(QUEUES).html + admin.open(queue_page("fresh")).html


def test_a_paused_queue_gives_nothing_and_resuming_wakes_readers(admin: Admin, worker: Program):
    push(worker, "orders", "x")
    assert act(admin, "resume_selected", "orders").messages == ["Resumed already: orders."]
    assert history() == []
    page = admin.send(admin.open(queue_page("orders")), "Pause")
    assert page.url.endswith(queue_page("orders")), "the button leads back"
    assert "Resume" in page.buttons
    assert worker.query("SELECT count(*) FROM messages.pop('W', 'orders')") == 0
    worker.ok("queue_listen", "W", "orders")
    act(admin, "resume_selected", "orders")
    assert worker.headers(1)[0]["Evt"] == "pushed"
    assert worker.query("SELECT count(*) FROM messages.pop('W', 'orders')") == 1
    assert act(admin, "pause_selected", "orders").messages == ["Paused: orders."]
    assert history() == ["Paused.", "Resumed.", "Paused."]


def test_draining_and_deleting_ask_first_and_spare_reserved_elements(admin: Admin, worker: Program):
    push(worker, "orders", *"xxx")
    push_later(worker, "orders")
    lease = worker.query(TAKE, "orders")
    page = act(admin, "drain_selected", "orders")
    assert "orders : 4 elements now" in page.text
    assert held("orders") == 4
    assert admin.send(page, "Drain").messages == ["Removed from orders: 2 elements."]
    assert held("orders") == 2
    page = admin.send(act(admin, "delete_empty", "orders"), "Delete")
    assert page.messages == ["Not deleted because it has elements: orders. Drain it first."]
    worker.ok("commit", "W", lease)
    Element.objects.all().delete()
    page = admin.send(act(admin, "delete_empty", "orders"), "Delete")
    assert page.messages == ["Deleted: orders."]
    assert not Queue.objects.exists()
    assert history() == ["Drained: 2 elements removed.", "Deleted."]


@pytest.mark.usefixtures("impatient")
def test_no_act_waits_long_for_transactions_of_programs(admin: Admin, worker: Program):
    push(worker, "orders", "x")
    worker.query("SELECT count(*) FROM messages.pop('W', 'orders')")
    form, new = admin.open(queue_page("orders")), admin.open(f"{QUEUES}add/")
    asked = act(admin, "delete_empty", "orders")
    worker.connection.autocommit = False
    worker.ok("pause", "W", "orders")
    push(worker, "fresh", "x")
    answers = [
        act(admin, "pause_selected", "orders"), admin.send(form, "Save", max_tries="3"),
        admin.send(new, "Save", name="fresh"), admin.send(asked, "Delete"),
    ]  # fmt: skip
    worker.connection.rollback()
    assert [page.messages for page in answers[:3]] == [[TOO_LONG]] * 3
    assert "lock timeout" in answers[3].messages[0]
    queue = Queue.objects.get()
    assert (queue.name, queue.is_paused, queue.max_tries) == ("orders", False, None)
    assert history() == []


def test_elements_are_shown_as_text_with_their_state_but_no_lease(admin: Admin, worker: Program):
    push(worker, "orders", "first body", headers={"country": "it"})
    push_later(worker, "orders")
    page = admin.follow(admin.open(queue_page("orders")), "Elements")
    assert "Elements of orders" in page.text
    for text in ('{"country": "it"}', "text, 10 bytes first body", "scheduled until"):
        assert text in page.text
    lease = worker.query(TAKE, "orders")
    page = admin.open(queue_page("orders", "elements"))
    assert "reserved until" in page.text
    assert str(Element.objects.exclude(lease=None).get().lease) not in page.html
    assert lease not in page.html
    push(worker, "lost", "y")
    worker.query("SELECT lease FROM messages.reserve('W', 'lost', 1, 0.001)")
    matured = "SELECT bool_and(available_at < now()) FROM psqlmessages_element WHERE body = 'y'"
    admin.world.wait_for(matured)
    assert " available " in admin.open(queue_page("lost", "elements")).text
    push(worker, HOSTILE, HOSTILE, headers={HOSTILE: HOSTILE, "x-dl-from-queue": HOSTILE})
    page = admin.open(queue_page(HOSTILE, "elements"))
    assert "<script>alert" not in page.html
    assert page.text.count("<script>alert(1)</script>") >= 4
    push(worker, "long", "y" * 100_000)
    html = admin.open(queue_page("long", "elements")).html
    assert html.count("y" * BODY_CHARACTERS + "…") == 1
    assert "y" * (BODY_CHARACTERS + 1) not in html


def test_acts_elements_and_bodies_take_their_permissions(admin: Admin, worker: Program):
    push(worker, "orders", "the secret", headers={"country": "it"})
    for permission, offered in (
        ("change_queue", {"pause_selected", "resume_selected"}),
        ("delete_element", {"drain_selected"}),
        ("delete_queue", {"delete_empty"}),
    ):
        form = admin.staff("view_queue", permission).open(QUEUES).form("0")
        assert set(form.choices["action"]) - {""} == offered
    path = queue_page("orders", "elements")
    for permissions in (("view_queue",), ("view_element",), ()):
        assert admin.staff(*permissions).client.get(path).status_code == 403
    page = admin.staff("view_queue", "view_element").open(path)
    assert "the secret" not in page.html
    assert "psqlmessages.view_bodies" in page.text
    assert '{"country": "it"}' in page.text
    assert "the secret" in admin.staff("view_queue", "view_element", "view_bodies").open(path).text


NONSENSE = (
    "time=x&id=1", "time=2026-13-45&id=1", "time=2026-01-01&id=y", "id=9", "order=zzz",
    *(f"time=2026-01-01T00:00:00%2B00:00&id={'9' * digits}" for digits in (19, 5000)),
)  # fmt: skip


def test_pages_of_elements(admin: Admin, worker: Program, django_assert_max_num_queries):
    # All are available since the same moment, so the id decides the order.
    push(worker, "orders", *(f"body-{number}-" for number in range(PAGE_SIZE + 20)))
    path = queue_page("orders", "elements")
    for order in ("first", "last"):
        page = admin.open(f"{path}?order={order}")
        texts = [page.text, admin.follow(page, "Next page").text]
        found = [n for text in texts for n in range(PAGE_SIZE + 20) if f" body-{n}- " in f"{text} "]
        assert sorted(found) == list(range(PAGE_SIZE + 20))
        assert (f"body-{0}-" in texts[0]) == (order == "first")
    for query in NONSENSE:
        assert "body-0-" in admin.open(f"{path}?{query}").text, query
    with django_assert_max_num_queries(6):
        admin.open(path)
    assert admin.client.get(f"{QUEUES}999/elements/").status_code == 404


def test_dead_letters_go_back_where_they_came_from(admin: Admin, worker: Program, monkeypatch):
    for queue, number in (("orders", 2), ("bills", 1)):
        push(worker, queue, *(["x"] * number))
        Queue.objects.filter(name=queue).update(max_tries=1)
        for _ in range(number):
            lease = worker.query(TAKE, queue)
            worker.connection.execute("SELECT messages.rollback('W', 0, %s)", [lease])
    page = admin.open(queue_page("__deadletter__", "elements"))
    assert re.search(r"From the queue orders : attempt 1 was the last, \S+ \S+ UTC", page.text)
    assert admin.send(page, "Redrive selected").messages == ["No dead letter was selected."]
    push(worker, "other", "x", headers={"x-dl-from-queue": "orders"})
    stranger = Element.objects.get(queue__name="other")
    admin.send(page, "Redrive selected", element=[str(stranger.pk), "no number", "9" * 5000])
    assert (held("orders"), held("other"), held("__deadletter__")) == (0, 1, 3)
    dead_letters = Element.objects.filter(queue__name="__deadletter__")
    chosen = dead_letters.filter(headers__contains={"x-dl-from-queue": "orders"})[0]
    answer = admin.send(page, "Redrive selected", element=[str(chosen.pk)])
    text = "1 of 1 dead letters were redriven. Selected: 1 from orders."
    assert (answer.messages, history()[-1]) == ([text], text)
    assert (held("orders"), held("bills"), held("__deadletter__")) == (1, 0, 2)
    element = Element.objects.get(queue__name="orders")
    assert (element.tries, element.headers) == (0, {})
    # Reserved dead letters stay.
    lease = worker.query(TAKE, "__deadletter__")
    monkeypatch.setattr("psqlmessages.admin.queue_elements._MAX_QUEUES", 1)
    (said,) = admin.send(page, "Redrive all (up to 10000)").messages
    assert re.match(r"1 of 2 .+: 1 from \w+, 1 from other queues\. The others stay, because", said)
    assert (held("orders") + held("bills"), held("__deadletter__")) == (2, 1)
    worker.connection.execute("SELECT messages.rollback('W', 0, %s)", [lease])
    admin.send(page, "Redrive all (up to 10000)")
    assert (held("orders"), held("bills"), held("__deadletter__")) == (2, 1, 0)
