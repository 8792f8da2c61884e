"""Exchanges on Spark for tests: one query that runs whatever is defined."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from psqlmessages.graph import stored
from psqlmessages.pipeline.exchange_share import Counts
from tests.exchanges.field import Field

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Runner:
    """A query of so many tasks; it runs nothing until something is defined."""

    def __init__(self, spark: SparkSession, **settings: Any) -> None:
        from psqlmessages.pipeline.exchange import SparkExchanges

        self.turns: list[int] = []
        self.counts: list[Counts] = []
        settings = {"tasks": 2, "span": 2.0, "linger": 0.4, **settings}
        self.exchanges = SparkExchanges(spark, self._record, **settings)
        self.has_begun = threading.Event()
        self.query = self.exchanges.start()

    def _record(self, turn: int, counts: Sequence[Counts]) -> None:
        self.turns.append(turn)
        self.counts += counts
        self.has_begun.set()

    def await_begin(self) -> None:
        """Wait for the first batch, which Spark runs though there is nothing in it."""
        for _ in range(600):
            if self.has_begun.wait(1):
                return
            self._raise_what_ended_it()
        raise AssertionError("no batch began")

    def _raise_what_ended_it(self) -> None:
        if (ended := self.query.exception()) is not None:
            raise ended

    def forget(self) -> None:
        """Forget what was counted."""
        self.turns.clear()
        self.counts.clear()

    def define(self) -> None:
        """Run what is stored."""
        self.exchanges.define([stored.compiled(row) for row in stored.rows()])

    def count(self, outcome: str, destination: int = -1) -> int:
        """How many of an outcome were told so far."""
        found = [each for each in self.counts if each.outcome == outcome]
        return sum(each.number for each in found if each.destination == destination)

    def rest(self) -> None:
        """Run nothing, and wait until that is so."""
        self.exchanges.define(())
        assert self.exchanges.settle(300)

    def run_until_idle(self, field: Field) -> None:
        """Run what is stored until nothing is left to do."""
        self.define()
        try:
            field.until_idle(300)
        except AssertionError:
            self._raise_what_ended_it()
            raise
        self.rest()

    def stop(self) -> None:
        """End, after the turn at hand."""
        self.exchanges.stop()


@pytest.fixture(scope="module")
def pair(spark: SparkSession) -> Iterator[Runner]:
    """A query of two tasks."""
    runner = Runner(spark)
    runner.await_begin()
    yield runner
    runner.stop()


@pytest.fixture
def runner(pair: Runner) -> Iterator[Runner]:
    """A query of two tasks that runs nothing yet, and nothing after the test."""
    pair.forget()
    yield pair
    pair.rest()
