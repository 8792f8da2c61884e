"""Exchange runner: consumers that take, route and deliver until stopped."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import NamedTuple

import psycopg

from psqlmessages.client.calls import raise_for_error, translate_error
from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.client.wakeups import PollSchedule, QueueState
from psqlmessages.exceptions import ConnectionLost, MessagesError, NotAuthorized
from psqlmessages.exchanges.engine import sql
from psqlmessages.exchanges.engine.batch import (
    DeliveryMode,
    ExchangePlan,
    RoutedBatch,
    TakenElement,
)
from psqlmessages.exchanges.engine.counters import ExchangeCounters
from psqlmessages.exchanges.engine.remote import REFUSALS, CircuitBreaker, RemotePusher
from psqlmessages.exchanges.engine.sql import Query, ReconnectingConnection, Row
from psqlmessages.retry import Backoff, RateLimitedLogger, error_line

# Results of consumers, in counters and in a rate-limited log.

logger = logging.getLogger("psqlmessages")


class ExchangeLog:
    """Counters and log of the consumers of an exchange."""

    def __init__(self, plan: ExchangePlan, counters: ExchangeCounters) -> None:
        self._plan = plan
        self._name = plan.exchange.name
        self._counters = counters
        self._log = RateLimitedLogger(logger)
        self.has_refusals = False

    def _place(self, target: int) -> str:
        if target < 0:
            return "__no_route__ or __too_many_hops__"
        return str(self._plan.exchange.targets[target].place)

    def finished(self, batch: RoutedBatch, seconds: float) -> None:
        """Count the outcomes of a batch, and log its errors."""
        for outcome, (number, selector_seconds) in batch.outcomes().items():
            self._counters.finished(outcome, number, seconds, selector_seconds)
        for target, number in batch.copied().items():
            self._counters.copied(target, number)
        if batch.lost:
            self._log.warning(
                "exchange %s lost %d elements to another consumer: their leases had expired",
                self._name, len(batch.lost),
            )  # fmt: skip
        for target, why in batch.selector_errors:
            self._counters.failed_to_select(target)
            self._log.warning(
                "exchange %s: the selector of %s failed (counts as no): %s",
                self._name, self._place(target), why,
            )  # fmt: skip
        for error in batch.copy_errors:
            self.has_refusals = True
            self._log.warning(
                "exchange %s could not copy to %s: %s",
                self._name, self._place(error.target), error.why,
            )  # fmt: skip

    def failed(self, error: Exception) -> None:
        """Count and log an error after which a consumer waits."""
        self._counters.waits += 1
        self.has_refusals |= isinstance(error, NotAuthorized)
        name, text = self._name, error_line(error)
        if isinstance(error, MessagesError):
            self._log.warning("exchange %s will retry after an error: %s", name, text)
        else:
            self._log.warning(
                "exchange %s will retry after an error: %s: %s", name, type(error).__name__, text
            )

    def unexpected(self, error: Exception) -> None:
        """Log an internal error with its traceback."""
        self._log.warning("exchange %s: unexpected error", self._name, exc_info=error)


# Consumers of one exchange. One of them at a time watches the queue for all.


class DatabaseHandle:
    """A database with its queue listener and its circuit breaker."""

    def __init__(self, alias: str, address: str) -> None:
        self.alias = alias
        self.address = address
        self.listener = QueueListener(address, "exchange listens")
        self.circuit = CircuitBreaker(alias)


class ExchangeRunner:
    """Runs the consumers of one exchange until stopped; each finishes its current batch."""

    def __init__(
        self, plan: ExchangePlan, namespaces: dict[str, DatabaseHandle], counters: ExchangeCounters
    ) -> None:
        self.plan = plan
        self.namespaces = namespaces
        self.reports = ExchangeLog(plan, counters)
        self.is_stopping = False
        self.wakeups = 0
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._is_watched = False
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._queue_state: QueueState | None = None
        self._schedule = PollSchedule()

    @property
    def source(self) -> DatabaseHandle:
        """The database of the source."""
        return self.namespaces[self.plan.exchange.source.namespace]

    async def run(self, loops: list[ExchangeConsumer]) -> None:
        """Run the consumers until stopped."""
        queue, listener = self.plan.exchange.source.queue, self.source.listener
        listener.add(queue, self.wake)
        try:
            await asyncio.gather(*(loop.run() for loop in loops))
        finally:
            listener.remove(queue, self.wake)

    def stop(self) -> None:
        """Stop each consumer after its current batch."""
        self.is_stopping = True
        self._stopping.set()
        self.wake()
        while self._waiters:
            self._wake_one()

    def wake(self) -> None:
        """Note that elements may be available."""
        self.wakeups += 1
        self._schedule.reset()
        self._queue_state = None
        self._woken.set()
        if not self._is_watched:
            # The watching consumer may be busy for long: let another one look.
            self._wake_one()

    def found(self) -> None:
        """Note that elements were found: another consumer looks for more, or watches the queue."""
        self._schedule.reset()
        self._queue_state = None
        self._wake_one()

    async def wait_for_work(self, wakeups: int) -> None:
        """Wait until elements may be available.

        ``wakeups`` is the number of wake-ups before the last look; if it has changed, do not wait.
        Raise psycopg.Error or MessagesError if the queue cannot be watched.
        """
        if self.is_stopping or self.wakeups != wakeups:
            return
        if self._is_watched:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future
            return
        self._is_watched = True
        try:
            await self._watch(wakeups)
        finally:
            self._is_watched = False

    async def pause(self, seconds: float) -> None:
        """Wait after an error, or until stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _wake_one(self) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)
                return

    async def _watch(self, wakeups: int) -> None:
        queue_state = self._queue_state
        if queue_state is None or queue_state.is_stale(monotonic()):
            source = self.plan.exchange.source.queue
            queue_state = await self.source.listener.listen(self.plan.ident, source)
            if queue_state.is_new or self.wakeups != wakeups:
                return
            self._queue_state = queue_state
        self._woken.clear()
        if not self.is_stopping:
            seconds = self._schedule.seconds(queue_state, monotonic())
            self._schedule.polled()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken.wait()


