"""Exchange worker: starts and stops the exchanges of a process when definitions change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any, Final, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, close_old_connections, connections

from psqlmessages.cli.output import Progress, fail
from psqlmessages.conf import get_settings
from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.engine.batch import ExchangePlan
from psqlmessages.exchanges.engine.runner import DatabaseHandle, ExchangeRunner
from psqlmessages.exchanges.store import repository
from psqlmessages.exchanges.store.definitions import DefinedExchange, MalformedExchanges
from psqlmessages.exchanges.store.permissions import MissingRuleCheck
from psqlmessages.exchanges.store.stats import CounterStore
from psqlmessages.models import Exchange
from psqlmessages.orm import direct_dsn, resolve_alias
from psqlmessages.retry import RateLimitedLogger, error_line, wait_for_event
from psqlmessages.shutdown import stop_on_signals

logger = logging.getLogger("psqlmessages")

T = TypeVar("T")

CHECK_SECONDS: Final = 0.5
WRITE_SECONDS: Final = 2.0


@dataclass
class RunningExchange:
    """An exchange that runs in this process, and its task."""

    changed_at: datetime
    definition: DefinedExchange
    runner: ExchangeRunner
    task: asyncio.Task[None]
    missing_rules: MissingRuleCheck = field(default_factory=MissingRuleCheck)


class ExchangeWorker:
    """Runs the exchanges that were started: all of them, or only those with the given names."""

    def __init__(self, names: Collection[str] = (), using: str | None = None) -> None:
        self._names = frozenset(names)
        self._using = resolve_alias(using)
        self._databases: dict[str, DatabaseHandle] = {}
        self._running: dict[int, RunningExchange] = {}
        # Exchanges that cannot run: their primary keys, and when their definition was changed.
        self._invalid: dict[int, datetime] = {}
        self._stopping_tasks: set[asyncio.Task[None]] = set()
        self._log = RateLimitedLogger(logger)
        self._stopping = asyncio.Event()
        self._next_write_at = 0.0
        self._rule_check: asyncio.Task[None] | None = None
        self.counter_store = CounterStore(self._using)

    @property
    def running(self) -> list[str]:
        """Names of the exchanges that run now."""
        return sorted(running.definition.name for running in self._running.values())

    def stop(self) -> None:
        """Stop after the current batches."""
        self._stopping.set()
        for running in self._running.values():
            running.runner.stop()

    async def run(self, on_check: Callable[[], None] = lambda: None) -> None:
        """Run until stopped; call ``on_check`` twice a second.

        Raise Django's database error if the definitions cannot be read at the start.
        """
        try:
            await self._update_running()
            while not self._stopping.is_set():
                on_check()
                await wait_for_event(self._stopping, CHECK_SECONDS)
                if not self._stopping.is_set():
                    await self._run_once()
        finally:
            await self._shut_down()

    async def _run_once(self) -> None:
        try:
            await self._update_running()
            await self._write_counters()
        except Error as error:
            self._log.warning("exchanges: database error, trying again: %s", error_line(error))
        # Use a separate task, because a database that does not answer must not delay heartbeats.
        if self._rule_check is None or self._rule_check.done():
            self._rule_check = asyncio.create_task(self._check_rules(), name="exchange rules")

    async def _shut_down(self) -> None:
        for key in list(self._running):
            self._stop_exchange(key)
        if self._stopping_tasks:
            await asyncio.wait(self._stopping_tasks)
        if self._rule_check is not None:
            await asyncio.wait({self._rule_check})
        for database in self._databases.values():
            await database.listener.close()
        try:
            self._next_write_at = 0.0
            await self._write_counters()
        except Error as error:
            self._log.warning("exchanges: could not write the last counters: %s", error_line(error))
        await _run_in_thread(connections.close_all)

    # Definitions

    async def _update_running(self) -> None:
        """Start new exchanges, restart changed ones, and stop those that should not run."""
        wanted = await _run_in_thread(self._change_times)
        for key in self._running.keys() - wanted.keys():
            self._stop_exchange(key)
        # Forget invalid definitions that have been changed, and exchanges that should not run.
        self._invalid = dict(self._invalid.items() & wanted.items())
        times = {key: running.changed_at for key, running in self._running.items()} | self._invalid
        changed = [key for key, changed_at in wanted.items() if times.get(key) != changed_at]
        if changed:
            for row in await _run_in_thread(self._rows, changed):
                self._start_exchange(row)

    def _change_times(self) -> dict[int, datetime]:
        """Return when each exchange that should run was changed."""
        exchanges = Exchange.objects.using(self._using).filter(is_running=True)
        if self._names:
            exchanges = exchanges.filter(name__in=self._names)
        return dict(exchanges.values_list("pk", "changed_at"))

    def _rows(self, keys: list[int]) -> list[Exchange]:
        rows = list(repository.rows(self._using).filter(pk__in=keys, is_running=True))
        # Two queries read the rows and their destinations. Skip rows that changed between them.
        change_times = self._change_times()
        return [row for row in rows if change_times.get(row.pk) == row.changed_at]

    def _start_exchange(self, row: Exchange) -> None:
        """Run the definition in a row, after consumers of an earlier definition have stopped."""
        former = self._stop_exchange(row.pk)
        try:
            plan = ExchangePlan.of(repository.compile_exchange(row))
            databases = {alias: self._database(alias) for alias in plan.namespaces}
        except (MalformedExchanges, MessagesError, ImproperlyConfigured) as error:
            self._invalid[row.pk] = row.changed_at
            logger.warning("exchange %s cannot run: %s", row.name, error_line(error))
            return
        runner = ExchangeRunner(plan, databases, self.counter_store.of(row.pk))

        async def run_after_former() -> None:
            if former is not None:
                await asyncio.wait({former})
            await runner.run()

        task = asyncio.create_task(run_after_former(), name=f"exchange {row.name}")
        definition = repository.to_definition(row)
        self._running[row.pk] = RunningExchange(row.changed_at, definition, runner, task)
        logger.info("exchange %s started with %d consumers", row.name, plan.consumers)

    def _database(self, alias: str) -> DatabaseHandle:
        if alias not in self._databases:
            if alias not in connections.settings:
                raise ImproperlyConfigured(f"DATABASES has no alias {alias!r}.")
            self._databases[alias] = DatabaseHandle(alias, direct_dsn(alias))
        return self._databases[alias]

    def _stop_exchange(self, key: int) -> asyncio.Task[None] | None:
        if (running := self._running.pop(key, None)) is None:
            return None
        running.runner.stop()
        self.counter_store.set_state(key, [], is_failing=False)
        self._stopping_tasks.add(running.task)
        running.task.add_done_callback(self._stopping_tasks.discard)
        logger.info("exchange %s is stopping", running.definition.name)
        return running.task

    # Counters and missing rules

    async def _write_counters(self) -> None:
        if monotonic() < self._next_write_at:
            return
        for key, running in self._running.items():
            missing, is_failing = running.missing_rules.describe(), running.runner.log.is_failing
            self.counter_store.set_state(key, missing, is_failing=is_failing)
        rows = self.counter_store.list_rows(self._running.keys())
        self.counter_store.mark_written(await _run_in_thread(self.counter_store.write, rows))
        self._next_write_at = monotonic() + WRITE_SECONDS

    async def _check_rules(self) -> None:
        """Check the rules of exchanges that may lack rules or lacked rules at the last check."""

        def check(running: RunningExchange) -> None:
            try:
                running.missing_rules.check(running.definition, self._using)
            finally:
                connections.close_all()

        for running in list(self._running.values()):
            may_lack_rules = running.runner.log.may_lack_rules or running.missing_rules.rules
            if self._stopping.is_set() or not (may_lack_rules and running.missing_rules.is_due):
                continue
            running.runner.log.may_lack_rules = False
            await asyncio.to_thread(check, running)


async def _run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in the thread that uses Django's connections."""

    def run() -> T:
        close_old_connections()
        return function(*arguments)

    return await sync_to_async(run)()


