"""Exchanges on Spark: the cases of a local worker, and Spark's own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from psqlmessages.exchanges import selectors
from psqlmessages.exchanges.engine.counters import BAD_SELECTOR, OK, TO
from psqlmessages.exchanges.store import repository
from psqlmessages.management.pipeline_exchange import SparkExchangeState
from psqlmessages.models import Exchange, ExchangeCount, PipelineJob
from psqlmessages.pipeline.exchange.driver import SparkExchanges
from psqlmessages.pipeline.exchange.source import TaskCounts
from psqlmessages.pipeline.job_runner import cause_line
from tests.exchanges.cases import CASES
from tests.exchanges.conftest import namespace
from tests.exchanges.field import AWAITED, Field, flow
from tests.pipeline import exchange_selectors
from tests.pipeline.processes import until

pytestmark = pytest.mark.django_db(transaction=True)

EVERYDAY = {
    "case_each_destination_gets_a_copy_as_it_was_pushed",
    "case_changes_are_for_this_and_the_later_destinations",
    "case_a_circle_ends_after_so_many_hops",
}


class Runner:
    """A query with tasks; it runs no exchange until `define`."""

    def __init__(self, spark: SparkSession, **settings: Any) -> None:
        self.turns: list[int] = []
        self.counts: list[TaskCounts] = []
        settings = {"tasks": 2, "span": 2.0, "linger": 0.4, **settings}
        self.exchanges = SparkExchanges(spark, self._record, **settings)
        self.query = self.exchanges.start()

    def _record(self, turn: int, counts: Sequence[TaskCounts]) -> None:
        self.turns.append(turn)
        self.counts += counts

    def await_begin(self) -> None:
        """Wait for the first batch, which Spark runs although it is empty."""
        until(lambda: self.turns or self.query.exception())
        self._raise_what_ended_it()
        self.forget()

    def _raise_what_ended_it(self) -> None:
        if (ended := self.query.exception()) is not None:
            raise ended

    def forget(self) -> None:
        self.turns.clear()
        self.counts.clear()

    def define(self) -> None:
        self.exchanges.define([repository.compile_exchange(row) for row in repository.rows()])

    def count(self, outcome: str, destination: int = -1) -> int:
        found = [each for each in self.counts if each.outcome == outcome]
        return sum(each.number for each in found if each.destination == destination)

    def rest(self) -> None:
        """Run no exchange, and wait until the tasks have ended."""
        self.exchanges.define(())
        assert self.exchanges.wait_until_current(300)

    def run_until_idle(self, field: Field) -> None:
        """Run the stored exchanges until their queues are empty."""
        self.define()
        try:
            field.until_idle(300)
        except AssertionError:
            self._raise_what_ended_it()
            raise
        self.rest()

    def failure(self) -> str:
        """Run the stored exchanges, which must fail; return the cause."""
        self.define()
        with pytest.raises(StreamingQueryException) as caught:
            self.query.awaitTermination(200)
        return cause_line(caught.value)


@pytest.fixture(scope="module")
def pair(spark: SparkSession) -> Iterator[Runner]:
    runner = Runner(spark)
    runner.await_begin()
    yield runner
    runner.exchanges.stop()


@pytest.fixture
def runner(pair: Runner) -> Iterator[Runner]:
    pair.forget()
    yield pair
    pair.rest()


@pytest.fixture
def lone(spark: SparkSession) -> Iterator[Callable[..., Runner]]:
    made: list[Runner] = []

    def make(**settings: Any) -> Runner:
        made.append(Runner(spark, tasks=1, **settings))
        return made[-1]

    yield make
    for each in made:
        each.exchanges.stop()


@pytest.mark.parametrize(
    "case",
    [
        # A local worker runs all of them daily.
        pytest.param(case, marks=[] if case.__name__ in EVERYDAY else pytest.mark.nightly)
        for case in CASES
        if case.__name__ != "case_the_order_is_kept_by_a_single_loop"
    ],
)
def test_spark_routes_like_a_local_worker(
    field: Field, runner: Runner, case: Callable[[Field, Callable[[], None]], None]
):
    case(field, lambda: runner.run_until_idle(field))
    assert runner.query.isActive


def test_copies_go_to_another_database(wide_field: Field, runner: Runner):
    numbers = [str(number) for number in range(50)]
    wide_field.define(x1={"src": "a", "dst": ["b", "eu/b"]})
    wide_field.default.push_many("a", numbers)
    runner.run_until_idle(wide_field)
    for bed in wide_field.beds.values():
        assert sorted(bed.bodies("b"), key=int) == numbers
    assert wide_field.default.bodies("a") == []


def test_idle_and_paused_exchanges_do_nothing_and_counts_stay(field: Field, runner: Runner):
    field.define(x1={"src": "a", "dst": ["b", {"queue": "c", "selector": "msg.headers.none == 1"}]})
    field.default.push("a", "first")
    field.default.query("SELECT messages.pause('W', 'a')")
    runner.define()
    field.until(lambda: field.default.query(AWAITED, "a"))
    Event().wait(1.2)
    assert runner.turns == []
    field.default.push_many("a", ["it"] * 29)
    field.default.push("a", "it", x_hop_count=17)
    assert runner.turns == []
    field.default.query("SELECT messages.resume('W', 'a')")
    runner.run_until_idle(field)
    told = [(OK, -1), ("too_many_hops", -1), (TO, 0), (BAD_SELECTOR, 1)]
    assert [runner.count(*each) for each in told] == [30, 1, 30, 30]


def test_a_task_keeps_the_order_by_a_selector_in_code(field: Field, lone: Callable[..., Runner]):
    field.define(x1={"src": "a", "dst": [{"queue": "b", "selector": "@pipeline-even"}]})
    runner = lone(span=100.0, linger=3.0, modules=(exchange_selectors.__name__,))
    runner.await_begin()
    runner.define()
    for number in range(8):
        field.default.push_many("a", [str(number * 2), str(number * 2 + 1)])
        field.until(lambda: len(field.default.bodies("b")) > number)  # noqa: B023
    runner.rest()
    assert field.default.bodies("b") == [str(number) for number in range(0, 16, 2)]
    assert len(runner.turns) <= 3


def test_executors_without_code_are_named(field: Field, lone: Callable[..., Runner], monkeypatch):
    # The driver knows this selector, but no module of the executors has it.
    monkeypatch.setitem(selectors._functions, "here-only", lambda env: True)
    missing = "the selector of default/b: no selector in code is named here-only"
    with namespace("nowhere"):
        for destination, settings, said in (
            ({"queue": "b", "selector": "@here-only"}, {}, missing),
            ("b", {"modules": ("no.such.module",)}, "an executor cannot import no.such.module"),
            ("nowhere/b", {}, "PSQLMESSAGES_DSN_NOWHERE"),
        ):
            field.define(x1={"src": "a", "dst": [destination]})
            field.default.push("a", "it")
            assert said in lone(**settings).failure()
    assert "it" in field.default.bodies("a")


@pytest.fixture
def command(spark: SparkSession, monkeypatch) -> Callable[..., None]:
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return lambda *words: call_command("psqlmessages", "pipeline", "exchange", *words)


def test_a_stopped_exchange_on_spark_is_not_blocked(field: Field):
    field.define(x1=flow("a", "b"))
    field.default.connection.execute("DELETE FROM messages.auth")
    state = SparkExchangeState("x1")
    shown = []
    for is_running in (True, False, True):
        repository.set_running("x1", is_running=is_running)
        state.read()
        state.write()
        (row,) = state.counter_store.list_rows([Exchange.objects.get().pk])
        shown.append((row.missing_rules != [], row.failing_since))
    assert shown[0][0]
    assert shown[1:] == [(False, None)] * 2, "the rules have not been checked again"


def test_the_command_ends_with_its_exchange(field: Field, command: Callable[..., None], capsys):
    def act() -> int:
        try:
            field.default.push_many("a", ["it"] * 5)
            field.until(lambda: len(field.default.bodies("b")) == 5, 300)
            field.define(x1={"src": "a", "dst": ["c"]})
            field.until(lambda: field.default.push("a", "new") or field.default.bodies("c"), 300)
            repository.set_running("x1", is_running=False)
            field.until(lambda: field.default.push("a") or len(field.default.bodies("a")) > 100)
            repository.set_running("x1", is_running=True)
            field.until(lambda: not field.default.bodies("a"), 300)
            field.until(lambda: sum(counted()) == len(bodies()))
            return len(bodies())
        finally:
            repository.delete(["x1"])
            connection.close()

    def bodies() -> list[str]:
        return [body for queue in "bc" for body in field.default.bodies(queue)]

    def counted() -> list[int]:
        return [row.count for row in ExchangeCount.objects.filter(outcome=OK)]

    field.define(x1={"src": "a", "dst": ["b"]})
    with ThreadPoolExecutor(1) as pool:
        acted = pool.submit(act)
        command("x1", "--tasks", "2", "--span", "1")
        routed = acted.result()
    lines = capsys.readouterr().err.splitlines()
    # The other lines are batches.
    assert lines[0] == "running x1; press Ctrl-C to stop"
    assert "x1 is stopped" in lines
    assert "x1 was deleted" in lines
    others = ", ".join(f"0 {each}" for each in ("no route", "discarded", "too many hops", "failed"))
    assert lines[-1] == f"stopped: {routed} routed, {others}; 0 selector failures"
    row = PipelineJob.objects.get(name="exchange x1")
    assert (row.state, row.rows) == ("stopped", routed)


def test_once_ends_when_idle(field: Field, command: Callable[..., None], capsys):
    numbers = [str(number) for number in range(300)]
    field.define(x1={"src": "a", "dst": ["b"]})
    field.default.push_many("a", numbers)
    command("x1", "--tasks", "2", "--once")
    assert sorted(field.default.bodies("b"), key=int) == numbers
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command("x2")
    assert capsys.readouterr().err == "psqlmessages: there is no exchange x2\n"
