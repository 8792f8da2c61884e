"""Worker: a process's share of all exchanges; it takes up what changes in their definitions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, close_old_connections, connections

from psqlmessages.client.backoff import QuietLog
from psqlmessages.databases import dsn
from psqlmessages.exceptions import MessagesError
from psqlmessages.graph import rights, stored
from psqlmessages.graph.crews import Crew, Namespace
from psqlmessages.graph.entries import DefinedExchange, MalformedExchanges
from psqlmessages.graph.ledgers import Ledger
from psqlmessages.graph.loops import Loop
from psqlmessages.graph.plans import Plan
from psqlmessages.models import Exchange

logger = logging.getLogger("psqlmessages")

T = TypeVar("T")

LOOK_SECONDS: Final = 0.5
WRITE_SECONDS: Final = 2.0
ADD_UP_SECONDS: Final = 60 * 60
RULES_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Version:
    """A state of a stored exchange."""

    name: str
    changed_at: Any


@dataclass
class Post:
    """An exchange that this process runs, and the task that does."""

    version: Version
    definition: DefinedExchange
    crew: Crew
    task: asyncio.Task[None]
    told: set[rights.MissingRule] = field(default_factory=set)


class Worker:
    """Runs exchanges, all or those named, while they are to run; until ``stop``."""

    def __init__(self, names: Collection[str] = (), using: str = DEFAULT_DB_ALIAS) -> None:
        self._names = frozenset(names)
        self._using = using
        self._namespaces: dict[str, Namespace] = {}
        self._posts: dict[int, Post] = {}
        self._unfit: dict[int, Version] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._log = QuietLog(logger)
        self._stopping = asyncio.Event()
        self._write_at = self._add_up_at = self._rules_at = 0.0
        self.ledger = Ledger(using)

    @property
    def running(self) -> list[str]:
        """The names of the exchanges that run now."""
        return sorted(post.version.name for post in self._posts.values())

    def stop(self) -> None:
        """Finish what is in hand, and end."""
        self._stopping.set()
        for post in self._posts.values():
            post.crew.stop()

    async def run(self, on_look: Callable[[], None] = lambda: None) -> None:
        """Run until stopped; ``on_look`` is called twice a second.

        Raises what Django does where the definitions cannot be read at first.
        """
        try:
            await self._look()
            while not self._stopping.is_set():
                on_look()
                if not await self._is_stopped_within(LOOK_SECONDS):
                    await self._mind()
        finally:
            await self._end()

    async def _is_stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _mind(self) -> None:
        try:
            await self._look()
            await self._write()
        except Error as error:
            self._log.warning("exchanges: the database cannot be asked: %s", _line(error))
        await self._tell_rules()

    async def _end(self) -> None:
        for key in list(self._posts):
            self._dismiss(key)
        if self._ending:
            await asyncio.wait(self._ending)
        for namespace in self._namespaces.values():
            await namespace.watch.close()
        try:
            self._write_at = 0.0
            await self._write()
        except Error as error:
            self._log.warning("exchanges: what was counted is not written: %s", _line(error))
        await _threaded(connections.close_all)

    # Definitions

    async def _look(self) -> None:
        """Take up what has changed in the definitions."""
        wanted = await _threaded(self._versions)
        for key in self._posts.keys() - wanted.keys():
            self._dismiss(key)
        self._unfit = {key: of for key, of in self._unfit.items() if wanted.get(key) == of}
        changed = [
            key
            for key, version in wanted.items()
            if key not in self._unfit
            and (key not in self._posts or self._posts[key].version != version)
        ]
        if changed:
            for row in await _threaded(self._rows, changed):
                self._employ(row)

    def _versions(self) -> dict[int, Version]:
        exchanges = Exchange.objects.using(self._using).filter(is_running=True)
        if self._names:
            exchanges = exchanges.filter(name__in=self._names)
        return {
            key: Version(name, changed_at)
            for key, name, changed_at in exchanges.values_list("pk", "name", "changed_at")
        }

    def _rows(self, keys: list[int]) -> list[Exchange]:
        found = list(stored.rows(self._using).filter(pk__in=keys, is_running=True))
        # Read by two queries: what has changed between them is left for the next look.
        now = self._versions()
        return [row for row in found if now.get(row.pk) == Version(row.name, row.changed_at)]

    def _employ(self, row: Exchange) -> None:
        """Run an exchange as it is now, once its former loops have ended."""
        version = Version(row.name, row.changed_at)
        former = self._dismiss(row.pk)
        try:
            plan = Plan.of(stored.compiled(row))
            namespaces = {alias: self._namespace(alias) for alias in plan.namespaces}
        except (MalformedExchanges, MessagesError, ImproperlyConfigured) as error:
            self._unfit[row.pk] = version
            logger.warning("exchange %s does not run: %s", row.name, _line(error))
            return
        crew = Crew(plan, namespaces, self.ledger.of(row.pk))
        task = asyncio.create_task(self._work(crew, former), name=f"exchange {row.name}")
        self._posts[row.pk] = Post(version, stored.definition(row), crew, task)
        logger.info("exchange %s runs: %d loops", row.name, plan.loops)

    def _namespace(self, alias: str) -> Namespace:
        if alias not in self._namespaces:
            if alias not in connections.settings:
                raise ImproperlyConfigured(f"DATABASES has no {alias!r} any more.")
            self._namespaces[alias] = Namespace(alias, dsn(alias))
        return self._namespaces[alias]

    def _dismiss(self, key: int) -> asyncio.Task[None] | None:
        if (post := self._posts.pop(key, None)) is None:
            return None
        post.crew.stop()
        self._ending.add(post.task)
        post.task.add_done_callback(self._ending.discard)
        logger.info("exchange %s ends", post.version.name)
        return post.task

    @staticmethod
    async def _work(crew: Crew, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.wait({former})
        await crew.run([Loop(crew) for _ in range(crew.plan.loops)])

    # What is counted, and what is missing

    async def _write(self) -> None:
        now = monotonic()
        if now < self._write_at:
            return
        rows = self.ledger.unwritten(self._posts.keys())
        self.ledger.wrote(await _threaded(self.ledger.write, rows))
        self._write_at = monotonic() + WRITE_SECONDS
        if now >= self._add_up_at:
            await _threaded(self.ledger.add_up_former)
            self._add_up_at = now + ADD_UP_SECONDS

    async def _tell_rules(self) -> None:
        """Tell which rules are missing, each once, where something was refused."""
        now = monotonic()
        refused = [post for post in self._posts.values() if post.crew.reports.has_refusals]
        if not refused or now < self._rules_at:
            return
        self._rules_at = now + RULES_SECONDS
        for post in refused:
            post.crew.reports.has_refusals = False
            missing = set(await asyncio.to_thread(self._missing_rules, post.definition))
            for rule in sorted(missing - post.told):
                logger.warning("exchange %s: in %s is missing: %s", post.version.name, *rule)
            post.told = missing

    def _missing_rules(self, exchange: DefinedExchange) -> list[rights.MissingRule]:
        try:
            return rights.missing_rules(exchange, self._using)
        finally:
            connections.close_all()


async def _threaded(act: Callable[..., T], *arguments: Any) -> T:
    """Use Django's connection, in the one thread that does."""

    def run() -> T:
        close_old_connections()
        return act(*arguments)

    result: T = await sync_to_async(run)()
    return result


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
