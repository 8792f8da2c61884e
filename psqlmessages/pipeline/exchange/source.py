"""Data source by which Spark runs exchanges; its rows are counts.

An offset is the number of a turn and does not refer to elements: the queues themselves ensure that
each element is moved once. If Spark repeats a turn, it processes the elements available then.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.exchanges.engine.batch import ExchangePlan
from psqlmessages.exchanges.engine.counters import ExchangeCounters, Histogram
from psqlmessages.exchanges.engine.remote import CircuitBreaker
from psqlmessages.exchanges.engine.runner import DatabaseHandle, ExchangeRunner
from psqlmessages.pipeline import database
from psqlmessages.pipeline.exchange.definition import DefinitionFolder, compiled, sources
from psqlmessages.pipeline.exchange.watcher import SourceWatcher
from psqlmessages.pipeline.source_options import refuse_unknown

# Task runs: one task on an executor runs the consumers of exchanges for a limited time.

# Not outcomes of elements: how often consumers had to wait, and whether a call was not authorized.
WAITS: Final = "waits"
REFUSALS: Final = "refusals"

# Shared by all task runs of this process, so that the next one also respects an open circuit.
_circuits: Final[dict[tuple[str, str], CircuitBreaker]] = {}


class TaskCounts(NamedTuple):
    """The counts of one exchange in a task run: a row of the data source."""

    exchange: str
    outcome: str
    destination: int
    number: int
    seconds: float
    buckets: list[int]
    selector_seconds: float

    @property
    def is_refusal(self) -> bool:
        """Whether the exchange lacks a rule."""
        return self.outcome == REFUSALS

    def add_to(self, counters: ExchangeCounters) -> None:
        """Add these counts to others."""
        if self.outcome == WAITS:
            counters.waits += self.number
        elif not self.is_refusal:
            entry = Histogram(self.number, self.seconds, self.selector_seconds, list(self.buckets))
            counters.add(self.outcome, self.destination, entry)


class TimedRunner(ExchangeRunner):
    """An exchange runner that knows when it has last found elements."""

    def __init__(self, plan: ExchangePlan, databases: dict[str, DatabaseHandle]) -> None:
        self.counters = ExchangeCounters()
        super().__init__(plan, databases, self.counters)
        self.found_at = monotonic()

    def on_elements_found(self) -> None:
        """Note that elements were found."""
        self.found_at = monotonic()
        super().on_elements_found()

    def counts(self) -> Iterator[TaskCounts]:
        """Yield the counts of its consumers."""
        name = self.plan.exchange.name
        for (outcome, destination), entry in self.counters.entries.items():
            if entry.count:
                figures = (entry.count, entry.seconds, entry.buckets, entry.selector_seconds)
                yield TaskCounts(name, outcome, destination, *figures)
        if self.counters.waits:
            yield TaskCounts(name, WAITS, -1, self.counters.waits, 0.0, [], 0.0)
        if self.log.may_lack_rules:
            yield TaskCounts(name, REFUSALS, -1, 1, 0.0, [], 0.0)


FORMAT: Final = "psqlmessages-exchange"
OPTION: Final = "settings"
# The longest wait of the driver, and so the delay until it sees new definitions or a stop.
_WAIT_SECONDS: Final = 0.5


@dataclass(frozen=True)
class TurnSettings:
    """The settings of a turn; ``dsn_file`` holds the address of the namespace default."""

    folder: str
    tasks: int
    span: float
    linger: float
    modules: tuple[str, ...] = ()
    dsn_file: str | None = None

    def as_option(self) -> str:
        """Return the settings as the only option of the source."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, options: Mapping[str, str]) -> TurnSettings:
        """Parse the settings from the options; raises OptionRefused."""
        refuse_unknown(options, (OPTION,))
        given = json.loads(options[OPTION])
        return cls(**{**given, "modules": tuple(given["modules"])})

    def address(self, namespace: str) -> str:
        """Return a namespace's address as set in this process; raises DsnMissing."""
        is_named = self.dsn_file is not None and namespace == "default"
        return database.dsn({database.OPTION: str(self.dsn_file)} if is_named else None, namespace)


async def run_task(plans: Sequence[ExchangePlan], settings: TurnSettings) -> list[TaskCounts]:
    """Run the consumers of exchanges in one task, and return their counts.

    It ends after ``span`` seconds, or earlier if no consumer has found anything for ``linger``
    seconds; current batches are finished.
    """
    aliases = sorted({alias for plan in plans for alias in plan.namespaces})
    databases = {alias: _database(alias, settings.address(alias)) for alias in aliases}
    runners = [TimedRunner(plan, databases) for plan in plans]
    until = monotonic() + settings.span

    def stop_in_time() -> None:
        found_at = max((runner.found_at for runner in runners), default=0.0)
        left = min(until, found_at + settings.linger) - monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, stop_in_time)
            return
        for runner in runners:
            runner.stop()

    stop_in_time()
    try:
        await asyncio.gather(*(runner.run() for runner in runners))
    finally:
        for database_ in databases.values():
            await database_.listener.close()
    return [counts for runner in runners for counts in runner.counts()]


def _database(alias: str, address: str) -> DatabaseHandle:
    handle = DatabaseHandle(alias, address)
    handle.circuit = _circuits.setdefault((alias, address), handle.circuit)
    return handle


class ExchangeSource(DataSource):
    """Data source that runs exchanges while a query reads it."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of :class:`TaskCounts`."""
        return (
            "exchange string, outcome string, destination int, count bigint, seconds double,"
            " buckets array<bigint>, selector_seconds double"
        )

    def streamReader(self, schema: StructType) -> ExchangeReader:  # noqa: N802
        """Return the reader that runs the exchanges."""
        return ExchangeReader(TurnSettings.of(self.options))


class ExchangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Starts a turn when a source queue has available elements, and distributes it among tasks."""

    def __init__(self, settings: TurnSettings) -> None:
        self._settings = settings
        self._watcher: SourceWatcher | None = None
        self._turn = -1
        self._wait_seconds = _WAIT_SECONDS

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Return the offset before the first turn."""
        return {"turn": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop when the queues are empty."""
        self._wait_seconds = 0.0

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Wait briefly for available elements; return the next turn if there are any."""
        if self._watcher is None:
            self._watcher = SourceWatcher(self._settings.address)
        turn = start["turn"]
        if turn != self._turn:
            self._turn = turn
            self._watcher.wake()
        # The turn before this offset has ended, and the next turn uses the definitions read here.
        folder = DefinitionFolder(Path(self._settings.folder))
        edition, text = folder.get()
        if edition != folder.taken_over:
            folder.take_over(edition)
        has_work = self._watcher.has_work(sources(text), self._wait_seconds)
        return {"turn": turn + 1 if has_work else turn}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return one partition per task."""
        _, text = DefinitionFolder(Path(self._settings.folder)).get()
        return [InputPartition(text) for _ in range(self._settings.tasks)]

    def read(self, partition: InputPartition) -> Iterator[TaskCounts]:
        """Run the consumers for a limited time, on an executor."""
        exchanges = compiled(partition.value, self._settings.modules)
        plans = [ExchangePlan.of(exchange) for exchange in exchanges]
        yield from asyncio.run(run_task(plans, self._settings))

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: the elements are already committed."""

    def stop(self) -> None:
        """Close the connections."""
        if self._watcher is not None:
            self._watcher.close()
