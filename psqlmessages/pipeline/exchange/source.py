"""Data source by which Spark runs exchanges; its rows are counts.

An offset is the number of a turn and does not refer to elements: the queues themselves ensure that
each element is moved once. If Spark repeats a turn, the turn moves the elements available then.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import psycopg
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.client.wakeups import PollSchedule
from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.engine.batch import ExchangePlan
from psqlmessages.exchanges.engine.counters import ExchangeCounters, Histogram
from psqlmessages.exchanges.engine.remote import CircuitBreaker
from psqlmessages.exchanges.engine.runner import DatabaseHandle, ExchangeRunner
from psqlmessages.pipeline.database import dsn
from psqlmessages.pipeline.exchange.definition import (
    DefinitionFolder,
    ExchangeInput,
    compile_exchanges,
    read_inputs,
)
from psqlmessages.pipeline.source_options import refuse_unknown
from psqlmessages.retry import Backoff, RateLimitedLogger, error_line, wait_for_event

logger = logging.getLogger("psqlmessages")

# Values of TaskCounts.outcome that are not outcomes of elements.
WAITS: Final = "waits"  # The number of errors after which a consumer has waited.
MAY_LACK_RULES: Final = "may_lack_rules"  # The number is 1.

# By namespace and address. All tasks of this process share them, so an open circuit stays open.
_circuits: Final[dict[tuple[str, str], CircuitBreaker]] = {}


class TaskCounts(NamedTuple):
    """The counts of one outcome of an exchange in one task: a row of the data source."""

    exchange: str
    outcome: str
    destination: int
    number: int
    seconds: float
    buckets: list[int]
    selector_seconds: float

    @property
    def may_lack_rules(self) -> bool:
        """Whether a rule of the exchange may be missing."""
        return self.outcome == MAY_LACK_RULES

    def add_to(self, counters: ExchangeCounters) -> None:
        """Add these counts to the counters of the exchange."""
        if self.outcome == WAITS:
            counters.waits += self.number
        elif not self.may_lack_rules:
            entry = Histogram(self.number, self.seconds, self.selector_seconds, list(self.buckets))
            counters.entry(self.outcome, self.destination).add(entry)


class TimedRunner(ExchangeRunner):
    """An exchange runner that records when it last found elements."""

    def __init__(self, plan: ExchangePlan, databases: dict[str, DatabaseHandle]) -> None:
        self.counters = ExchangeCounters()
        super().__init__(plan, databases, self.counters)
        self.found_at = monotonic()

    def on_elements_found(self) -> None:
        """Record the time."""
        self.found_at = monotonic()
        super().on_elements_found()

    def counts(self) -> Iterator[TaskCounts]:
        """Yield the counts by outcome and destination (-1: none)."""
        name = self.plan.exchange.name
        for (outcome, destination), entry in self.counters.entries.items():
            if entry.count:
                values = (entry.count, entry.seconds, entry.buckets, entry.selector_seconds)
                yield TaskCounts(name, outcome, destination, *values)
        if self.counters.waits:
            yield TaskCounts(name, WAITS, -1, self.counters.waits, 0.0, [], 0.0)
        if self.log.may_lack_rules:
            yield TaskCounts(name, MAY_LACK_RULES, -1, 1, 0.0, [], 0.0)


FORMAT: Final = "psqlmessages-exchange"
OPTION: Final = "settings"
# The longest wait for elements. During a wait, ExchangeReader does not notice new definitions or a
# stop.
_MAX_WAIT_SECONDS: Final = 0.5


@dataclass(frozen=True)
class TurnSettings:
    """The settings of a turn: see SparkExchanges."""

    folder: str
    tasks: int
    span: float
    linger: float
    modules: tuple[str, ...] = ()

    def as_option(self) -> str:
        """Return the settings as JSON, the value of the source's only option."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, options: Mapping[str, str]) -> TurnSettings:
        """Parse the settings from the options; raises OptionRefused."""
        refuse_unknown(options, (OPTION,))
        settings = json.loads(options[OPTION])
        return cls(**{**settings, "modules": tuple(settings["modules"])})


async def run_task(plans: Sequence[ExchangePlan], settings: TurnSettings) -> list[TaskCounts]:
    """Run exchanges in one task for ``span`` seconds or less; return their counts."""
    databases = {}
    for alias in sorted({alias for plan in plans for alias in plan.namespaces}):
        address = dsn(namespace=alias)
        databases[alias] = handle = DatabaseHandle(alias, address)
        handle.circuit = _circuits.setdefault((alias, address), handle.circuit)
    runners = [TimedRunner(plan, databases) for plan in plans]
    deadline = monotonic() + settings.span

    def stop_when_due() -> None:
        # `stop` lets the runners finish their current batches.
        found_at = max((runner.found_at for runner in runners), default=0.0)
        seconds_left = min(deadline, found_at + settings.linger) - monotonic()
        if seconds_left > 0:
            asyncio.get_running_loop().call_later(seconds_left, stop_when_due)
            return
        for runner in runners:
            runner.stop()

    stop_when_due()
    try:
        await asyncio.gather(*(runner.run() for runner in runners))
    finally:
        for handle in databases.values():
            await handle.listener.close()
    return [counts for runner in runners for counts in runner.counts()]


_MIN_BACKOFF, _MAX_BACKOFF = timedelta(seconds=0.1), timedelta(seconds=5)


