"""Workers: they wait without polling, apply changes, and reconnect."""

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from psqlmessages.client import queue_listener
from psqlmessages.exchanges.selectors import selector
from psqlmessages.exchanges.store import repository, worker
from psqlmessages.models import Exchange, ExchangeCount
from tests.exchanges.cases import CASES
from tests.exchanges.field import AWAITED, Field, WorkerThread, flow, working

pytestmark = pytest.mark.usefixtures("committing")


def wait_for(field: Field, queue: str, number: int) -> None:
    field.until(lambda: len(field.default.bodies(queue)) >= number, 60)


@pytest.mark.usefixtures("no_polling")
def test_a_push_a_resume_and_an_element_that_matures_wake_it(field: Field):
    field.define(x1=flow("a", "b", parallel=3))
    with working():
        field.until(lambda: field.default.query(AWAITED, "a"))
        for number in range(1, 4):
            field.default.push("a", number)
            wait_for(field, "b", number)
        field.default.push("a", 4)
        field.default.push("a", 5)
        wait_for(field, "b", 5)
        field.default.query("SELECT messages.push('W', 'a', 'it', delay => 0.6)")
        field.default.query("SELECT messages.push('W', 'a', 'it', delay => 0.3)")
        wait_for(field, "b", 7)
        field.default.query("SELECT messages.pause('W', 'a')")
        field.default.push("a", 8)
        field.until(lambda: field.default.query(AWAITED, "a"))
        assert len(field.default.bodies("b")) == 7
        field.default.query("SELECT messages.resume('W', 'a')")
        wait_for(field, "b", 8)


def test_definitions_are_taken_up_while_it_runs(field: Field):
    with working() as thread:
        field.define(x1=flow("a", "b"))
        field.default.push("a", 1)
        wait_for(field, "b", 1)
        field.define(x1=flow("a", "c"))
        field.until(lambda: field.default.push("a", 2) or field.default.bodies("c"), 60)
        repository.delete(["x1"])
        field.until(lambda: not thread.worker.running)


def test_a_definition_that_changes_while_it_is_read(field: Field, request):
    """The definition of x1 changes after its row and before its destinations are read."""
    is_changed = False

    def change(execute: Callable[..., Any], sql: str, *given: Any) -> Any:
        nonlocal is_changed
        if not is_changed and sql.startswith("SELECT") and 'FROM "psqlmessages_dest' in sql:
            is_changed = True
            field.define(x1=flow("c", "d"))
        return execute(sql, *given)

    def watch(connection: BaseDatabaseWrapper, **_: object) -> None:
        connection.execute_wrappers.append(change)

    field.define(x1=flow("a", "b"))
    connection_created.connect(watch)
    request.addfinalizer(lambda: connection_created.disconnect(watch))
    field.default.push("a", "of the former source")
    field.default.push("c", "it")
    with working():
        wait_for(field, "d", 1)
        field.until_idle()
    assert is_changed
    assert field.default.bodies("d") == ["it"]
    assert field.default.bodies("a") == ["of the former source"]


def test_an_open_rule_change_holds_up_none(field: Field, monkeypatch):
    monkeypatch.setattr(queue_listener, "ANSWER_SECONDS", 120)
    field.define(x1=flow("a", "b"))
    with working(), psycopg.connect(field.default.server.url()) as changing:
        field.until(lambda: field.default.query(AWAITED, "a"))
        changing.execute("UPDATE messages.auth SET timeout = 61")
        for number in range(1, 4):
            field.default.push("a", number)
            wait_for(field, "b", number)
        changing.rollback()


def test_only_exchanges_that_are_named_and_not_stopped_run(field: Field):
    field.define(x1=flow("a", "b"), x2=flow("c", "d"), x3=flow("e", "f"))
    for queue in "ce":
        field.default.push(queue, "it")
    with working("x1", "x2") as thread:
        repository.set_running("x1", is_running=False)
        field.until(lambda: thread.worker.running == ["x2"])
        field.default.push("a", "it")
        wait_for(field, "d", 1)
        assert (field.default.bodies("a"), field.default.bodies("b")) == (["it"], [])
        repository.set_running("x1", is_running=True)
        wait_for(field, "b", 1)
    assert field.default.bodies("f") == []


