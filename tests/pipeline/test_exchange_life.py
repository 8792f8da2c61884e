"""Exchanges on Spark: they wait without asking, count, and say what an executor lacks."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from psqlmessages.exceptions import MessagesError
from psqlmessages.graph import stored
from psqlmessages.graph.tallies import BAD_SELECTOR, OK, TO, Tally
from psqlmessages.management.pipeline_exchange_clerk import Clerk
from psqlmessages.management.pipeline_exchange_office import Office
from psqlmessages.models import ExchangeCount
from psqlmessages.pipeline.jobs import sentence
from tests.exchanges.conftest import namespace
from tests.exchanges.field import Field
from tests.pipeline import exchange_selectors
from tests.pipeline.exchanging import Runner, pair, runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["pair", "runner"]

pytestmark = pytest.mark.django_db(transaction=True)

AWAITED = "SELECT count(*) > 0 FROM psqlmessages_queue WHERE name = %s AND awaited_until > now()"


def failure(field: Field, spark: SparkSession, **settings: tuple[str, ...]) -> str:
    """Run what is stored, which fails; why, in one line."""
    from pyspark.errors import StreamingQueryException

    lone = Runner(spark, tasks=1, **settings)
    lone.define()
    try:
        with pytest.raises(StreamingQueryException) as caught:
            lone.query.awaitTermination(200)
    finally:
        lone.stop()
    return sentence(caught.value)


def test_an_idle_exchange_begins_no_turn_until_something_is_pushed(
    field: Field, runner: Runner
) -> None:
    field.define(x1={"src": "a", "dst": ["b"]})
    runner.define()
    field.until(lambda: field.default.query(AWAITED, "a"))
    threading.Event().wait(1.2)
    assert runner.turns == []
    field.default.push("a", "it")
    field.until(lambda: runner.turns)
    assert (field.default.bodies("b"), runner.count(OK)) == (["it"], 1)


def test_a_queue_that_is_paused_gives_nothing_until_it_is_resumed(
    field: Field, runner: Runner
) -> None:
    field.define(x1={"src": "a", "dst": ["b"]})
    field.default.query("SELECT messages.pause('W', 'a')")
    field.default.push("a", "it")
    runner.define()
    field.until(lambda: field.default.query(AWAITED, "a"))
    assert runner.turns == []
    field.default.query("SELECT messages.resume('W', 'a')")
    field.until(lambda: field.default.bodies("b"))


def test_tasks_count_as_a_local_worker_does(field: Field, runner: Runner) -> None:
    refusing = {"queue": "c", "selector": "msg.headers.none == 1"}
    field.define(x1={"src": "a", "dst": ["b", refusing]})
    field.default.push_many("a", ["it"] * 30)
    field.default.push("a", "it", x_hop_count=17)
    runner.run_until_idle(field)
    told = [(OK, -1), ("too_many_hops", -1), (TO, 0), (BAD_SELECTOR, 1)]
    assert [runner.count(*each) for each in told] == [30, 1, 30, 30]
    tally = Tally()
    for counts in runner.counts:
        counts.add_to(tally)
    assert (tally.elements, sum(tally.entries[OK, -1].buckets)) == (31, 30)


def test_outcomes_are_named_as_in_the_database() -> None:
    assert {OK, TO, BAD_SELECTOR} < set(ExchangeCount.Outcome.values)


def test_a_selector_in_code_comes_from_the_modules_that_are_named(
    field: Field, spark: SparkSession
) -> None:
    field.define(x1={"src": "a", "dst": [{"queue": "b", "selector": "@pipeline-even"}]})
    field.default.push_many("a", [str(number) for number in range(10)])
    lone = Runner(spark, tasks=1, modules=(exchange_selectors.__name__,))
    try:
        lone.run_until_idle(field)
    finally:
        lone.stop()
    assert field.default.bodies("b") == ["0", "2", "4", "6", "8"]


def test_a_selector_in_code_that_no_module_has_ends_the_query(
    field: Field, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psqlmessages.exchanges import registry

    # Here, as in Django's process, it is known; on executors no module has it.
    monkeypatch.setitem(registry._functions, "here-only", lambda env: True)
    field.define(x1={"src": "a", "dst": [{"queue": "b", "selector": "@here-only"}]})
    field.default.push("a", "it")
    said = failure(field, spark)
    assert "the selector of default/b: no selector in code is called here-only" in said
    assert field.default.bodies("a") == ["it"]


def test_a_module_that_is_not_there_ends_the_query(field: Field, spark: SparkSession) -> None:
    field.define(x1={"src": "a", "dst": ["b"]})
    field.default.push("a", "it")
    assert "an executor cannot import no.such.module" in failure(
        field, spark, modules=("no.such.module",)
    )


def test_a_namespace_without_an_address_ends_the_query(field: Field, spark: SparkSession) -> None:
    with namespace("nowhere"):
        field.define(x1={"src": "a", "dst": ["nowhere/b"]})
        field.default.push("a", "it")
        assert "PSQLMESSAGES_DSN_NOWHERE" in failure(field, spark)


def test_with_once_it_ends_when_nothing_is_left(field: Field, spark: SparkSession) -> None:
    from psqlmessages.pipeline.exchange import SparkExchanges

    field.define(x1={"src": "a", "dst": ["b"]})
    numbers = [str(number) for number in range(300)]
    field.default.push_many("a", numbers)
    exchanges = SparkExchanges(spark, lambda *_: None, tasks=2, linger=0.2)
    exchanges.define([stored.compiled(row) for row in stored.rows()])
    assert exchanges.start(once=True).awaitTermination(200)
    assert sorted(field.default.bodies("b"), key=int) == numbers


def test_an_exchange_that_is_removed_ends_its_query(field: Field, spark: SparkSession) -> None:
    from psqlmessages.pipeline.exchange import SparkExchanges

    field.define(x1={"src": "a", "dst": ["b"]})
    said: list[str] = []
    clerk = Clerk("x1")
    exchanges = SparkExchanges(spark, clerk.count, tasks=1, linger=0.2)
    office = Office("x1", clerk, exchanges, said.append)
    office.look()
    query = exchanges.start()
    office.start()
    field.default.push("a", "it")
    field.until(lambda: ExchangeCount.objects.filter(outcome=OK, count=1).exists(), 60)
    stored.delete(["x1"])
    assert query.awaitTermination(200)
    office.close()
    assert said == ["runs x1; Ctrl-C ends it", "x1 is removed"]


def test_what_is_pushed_now_and_then_is_routed_within_a_turn(
    field: Field, spark: SparkSession
) -> None:
    """A task waits for more before it ends, so that not each element costs a turn."""
    field.define(x1={"src": "a", "dst": ["b"]})
    runner = Runner(spark, tasks=1, span=100.0, linger=5.0)
    runner.await_begin()
    runner.forget()
    waits = []
    try:
        runner.define()
        for number in range(6):
            began = monotonic()
            field.default.push("a", number)
            field.until(lambda: len(field.default.bodies("b")) > number)  # noqa: B023
            waits.append(monotonic() - began)
        runner.rest()
    finally:
        runner.stop()
    print(f"\nfrom push to routed within a turn: {sorted(waits[1:])[2] * 1000:.0f} ms")
    assert len(runner.turns) <= 2


def test_a_lag_that_this_role_may_not_ask_for_ends_no_job(field: Field) -> None:
    field.define(x1={"src": "a", "dst": ["b"]})
    clerk = Clerk("x1")
    clerk.look()
    assert clerk.lag() == 0.0
    with connection.cursor() as cursor:
        cursor.execute("SET search_path = pg_catalog")
        try:
            with pytest.raises(MessagesError, match="psqlmessages_element"):
                clerk.lag()
        finally:
            cursor.execute("RESET search_path")
