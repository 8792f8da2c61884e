"""Exchange runner: consumers that take, route and deliver until stopped."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import NamedTuple

import psycopg

from psqlmessages.client.calls import raise_for_error, translate_error
from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.client.wakeups import PollSchedule, QueueState
from psqlmessages.exceptions import MessagesError, NotAuthorized
from psqlmessages.exchanges.engine import sql
from psqlmessages.exchanges.engine.batch import (
    FALLBACK_DESTINATION,
    DeliveryMode,
    ExchangePlan,
    RoutedBatch,
    TakenElement,
)
from psqlmessages.exchanges.engine.counters import BAD_SELECTOR, TO, ExchangeCounters
from psqlmessages.exchanges.engine.remote import CircuitBreaker, RemotePusher, is_data_error
from psqlmessages.exchanges.engine.sql import Query, ReconnectingConnection, Row
from psqlmessages.retry import Backoff, RateLimitedLogger, error_line, wait_for_event

logger = logging.getLogger("psqlmessages")


class ExchangeLog:
    """Counts the results of the consumers of an exchange, and logs their errors.

    ``may_lack_rules`` is true until the first check of rules, and after errors that missing rules
    may have caused. ``is_failing``: whether the last attempt to take and deliver elements ended
    with an error, for instance because the database is unreachable. Failed elements are no error:
    they wait in the source for a retry.
    """

    def __init__(self, plan: ExchangePlan, counters: ExchangeCounters) -> None:
        self._plan = plan
        self._name = plan.exchange.name
        self._counters = counters
        self._log = RateLimitedLogger(logger)
        self.may_lack_rules = True
        self.is_failing = False

    def _queue_name(self, destination: int) -> str:
        if destination == FALLBACK_DESTINATION:
            return "__no_route__ or __too_many_hops__"
        return str(self._plan.exchange.destinations[destination].queue)

    def on_batch_finished(self, batch: RoutedBatch, seconds: float) -> None:
        """Count the outcomes of a batch, and log its errors."""
        self.is_failing = False
        for outcome, (number, selector_seconds) in batch.count_outcomes().items():
            self._counters.add_elements(outcome, number, seconds, selector_seconds)
        for destination, number in batch.count_copies().items():
            self._counters.entry(TO, destination).count += number
        if batch.lost and batch.is_retry:
            logger.info(
                "exchange %s does not know whether it delivered %d elements, and does not count"
                " them: its connection broke before the answer",
                self._name, len(batch.lost),
            )  # fmt: skip
        elif batch.lost:
            self._log.warning(
                "exchange %s lost the leases of %d elements: they expired, or an earlier attempt"
                " delivered the elements",
                self._name, len(batch.lost),
            )  # fmt: skip
        for destination, reason in batch.selector_errors:
            self._counters.entry(BAD_SELECTOR, destination).count += 1
            self._log.warning(
                "exchange %s: the selector of %s failed (counts as no): %s",
                self._name, self._queue_name(destination), reason, key=destination,
            )  # fmt: skip
        for error in batch.copy_errors:
            self.may_lack_rules = True
            self._log.warning(
                "exchange %s could not copy to %s: %s",
                self._name, self._queue_name(error.destination), error.reason,
            )  # fmt: skip

    def on_queue_empty(self) -> None:
        """Record that a consumer found no elements, without an error."""
        self.is_failing = False

    def on_error(self, error: Exception) -> None:
        """Count and log an error after which a consumer waits; with a traceback if it is a bug."""
        self._counters.waits += 1
        self.is_failing = True
        self.may_lack_rules |= isinstance(error, NotAuthorized)
        is_bug = not isinstance(error, MessagesError | psycopg.Error)
        text = error_line(error)
        if not isinstance(error, MessagesError):
            text = f"{type(error).__name__}: {text}"
        self._log.warning(
            "exchange %s will retry after an error: %s",
            self._name, text, key=is_bug, exc_info=error if is_bug else None,
        )  # fmt: skip


# The consumers of one exchange. One idle consumer watches the queue, the others wait until woken.


class DatabaseHandle:
    """A database with its queue listener and its circuit breaker."""

    def __init__(self, alias: str, address: str) -> None:
        self.alias = alias
        self.address = address
        self.listener = QueueListener(address, "exchange listens")
        self.circuit = CircuitBreaker(alias)


class ExchangeRunner:
    """Runs the consumers of one exchange. After `stop`, each finishes its current batch first."""

    def __init__(
        self, plan: ExchangePlan, databases: dict[str, DatabaseHandle], counters: ExchangeCounters
    ) -> None:
        self.plan = plan
        self.databases = databases
        self.log = ExchangeLog(plan, counters)
        self.stopping = asyncio.Event()
        self.wakeups = 0
        self._woken = asyncio.Event()
        self._has_watcher = False
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._queue_state: QueueState | None = None
        self._schedule = PollSchedule()

    @property
    def source(self) -> DatabaseHandle:
        """The database of the source."""
        return self.databases[self.plan.exchange.source.namespace]

    async def run(self) -> None:
        """Run the consumers until stopped."""
        consumers = [ExchangeConsumer(self) for _ in range(self.plan.consumers)]
        queue, listener = self.plan.exchange.source.name, self.source.listener
        listener.add(queue, self.wake)
        try:
            await asyncio.gather(*(consumer.run() for consumer in consumers))
        finally:
            listener.remove(queue, self.wake)

    def stop(self) -> None:
        """Stop each consumer after its current batch."""
        self.stopping.set()
        self.wake()
        while self._waiters:
            self._wake_one()

    def wake(self) -> None:
        """Wake a consumer, because elements may be available."""
        self.wakeups += 1
        self._schedule.reset()
        self._queue_state = None
        self._woken.set()
        if not self._has_watcher:
            # No consumer watches the queue now, so wake one of those that wait.
            self._wake_one()

    def on_elements_found(self) -> None:
        """Wake another consumer, which takes more elements or watches the queue."""
        self._schedule.reset()
        self._queue_state = None
        self._wake_one()

    async def wait_for_work(self, wakeups: int) -> None:
        """Wait until elements may be available.

        ``wakeups`` is the value of ``self.wakeups`` before the caller found the queue empty. If the
        value has changed, do not wait. Raise psycopg.Error or MessagesError if listening fails.
        """
        if self.stopping.is_set() or self.wakeups != wakeups:
            return
        if self._has_watcher:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future
            return
        self._has_watcher = True
        try:
            await self._watch(wakeups)
        finally:
            self._has_watcher = False

    def _wake_one(self) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)
                return

    async def _watch(self, wakeups: int) -> None:
        """Wait for a notification or the time to poll; do not wait if listening has just begun."""
        queue_state = self._queue_state
        if queue_state is None or queue_state.is_stale(monotonic()):
            source = self.plan.exchange.source.name
            queue_state = await self.source.listener.listen(self.plan.ident, source)
            if queue_state.is_new or self.wakeups != wakeups:
                return
            self._queue_state = queue_state
        self._woken.clear()
        if not self.stopping.is_set():
            seconds = self._schedule.seconds_until_poll(queue_state, monotonic())
            self._schedule.lengthen()
            await wait_for_event(self._woken, seconds)


_ANSWER_SECONDS = 60
# Disconnect at shutdown if the server does not answer within this time.
_CLOSING_SECONDS = 5
_MIN_BACKOFF, _MAX_BACKOFF = timedelta(seconds=0.1), timedelta(seconds=5)
# Elements to route before other tasks may run: a few milliseconds of work.
_ROUTED_PER_TURN = 200
# Approximate limit for the bodies of a batch.
_MAX_BATCH_CHARACTERS = 16 * 1024 * 1024
# The size of the bodies is unknown at first, so start with a small batch.
_FIRST_BATCH_SIZE = 10


class PrefetchedBatch(NamedTuple):
    """Elements taken in the round trip of the previous delivery; the time when that trip began."""

    elements: list[TakenElement]
    started_at: float


class ExchangeConsumer:
    """One consumer of an exchange, with its own connection to each database."""

    def __init__(self, runner: ExchangeRunner) -> None:
        self._runner = runner
        self._plan = runner.plan
        self._log = runner.log
        self._connection = ReconnectingConnection(runner.source.address, _ANSWER_SECONDS)
        self._pushers = {
            alias: RemotePusher(runner.plan.ident, database.address, database.circuit)
            for alias, database in runner.databases.items()
            if alias != runner.source.alias
        }
        self._backoff = Backoff(_MIN_BACKOFF, _MAX_BACKOFF)
        self._batch_size = self._plan.batch_size
        if self._plan.fetches_body:
            self._batch_size = min(_FIRST_BATCH_SIZE, self._batch_size)
        # Number of elements to take one at a time, to find the element that caused a data error.
        self._single_count = 0
        # Id of an element that caused a data error: give it back without routing it. 0: none.
        self._poison_id = 0
        self._requested_size = 0
        self._prefetched: PrefetchedBatch | None = None

    async def run(self) -> None:
        """Run until the runner is stopped, and then finish the current batch."""
        try:
            while not self._runner.stopping.is_set():
                await self._run_step()
        finally:
            for pusher in self._pushers.values():
                await pusher.close()
            # This rolls back a prefetched batch, so that other consumers can take its elements.
            await self._connection.shut_down(_CLOSING_SECONDS)

    async def _run_step(self) -> None:
        wakeups = self._runner.wakeups
        try:
            number = await self._run_once(1 if self._single_count else self._batch_size)
            self._backoff.reset()
            if number:
                self._single_count = max(0, self._single_count - number)
                self._runner.on_elements_found()
            else:
                self._single_count = 0
                self._log.on_queue_empty()
                await self._runner.wait_for_work(wakeups)
        except Exception as error:  # noqa: BLE001 - logged and counted; the other consumers continue
            await self._on_error(error)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, psycopg.Error):
            error = translate_error(error, is_broken=not self._connection.is_open)
        self._log.on_error(error)
        self._prefetched = None
        await self._connection.reset()
        await wait_for_event(self._runner.stopping, self._backoff.record_failure(monotonic()))

    async def _run_once(self, size: int) -> int:
        """Take a batch, route it and deliver it; return the number of elements."""
        started_at = monotonic() if self._prefetched is None else self._prefetched.started_at
        if self._plan.mode is DeliveryMode.RESERVED:
            batch = await self._reserve(size)
        else:
            batch = await self._take(size)
        if batch is None:
            return 0
        if self._plan.mode is DeliveryMode.POPPED:
            await self._push(batch)
        self._log.on_batch_finished(batch, monotonic() - started_at)
        return len(batch.outcome_of)

    # In one transaction

    async def _take(self, size: int) -> RoutedBatch | None:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            elements = prefetched.elements
        else:
            elements = sql.read_taken(await self._connection.execute(*self._take_queries(size)))
        if not elements:
            await self._connection.execute(Query("COMMIT"))
            return None
        may_prefetch = (
            self._plan.mode is DeliveryMode.ONE_DATABASE
            and len(elements) == self._requested_size
            and not self._single_count
        )
        self._on_taken(elements)
        batch = await self._route(elements)
        delivery = (sql.deliver(batch), Query("COMMIT"))
        try:
            if may_prefetch and not self._runner.stopping.is_set():
                answers = await self._deliver_and_take(delivery)
            else:
                answers = await self._connection.execute(*delivery)
        except psycopg.Error as error:
            self._isolate_failure(error, elements)
            raise
        batch.add_delivered(raise_for_error(answers[0][0][0]))
        return batch

    def _take_queries(self, size: int) -> list[Query]:
        self._requested_size = size
        queue = self._plan.exchange.source.name
        return sql.take(self._plan.ident, queue, size, with_body=self._plan.fetches_body)

    async def _deliver_and_take(self, delivery: Sequence[Query]) -> list[list[Row]]:
        """Deliver a batch and take the next one in the same round trip.

        If this takes no element, do not wait for a notification yet, because one may have arrived
        since. The next step takes again, and waits if the queue is still empty.
        """
        started_at = monotonic()
        take = self._take_queries(self._batch_size)
        answers, taken = await self._connection.execute_and_prefetch(delivery, take)
        elements = sql.read_taken(taken) if taken is not None else []
        if elements:
            self._prefetched = PrefetchedBatch(elements, started_at)
        else:
            await self._connection.reset()
        return answers

    # With leases

    async def _reserve(self, size: int) -> RoutedBatch | None:
        plan = self._plan
        deadline = monotonic() + sql.LEASE_SECONDS / 2
        query = sql.reserve(plan.ident, plan.exchange.source.name, size)
        (rows,) = await self._connection.execute(query)
        elements = [TakenElement._make(row) for row in rows]
        if not elements:
            return None
        self._on_taken(elements)
        batch = await self._route(elements)
        await self._push(batch)
        await self._deliver(batch, elements, deadline)
        return batch

    async def _deliver(
        self, batch: RoutedBatch, elements: list[TakenElement], deadline: float
    ) -> None:
        """Deliver reserved elements. If the connection breaks, retry until ``deadline``.

        If the first attempt succeeded but its answer was lost, the retry changes nothing, because
        the leases no longer exist: all elements then count as lost. After any other error, release
        the elements and raise the error.
        """
        while True:
            try:
                (rows,) = await self._connection.execute(sql.deliver(batch))
            except psycopg.Error as error:
                self._isolate_failure(error, elements)
                if self._connection.is_open:
                    await self._connection.reset()
                    leases = [element.ref for element in elements]
                    await self._connection.execute(sql.release(self._plan.ident, leases))
                    raise
                if self._runner.stopping.is_set() or monotonic() > deadline:
                    raise
                await self._on_error(error)
                batch.is_retry = True
            else:
                batch.add_delivered(raise_for_error(rows[0][0]))
                return

    # Common parts

    async def _route(self, elements: list[TakenElement]) -> RoutedBatch:
        batch = RoutedBatch(self._plan)
        for number, element in enumerate(elements, 1):
            if element.id == self._poison_id:
                self._poison_id = 0
                batch.fail_unrouted(element)
            else:
                batch.add(element)
            if number % _ROUTED_PER_TURN == 0:
                await asyncio.sleep(0)
        return batch

    async def _push(self, batch: RoutedBatch) -> None:
        """Push the remote copies to all other databases concurrently."""
        to_push = {
            alias: [copy for copy in copies if copy.ref not in batch.lost]
            for alias, copies in batch.remote_copies.items()
        }
        errors = await asyncio.gather(
            *(self._pushers[alias].push(copies) for alias, copies in to_push.items())
        )
        for copies, copy_errors in zip(to_push.values(), errors, strict=True):
            batch.add_pushed(copies, copy_errors)

    def _on_taken(self, elements: list[TakenElement]) -> None:
        # This batch may take a while: let another consumer wait for notifications.
        self._runner.on_elements_found()
        # Limit the next batch according to the size of these bodies.
        characters = sum(len(element.body or "") for element in elements)
        by_size = len(elements) * _MAX_BATCH_CHARACTERS // max(characters, 1)
        by_growth = 2 * max(self._batch_size, len(elements))
        self._batch_size = max(1, min(self._plan.batch_size, by_size, by_growth))

    def _isolate_failure(self, error: psycopg.Error, elements: list[TakenElement]) -> None:
        """After a data error, take one element at a time, and fail the element that causes it."""
        if is_data_error(error):
            self._single_count = len(elements)
            if len(elements) == 1:
                self._poison_id = elements[0].id