def test_a_broken_definition_stops_no_other(field: Field, caplog):
    field.define(x1=flow("a", "b"), x2=flow("c", "d"), x3=flow("e", "f"))
    Exchange.objects.get(name="x1").destinations.update(selector="@gone")
    Exchange.objects.get(name="x3").destinations.update(namespace="moon")
    field.default.push("c", "it")
    field.default.push("a", "it")
    with working() as thread:
        wait_for(field, "d", 1)
        assert thread.worker.running == ["x2"]
        field.define(x1=flow("a", "b"))
        wait_for(field, "b", 1)
    for name, what in (("x1", "gone"), ("x3", "moon")):
        (text,) = (each for each in caplog.messages if f"{name} cannot run" in each)
        assert what in text


def test_a_stop_finishes_the_current_batch_and_frees_the_rest(field: Field):
    entered, leave, asked = threading.Event(), threading.Event(), []

    @selector("second")
    def second(_: object) -> bool:
        asked.append(1)
        if len(asked) == 2:
            entered.set()
            return leave.wait(60)
        return True

    field.define(x1=flow("a", "b", wsize=1))
    Exchange.objects.get(name="x1").destinations.update(selector="@second")
    field.default.push_many("a", ["1", "2", "3"])
    thread = WorkerThread()
    assert entered.wait(60)
    thread.tell_to_stop()
    field.default.push("a", "late")
    leave.set()
    thread.stop()
    # The third element may have been taken before the stop.
    moved = field.default.bodies("b")
    assert (moved, len(asked)) in ((["1", "2"], 2), (["1", "2", "3"], 3))
    answer = field.default.query("SELECT string_agg(body, ',') FROM messages.pop('W', 'a', 9)")
    assert answer == {2: "3,late", 3: "late"}[len(moved)]


def test_work_is_counted(field: Field):
    italian, european = 'msg.headers.country == "it"', 'msg.headers.country in ["it", "de"]'
    field.define(
        x1=flow("a", ("b", italian), ("c", european)),
        x2=flow("b", ("d", "false")) | {"no_route": "discard"},
        x3=flow("c", ("d", 'msg.headers.country == "it" && 1/0 == 1')) | {"no_route": "discard"},
    )
    for country in ("it", "it", "de", "us"):
        field.default.push("a", "it", country=country)
    field.default.push("a", "it", x_hop_count=17)
    field.run_until_idle()
    found = ExchangeCount.objects.filter(exchange__name="x1")
    rows = {(row.outcome, row.destination): row for row in found}
    assert {name: row.count for name, row in rows.items()} == {
        ("ok", -1): 3, ("no_route", -1): 1, ("too_many_hops", -1): 1, ("to", 0): 2, ("to", 1): 3,
    }  # fmt: skip
    ok = rows["ok", -1]
    assert sum(ok.buckets) == 3
    assert 0 < ok.selector_seconds < ok.seconds < 30
    # If a selector failed, the element is not discarded.
    others = ExchangeCount.objects.filter(destination=-1, count__gt=0).exclude(exchange__name="x1")
    assert set(others.values_list("exchange__name", "outcome", "count")) == {
        ("x2", "discarded", 2), ("x3", "discarded", 1), ("x3", "no_route", 2)
    }  # fmt: skip
    assert [field.default.bodies(queue) for queue in ("a", "b", "c", "d")] == [[]] * 4
    assert len(field.default.bodies("__no_route__")) == 3


def test_an_idle_worker_shows_that_it_lives(field: Field, monkeypatch):
    monkeypatch.setattr(worker, "WRITE_SECONDS", 0.1)
    field.define(x1=flow("a", "b"))
    with working():
        field.until(ExchangeCount.objects.exists)
        row = ExchangeCount.objects.get()
        field.until(lambda: ExchangeCount.objects.get().seen_at > row.seen_at)
    assert (row.outcome, row.destination, row.count) == ("ok", -1, 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_holds(field: Field, case: Callable[[Field, Callable[[], None]], None]):
    case(field, field.run_until_idle)