_ANSWER_SECONDS = 60
# Disconnect at shutdown if the server does not answer within this time.
_CLOSING_SECONDS = 5
_LEAST, _MOST = timedelta(seconds=0.1), timedelta(seconds=5)
# Elements to route before other tasks get a turn: a few milliseconds of work.
_ROUTED_AT_ONCE = 200
# Approximate limit for the bodies of a batch. Their size is unknown at first, so start small.
_CHARACTERS = 16 * 1024 * 1024
_FIRST_BATCH = 10


class PrefetchedBatch(NamedTuple):
    """Elements that were taken with the previous delivery, and when this began."""

    elements: list[TakenElement]
    began: float


class ExchangeConsumer:
    """One consumer of an exchange, with its own connection to each database."""

    def __init__(self, runner: ExchangeRunner) -> None:
        self._runner = runner
        self._plan = runner.plan
        self._reports = runner.reports
        self._connection = ReconnectingConnection(runner.source.address, _ANSWER_SECONDS)
        self._pushers = {
            alias: RemotePusher(
                runner.plan.ident, runner.namespaces[alias].address, namespace.circuit
            )
            for alias, namespace in runner.namespaces.items()
            if alias != runner.source.alias
        }
        self._backoff = Backoff(_LEAST, _MOST)
        most = _FIRST_BATCH if self._plan.fetches_body else self._plan.batch
        self._limit = min(most, self._plan.batch)
        self._one_by_one_left = 0
        self._poison_id = 0
        self._asked = 0
        self._prefetched: PrefetchedBatch | None = None

    async def run(self) -> None:
        """Run until the runner is stopped; finish the current batch."""
        try:
            while not self._runner.is_stopping:
                await self._step()
        finally:
            for pusher in self._pushers.values():
                await pusher.close()
            # A prefetched batch is rolled back, so that others can take it immediately.
            await self._connection.end(_CLOSING_SECONDS)

    async def _step(self) -> None:
        wakeups = self._runner.wakeups
        try:
            number = await self._run_once(1 if self._one_by_one_left else self._limit)
            self._backoff.succeeded()
            self._one_by_one_left = max(0, self._one_by_one_left - number) if number else 0
            if number:
                self._runner.found()
            else:
                await self._runner.wait_for_work(wakeups)
        except (psycopg.Error, MessagesError) as error:
            await self._failed(error)
        except Exception as error:  # noqa: BLE001 - logged and counted; the other consumers continue
            self._reports.unexpected(error)
            await self._failed(error)

    async def _failed(self, error: Exception) -> None:
        if isinstance(error, psycopg.Error):
            error = translate_error(error, is_broken=not self._connection.is_open)
        self._reports.failed(error)
        self._prefetched = None
        await self._connection.reset()
        await self._runner.pause(self._backoff.failed(monotonic()))

    async def _run_once(self, size: int) -> int:
        """Take a batch, route it and deliver it; return the number of elements."""
        began = monotonic() if self._prefetched is None else self._prefetched.began
        if self._plan.flow is DeliveryMode.RESERVED:
            batch = await self._reserve(size)
        else:
            batch = await self._take(size)
        if batch is None:
            return 0
        if self._plan.flow is DeliveryMode.POPPED:
            await self._push(batch)
        self._reports.finished(batch, monotonic() - began)
        return len(batch.outcome_of)

    # In one transaction

    async def _take(self, size: int) -> RoutedBatch | None:
        ahead, self._prefetched = self._prefetched, None
        if ahead is not None:
            elements = ahead.elements
        else:
            elements = sql.taken_at_once(await self._connection.ask(*self._taking(size)))
        if not elements:
            await self._connection.ask(Query("COMMIT"))
            return None
        is_all = len(elements) < self._asked
        self._on_taken(elements)
        batch = await self._routed(elements)
        may_prefetch = self._plan.flow is DeliveryMode.WITHIN and not (
            is_all or self._one_by_one_left or self._runner.is_stopping
        )
        delivering = (sql.deliver(batch, sorted(batch.failed)), Query("COMMIT"))
        try:
            if may_prefetch:
                answers = await self._deliver_and_take(delivering)
            else:
                answers = await self._connection.ask(*delivering)
        except psycopg.Error as error:
            self._isolate_failure(error, elements)
            raise
        self._acknowledge(batch, answers[0])
        return batch

    def _taking(self, size: int) -> list[Query]:
        self._asked = size
        plan = self._plan
        queue = plan.exchange.source.queue
        return sql.take(plan.ident, queue, size, with_body=plan.fetches_body)

    async def _deliver_and_take(self, delivering: Sequence[Query]) -> list[list[Row]]:
        """Deliver a batch and take the next one in the same round trip.

        If there is none, take again after this batch: a notification may arrive in between.
        """
        began = monotonic()
        answers, taking = await self._connection.ask_on(delivering, self._taking(self._limit))
        elements = sql.taken_at_once(taking) if taking is not None else []
        if elements:
            self._prefetched = PrefetchedBatch(elements, began)
        else:
            await self._connection.reset()
        return answers

    # With leases

    async def _reserve(self, size: int) -> RoutedBatch | None:
        plan = self._plan
        until = monotonic() + sql.LEASE_SECONDS / 2
        (rows,) = await self._connection.ask(
            sql.reserve(plan.ident, plan.exchange.source.queue, size)
        )
        elements = [TakenElement._make(row) for row in rows]
        if not elements:
            return None
        self._on_taken(elements)
        batch = await self._routed(elements)
        await self._push(batch)
        await self._deliver(batch, elements, until)
        return batch

    async def _deliver(
        self, batch: RoutedBatch, elements: list[TakenElement], until: float
    ) -> None:
        """Deliver reserved elements; if the connection breaks, retry while the leases are valid.

        If the first attempt succeeded but its answer was lost, the leases are gone, and the retry
        changes nothing.
        """
        while True:
            try:
                (rows,) = await self._connection.ask(sql.deliver(batch, sorted(batch.failed)))
            except psycopg.Error as error:
                self._isolate_failure(error, elements)
                is_broken = not self._connection.is_open
                if not is_broken:
                    await self._connection.reset()
                    leases = [taken.ref for taken in elements]
                    await self._connection.ask(sql.release(self._plan.ident, leases))
                if not is_broken or self._runner.is_stopping or monotonic() > until:
                    raise
                await self._failed(error)
            else:
                self._acknowledge(batch, rows)
                return

    # Common parts

    async def _routed(self, elements: list[TakenElement]) -> RoutedBatch:
        batch = RoutedBatch(self._plan)
        for number, taken in enumerate(elements, 1):
            if taken.id == self._poison_id:
                self._poison_id = 0
                batch.fail_unrouted(taken)
            else:
                batch.add(taken)
            if number % _ROUTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return batch

    async def _push(self, batch: RoutedBatch) -> None:
        """Push to the other databases concurrently."""
        wanted = {
            alias: [copy for copy in copies if copy.ref not in batch.lost]
            for alias, copies in batch.remote.items()
        }
        errors = await asyncio.gather(
            *(self._pushers[alias].push(copies) for alias, copies in wanted.items())
        )
        for copies, why in zip(wanted.values(), errors, strict=True):
            batch.pushed(copies, why)

    @staticmethod
    def _acknowledge(batch: RoutedBatch, rows: Sequence[tuple[object, ...]]) -> None:
        answer = raise_for_error(rows[0][0])
        batch.acknowledge(answer["Lost"], answer["Refused"])

    def _on_taken(self, elements: list[TakenElement]) -> None:
        # This batch may take a while: let another consumer wait for notifications.
        self._runner.found()
        # Limit the next batch according to the size of these bodies.
        weight = sum(len(taken.body) for taken in elements if taken.body is not None)
        most = len(elements) * _CHARACTERS // max(weight, 1)
        self._limit = max(1, min(self._plan.batch, most, 2 * max(self._limit, len(elements))))

    def _isolate_failure(self, error: psycopg.Error, elements: list[TakenElement]) -> None:
        """After a data error, retry one element at a time, and fail the one that causes it."""
        is_of_data = (error.sqlstate or "")[:2] in REFUSALS or isinstance(error, psycopg.DataError)
        if not is_of_data or isinstance(error, ConnectionLost):
            return
        self._one_by_one_left = len(elements)
        if len(elements) == 1:
            self._poison_id = elements[0].id
