"""An exchange run by Spark gives what the local loop gives, by the same cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.exchanges import cases
from tests.exchanges import test_runner_between as between
from tests.exchanges.cases import CASES
from tests.exchanges.field import Field
from tests.pipeline.exchanging import Runner, pair, runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["pair", "runner"]

pytestmark = pytest.mark.django_db(transaction=True)

Case = Callable[[Field, Callable[[], None]], None]
# Two tasks are two processes: only a single loop keeps an order.
ORDERED = cases.case_the_order_is_kept_by_a_single_loop
BETWEEN = (
    between.test_copies_go_to_both_databases_as_they_were_pushed,
    between.test_what_is_put_aside_stays_in_the_namespace_of_the_source,
)


@pytest.mark.parametrize("case", [case for case in CASES if case is not ORDERED])
def test_it_holds(field: Field, runner: Runner, case: Case) -> None:
    case(field, lambda: runner.run_until_idle(field))
    assert runner.query.isActive


def test_a_single_task_keeps_the_order(field: Field, spark: SparkSession) -> None:
    single = Runner(spark, tasks=1)
    try:
        ORDERED(field, lambda: single.run_until_idle(field))
    finally:
        single.stop()


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("case", BETWEEN)
def test_it_holds_between_databases(
    wide_field: Field,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    case: Callable[[Field, bool], None],
    reserve: bool,
) -> None:
    monkeypatch.setattr(wide_field, "run_until_idle", lambda: runner.run_until_idle(wide_field))
    case(wide_field, reserve)
    assert runner.query.isActive