@dataclass(eq=False)
class WatchedSource:
    """One source queue, and the time at which to query its state next."""

    source: ExchangeInput
    listener: QueueListener
    log: RateLimitedLogger
    wake_event: asyncio.Event
    backoff: Backoff = field(default_factory=lambda: Backoff(_MIN_BACKOFF, _MAX_BACKOFF))
    next_at: float = 0.0
    wakeups: int = 0
    schedule: PollSchedule = field(default_factory=PollSchedule)

    def wake(self) -> None:
        """Schedule the next query of the state: now, or after the backoff if the server is down."""
        self.wakeups += 1
        self.schedule.reset()
        self.next_at = self.backoff.next_at
        self.wake_event.set()

    async def has_work(self) -> bool:
        """Return whether the queue has available elements (False if an error is logged)."""
        wakeups = self.wakeups
        try:
            state = await self.listener.listen(self.source.ident, self.source.queue.name)
        except (psycopg.Error, MessagesError) as error:
            now = monotonic()
            self.next_at = now + self.backoff.record_failure(now)
            text = error_line(error)
            self.log.warning("node %s cannot watch queue %s: %s", *self.source, text)
            return False
        self.backoff.reset()
        now = monotonic()
        next_at = state.listen_again_at if state.next_at is None else state.next_at
        # If `wake` was called during the query, keep the time that `wake` has set.
        if self.wakeups == wakeups:
            self.next_at = min(now + self.schedule.interval, next_at)
            self.schedule.lengthen()
        return next_at <= now


class SourceWatcher:
    """Watches the source queues of exchanges, with one listening connection per database."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._listeners: dict[str, QueueListener] = {}
        self._watched: dict[ExchangeInput, WatchedSource] = {}
        self._log = RateLimitedLogger(logger)
        self._wake_event = asyncio.Event()

    def wait_for_work(self, sources: Collection[ExchangeInput], seconds: float) -> bool:
        """Wait until a queue has available elements; return False on timeout.

        If a server is down or a rule is missing, log the error and retry.
        """
        return self._loop.run_until_complete(self._wait_for_work(sources, seconds))

    def wake(self) -> None:
        """Make `wait_for_work` query the state of all queues again."""
        for watched in self._watched.values():
            watched.wake()

    def close(self) -> None:
        """Close the connections."""
        for listener in self._listeners.values():
            self._loop.run_until_complete(listener.close())
        self._loop.close()

    async def _wait_for_work(self, sources: Collection[ExchangeInput], seconds: float) -> bool:
        deadline = monotonic() + seconds
        self._watch_only(sources)
        while True:
            self._wake_event.clear()
            for watched in self._watched.values():
                if watched.next_at <= monotonic() and await watched.has_work():
                    return True
            next_at = min([deadline, *(watched.next_at for watched in self._watched.values())])
            seconds_left = next_at - monotonic()
            if seconds_left > 0:
                await wait_for_event(self._wake_event, seconds_left)
            if monotonic() >= deadline:
                return False

    def _watch_only(self, sources: Collection[ExchangeInput]) -> None:
        for source in self._watched.keys() - set(sources):
            watched = self._watched.pop(source)
            watched.listener.remove(source.queue.name, watched.wake)
        for source in sources:
            namespace = source.queue.namespace
            if namespace not in self._listeners:
                listener = QueueListener(dsn(namespace=namespace), "exchange listens")
                self._listeners[namespace] = listener
            if source not in self._watched:
                listener = self._listeners[namespace]
                watched = WatchedSource(source, listener, self._log, self._wake_event)
                listener.add(source.queue.name, watched.wake)
                self._watched[source] = watched


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
    """Starts a turn of several tasks when a source queue has available elements."""

    def __init__(self, settings: TurnSettings) -> None:
        self._settings = settings
        self._watcher: SourceWatcher | None = None
        self._turn = -1
        self._wait_seconds = _MAX_WAIT_SECONDS

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Return the offset before the first turn."""
        return {"turn": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop when the queues are empty."""
        self._wait_seconds = 0.0

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Wait briefly for available elements; return ``start`` if there are none."""
        if self._watcher is None:
            self._watcher = SourceWatcher()
        turn = start["turn"]
        if turn != self._turn:
            self._turn = turn
            self._watcher.wake()
        # The previous turn has ended, and the next one uses the definitions read here or later.
        folder = DefinitionFolder(Path(self._settings.folder))
        version, text = folder.get()
        if version != folder.version_in_use:
            folder.record_in_use(version)
        has_work = self._watcher.wait_for_work(read_inputs(text), self._wait_seconds)
        return {"turn": turn + 1 if has_work else turn}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return one partition per task."""
        _, text = DefinitionFolder(Path(self._settings.folder)).get()
        return [InputPartition(text) for _ in range(self._settings.tasks)]

    def read(self, partition: InputPartition) -> Iterator[TaskCounts]:
        """Run the exchanges for a limited time, on an executor; yield their counts at the end."""
        exchanges = compile_exchanges(partition.value, self._settings.modules)
        plans = [ExchangePlan.of(exchange) for exchange in exchanges]
        yield from asyncio.run(run_task(plans, self._settings))

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: the exchanges commit elements themselves."""

    def stop(self) -> None:
        """Close the connections."""
        if self._watcher is not None:
            self._watcher.close()