# The command `exchange run`.


def run(names: Sequence[str], using: str) -> int:
    """Run the named exchanges, or all, until SIGINT or SIGTERM; return the exit code."""
    known = set(Exchange.objects.using(using).values_list("name", flat=True))
    if unknown := sorted(set(names) - known):
        return fail(f"there is no exchange {', '.join(unknown)}")
    with Progress("routed") as progress:
        worker = ExchangeWorker(names, using)
        asyncio.run(_run(worker, progress))
        progress.count = worker.counter_store.elements
        progress.say(f"stopped: {worker.counter_store.summary()}")
    return 0


async def _run(worker: ExchangeWorker, progress: Progress) -> None:
    loop = asyncio.get_running_loop()
    shown: list[str] | None = None

    def stop() -> None:
        # Stop within the event loop, because a signal may interrupt the loop anywhere.
        loop.call_soon_threadsafe(worker.stop)

    def show_progress() -> None:
        nonlocal shown
        if worker.running != shown:
            shown = worker.running
            names = ", ".join(shown) or "no exchange (define some with exchange load)"
            progress.say(f"running {names}; press Ctrl-C to stop")
        progress.update(worker.counter_store.elements)

    with stop_on_signals(stop, "batch", get_settings().STOP_SECONDS):
        await worker.run(show_progress)
