"""Data source by which Spark runs exchanges; its rows are counts.

An offset is the number of a turn and does not refer to elements: the queues themselves ensure that
each element is moved once. If Spark repeats a turn, it processes the elements available then.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.exchanges.engine.batch import ExchangePlan
from psqlmessages.exchanges.engine.counters import Counter, ExchangeCounters
from psqlmessages.exchanges.engine.remote import CircuitBreaker
from psqlmessages.exchanges.engine.runner import DatabaseHandle, ExchangeConsumer, ExchangeRunner
from psqlmessages.exchanges.model import CompiledExchange
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

    def add_to(self, counters: ExchangeCounters) -> None:
        """Add these counts to others."""
        if self.outcome == WAITS:
            counters.waits += self.number
        elif self.outcome != REFUSALS:
            entry = Counter(self.number, self.seconds, self.selector_seconds, list(self.buckets))
            counters.add(self.outcome, self.destination, entry)


class TimedRunner(ExchangeRunner):
    """An exchange runner that reports when it finds elements."""

    def __init__(
        self,
        plan: ExchangePlan,
        namespaces: dict[str, DatabaseHandle],
        counters: ExchangeCounters,
        on_found: Callable[[], None],
    ) -> None:
        super().__init__(plan, namespaces, counters)
        self._on_found = on_found
        self.counters = counters

    def found(self) -> None:
        """Note that elements were found."""
        self._on_found()
        super().found()

    def counts(self) -> Iterator[TaskCounts]:
        """Yield the counts of its consumers."""
        name = self.plan.graphed.name
        for (outcome, destination), entry in self.counters.entries.items():
            if entry.count:
                figures = (entry.count, entry.seconds, entry.buckets, entry.selector_seconds)
                yield TaskCounts(name, outcome, destination, *figures)
        if self.counters.waits:
            yield TaskCounts(name, WAITS, -1, self.counters.waits, 0.0, [], 0.0)
        if self.reports.has_refusals:
            yield TaskCounts(name, REFUSALS, -1, 1, 0.0, [], 0.0)


class TaskRun:
    """Runs the consumers of exchanges in one task.

    It ends after ``span`` seconds, or earlier if no consumer has found anything for ``linger``
    seconds; current batches are finished. ``address`` returns the address of a namespace.
    """

    def __init__(
        self,
        exchanges: Sequence[CompiledExchange],
        address: Callable[[str], str],
        *,
        span: float,
        linger: float,
    ) -> None:
        self._span = span
        self._linger = linger
        self._plans = [ExchangePlan.of(exchange) for exchange in exchanges]
        aliases = {alias for plan in self._plans for alias in plan.namespaces}
        self._addresses = {alias: address(alias) for alias in sorted(aliases)}
        self._found_at = self._until = 0.0

    def work(self) -> list[TaskCounts]:
        """Run the consumers, and return their counts."""
        return asyncio.run(self._work()) if self._plans else []

    async def _work(self) -> list[TaskCounts]:
        spaces = {alias: _namespace(alias, address) for alias, address in self._addresses.items()}
        shifts = [
            TimedRunner(plan, spaces, ExchangeCounters(), self._found) for plan in self._plans
        ]
        self._found()
        self._until = monotonic() + self._span
        self._end_in_time(shifts)
        try:
            await asyncio.gather(
                *(
                    shift.run([ExchangeConsumer(shift) for _ in range(shift.plan.loops)])
                    for shift in shifts
                )
            )
        finally:
            for namespace in spaces.values():
                await namespace.listener.close()
        return [counts for shift in shifts for counts in shift.counts()]

    def _found(self) -> None:
        self._found_at = monotonic()

    def _end_in_time(self, shifts: list[TimedRunner]) -> None:
        """Stop the runners when their time is over; finding an element extends it."""
        left = min(self._until, self._found_at + self._linger) - monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._end_in_time, shifts)
            return
        for shift in shifts:
            shift.stop()


def _namespace(alias: str, address: str) -> DatabaseHandle:
    namespace = DatabaseHandle(alias, address)
    namespace.circuit = _circuits.setdefault((alias, address), namespace.circuit)
    return namespace


FORMAT: Final = "psqlmessages-exchange"
OPTION: Final = "settings"
# The longest wait of the driver, and so the delay until it sees new definitions or a stop.
_WAIT_SECONDS: Final = 0.5
_SCHEMA: Final = (
    "exchange string, outcome string, destination int, count bigint, seconds double,"
    " buckets array<bigint>, selector_seconds double"
)


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


class ExchangeSource(DataSource):
    """Data source that runs exchanges while a query reads it."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of :class:`TaskCounts`."""
        return _SCHEMA

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
        settings = self._settings
        exchanges = compiled(partition.value, settings.modules)
        share = TaskRun(exchanges, settings.address, span=settings.span, linger=settings.linger)
        yield from share.work()

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: the elements are already committed."""

    def stop(self) -> None:
        """Close the connections."""
        if self._watcher is not None:
            self._watcher.close()
