"""The data source by which Spark runs exchanges: its rows are what was counted.

An offset is the number of a turn and says nothing of elements: that each is moved once is the
queues' own matter. A turn that Spark repeats takes what is there by then.
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

# Shares: what one task on an executor does for exchanges: it runs their loops for a while.

# Not outcomes of elements: how often loops had to wait, and whether something was refused.
WAITS: Final = "waits"
REFUSALS: Final = "refusals"

# A database that is away is left alone by the next share of this process too.
_circuits: Final[dict[tuple[str, str], CircuitBreaker]] = {}


class TaskCounts(NamedTuple):
    """What a share has counted of one exchange: the rows of the data source."""

    exchange: str
    outcome: str
    destination: int
    number: int
    seconds: float
    buckets: list[int]
    selector_seconds: float

    def add_to(self, counters: ExchangeCounters) -> None:
        """Add it up."""
        if self.outcome == WAITS:
            counters.waits += self.number
        elif self.outcome != REFUSALS:
            entry = Counter(self.number, self.seconds, self.selector_seconds, list(self.buckets))
            counters.add(self.outcome, self.destination, entry)


class TimedRunner(ExchangeRunner):
    """A crew that tells when there was something to take."""

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
        """Note that there was something."""
        self._on_found()
        super().found()

    def counts(self) -> Iterator[TaskCounts]:
        """Yield what its loops have counted."""
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
    """The loops of exchanges in one task.

    It ends after ``span`` seconds, and before that when no loop has found anything for ``linger``
    seconds; what is in hand then is finished. ``address`` returns a namespace's.
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
        """Do it, and return what was counted."""
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
                await namespace.watch.close()
        return [counts for shift in shifts for counts in shift.counts()]

    def _found(self) -> None:
        self._found_at = monotonic()

    def _end_in_time(self, shifts: list[TimedRunner]) -> None:
        """Stop them when it is time, which every find may put off."""
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
# How long the driver waits at a time, and so how late it hears of new definitions and of its end.
_WAIT_SECONDS: Final = 0.5
_SCHEMA: Final = (
    "exchange string, outcome string, destination int, count bigint, seconds double,"
    " buckets array<bigint>, selector_seconds double"
)


@dataclass(frozen=True)
class TurnSettings:
    """How a turn is shared out; ``dsn_file`` holds the address of the namespace default."""

    folder: str
    tasks: int
    span: float
    linger: float
    modules: tuple[str, ...] = ()
    dsn_file: str | None = None

    def as_option(self) -> str:
        """Write them as the one option of the source."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, options: Mapping[str, str]) -> TurnSettings:
        """Read them from the options; raises OptionRefused."""
        refuse_unknown(options, (OPTION,))
        given = json.loads(options[OPTION])
        return cls(**{**given, "modules": tuple(given["modules"])})

    def address(self, namespace: str) -> str:
        """Return the address of a namespace's database, as this process is told; or DsnMissing."""
        is_named = self.dsn_file is not None and namespace == "default"
        return database.dsn({database.OPTION: str(self.dsn_file)} if is_named else None, namespace)


class ExchangeSource(DataSource):
    """Runs exchanges as long as it is read."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of :class:`Counts`."""
        return _SCHEMA

    def streamReader(self, schema: StructType) -> ExchangeReader:  # noqa: N802
        """Return what runs them."""
        return ExchangeReader(TurnSettings.of(self.options))


class ExchangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offers a turn whenever a source has something to take, and shares it out among tasks."""

    def __init__(self, settings: TurnSettings) -> None:
        self._settings = settings
        self._watcher: SourceWatcher | None = None
        self._turn = -1
        self._wait_seconds = _WAIT_SECONDS

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Begin with the first turn."""
        return {"turn": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End as soon as there is nothing to take."""
        self._wait_seconds = 0.0

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Wait a little for something to take; offer another turn where there is something."""
        if self._watcher is None:
            self._watcher = SourceWatcher(self._settings.address)
        turn = start["turn"]
        if turn != self._turn:
            self._turn = turn
            self._watcher.wake()
        # The turn before this offset has ended, and what comes goes by what is read here.
        folder = DefinitionFolder(Path(self._settings.folder))
        edition, text = folder.get()
        if edition != folder.taken_over:
            folder.take_over(edition)
        has_work = self._watcher.has_work(sources(text), self._wait_seconds)
        return {"turn": turn + 1 if has_work else turn}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return a share for each task."""
        _, text = DefinitionFolder(Path(self._settings.folder)).get()
        return [InputPartition(text) for _ in range(self._settings.tasks)]

    def read(self, partition: InputPartition) -> Iterator[TaskCounts]:
        """Run the loops for a while; on an executor."""
        settings = self._settings
        exchanges = compiled(partition.value, settings.modules)
        share = TaskRun(exchanges, settings.address, span=settings.span, linger=settings.linger)
        yield from share.work()

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: what was taken is committed."""

    def stop(self) -> None:
        """Disconnect."""
        if self._watcher is not None:
            self._watcher.close()
