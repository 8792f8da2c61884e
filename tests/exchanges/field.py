"""Queues and exchanges, and workers that run them, for the tests of the runner."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connection

from project.postgres import Server
from psqlmessages.exchanges.store import definitions, repository
from psqlmessages.exchanges.store.worker import ExchangeWorker
from psqlmessages.wire import EncodedBody, decode
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.sql.conftest import Program

EMPTIED = (
    "exchangecount", "destination", "exchange", "element", "elementkey", "queuecount", "queue",
    "auth",
)  # fmt: skip
EMPTY = ";".join(f"DELETE FROM psqlmessages_{table}" for table in EMPTIED)
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        (%(owner)s, 'exchange.*', 'Queue', '*', 'RW', 60), (%(owner)s, 'W', 'Queue', '*', 'RW', 60)
"""
CONTENTS = """
    SELECT e.body, e.enc, e.headers FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s ORDER BY e.id
"""
AWAITED = "SELECT count(*) > 0 FROM psqlmessages_queue WHERE name = %s AND awaited_until > now()"
# No element is available or leased.
IDLE = """
    SELECT NOT EXISTS (
        SELECT FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q ON q.id = e.queue_id
        WHERE q.name = ANY (%s) AND (e.available_at <= clock_timestamp() OR e.lease IS NOT NULL)
    )
"""


class Bed(Program):
    """One database and its queues; it calls as the node W of the owner."""

    def __init__(self, server: TestedServer) -> None:
        super().__init__(server.url())
        self.server = server

    def clear(self) -> None:
        self.connection.execute(EMPTY)
        self.connection.execute(RULES, {"owner": Server.owner})

    def push(self, queue: str, body: Any = "", **headers: Any) -> None:
        sent = EncodedBody.of(body)
        named = json.dumps({name.replace("_", "-"): value for name, value in headers.items()})
        self.ok("push", "W", queue, sent.text, sent.enc, named)

    def push_many(self, queue: str, bodies: Sequence[str], **headers: Any) -> None:
        self.ok("push_many", "W", queue, list(bodies), None, [json.dumps(headers)] * len(bodies))

    def contents(self, queue: str) -> list[tuple[Any, dict[str, Any]]]:
        rows = self.execute(CONTENTS, (queue,))
        return [(decode(body, enc), headers) for body, enc, headers in rows]

    def bodies(self, queue: str) -> list[Any]:
        return [body for body, _ in self.contents(queue)]


class Field:
    def __init__(self, beds: dict[str, Bed]) -> None:
        self.beds = beds
        self.default = beds["default"]
        for bed in beds.values():
            bed.clear()

    def define(self, **exchanges: dict[str, Any]) -> None:
        """Store definitions, written as in a file; queues may be given by name alone."""
        document = {
            name: exchange
            | {
                "src": _queue_document(exchange["src"]),
                "dst": [_queue_document(each) for each in exchange["dst"]],
            }
            for name, exchange in exchanges.items()
        }
        for exchange in definitions.parse_document({"exchanges": document}):
            repository.store(exchange, replace=True)

    def until(self, condition: Callable[[], object], seconds: float = 200) -> None:
        wait_until(condition, seconds)

    def until_idle(self, seconds: float = 90) -> None:
        """Wait until no source has an element that is available or leased."""
        sources: dict[str, list[str]] = defaultdict(list)
        for exchange in repository.read_all():
            sources[exchange.source.namespace].append(exchange.source.name)
        beds = self.beds
        wait_until(lambda: all(beds[ns].query(IDLE, sources[ns]) for ns in sources), seconds)

    def run_until_idle(self, seconds: float = 90) -> None:
        with working():
            self.until_idle(seconds)

    def close(self) -> None:
        for bed in self.beds.values():
            bed.close()


def flow(source: str, *destinations: str | tuple[str, str], **consumer: Any) -> dict[str, Any]:
    """An exchange for `define`: destinations by name alone, or with a selector."""
    return {"consumer": consumer, "src": source, "dst": list(destinations)}


def _queue_document(given: str | tuple[str, str] | dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given, dict):
        pair = (given,) if isinstance(given, str) else given
        given = dict(zip(("queue", "selector"), pair, strict=False))
    namespace, _, queue = given["queue"].rpartition("/")
    return {"ns": namespace or "default", **given, "queue": queue}


class WorkerThread:
    """A worker that runs in a thread of its own, once it has read the definitions."""

    def __init__(self, *names: str) -> None:
        self.worker: ExchangeWorker | None = None
        self._runs = threading.Event()
        thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._end = thread.submit(self._run, names)
        thread.shutdown(wait=False)
        assert self._runs.wait(60)

    def _run(self, names: Sequence[str]) -> None:
        try:
            asyncio.run(self._work(names))
        finally:
            self._runs.set()
            connection.close()

    async def _work(self, names: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.worker = ExchangeWorker(names)
        await self.worker.run(self._runs.set)

    def tell_to_stop(self) -> None:
        # If it has ended, its loop is closed; if it could not begin, there is no worker.
        with suppress(RuntimeError, AttributeError):
            self._loop.call_soon_threadsafe(self.worker.stop)

    def stop(self) -> ExchangeWorker:
        self.tell_to_stop()
        self._end.result(60)
        return self.worker


@contextmanager
def working(*names: str) -> Iterator[WorkerThread]:
    thread = WorkerThread(*names)
    try:
        yield thread
    finally:
        thread.stop()
