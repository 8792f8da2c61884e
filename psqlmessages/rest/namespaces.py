"""Databases of the API: each has a connection pool, and the requests that wait for its queues."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg

from psqlmessages import health
from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.store.definitions import namespace_error
from psqlmessages.orm import database_dsn, direct_dsn
from psqlmessages.relay.revalidation import get_credential_monitor
from psqlmessages.rest.errors import ApiError, ServiceUnavailable
from psqlmessages.rest.pool import LeasedElement, Pool
from psqlmessages.rest.waiters import QueueWaiters, WaitingRequest, log

_MAX_CONNECTIONS: Final = 5
# Limits of waiting requests in one process and namespace; further requests get status 429.
MAX_WAITERS: Final = 10_000
MAX_WAITERS_PER_USER: Final = 2_000


class RestDatabase:
    """One database: a connection pool for calls, and the requests that wait for its queues."""

    def __init__(self, alias: str) -> None:
        self.pool = Pool(database_dsn(alias), "rest", _MAX_CONNECTIONS)
        self.listener = QueueListener(direct_dsn(alias), "rest listener", may_poll=True)
        self._queues: dict[str, QueueWaiters] = {}
        # The keys are pairs of queue and ``tid``.
        self._waiters: dict[tuple[str, str], WaitingRequest] = {}
        self._waiters_by_user: Counter[Any] = Counter()
        self._release_tasks: set[asyncio.Task[None]] = set()

    # Waiting requests

    async def take(self, waiter: WaitingRequest) -> LeasedElement:
        """Wait for an element and reserve it; earlier requests for the queue come first.

        Raises the error that ended the wait. Cancelling releases an element already reserved.
        """
        self._add(waiter)
        timer = None
        if waiter.waits_if_empty:
            seconds = (waiter.until - waiter.since).total_seconds()
            timer = asyncio.get_running_loop().call_later(seconds, waiter.time_out)
            get_credential_monitor().add(waiter)
        queue_waiters = self._queues.get(waiter.queue)
        if queue_waiters is None:
            queue_waiters = QueueWaiters(waiter.queue, self)
            self._queues[waiter.queue] = queue_waiters
            self.listener.add(waiter.queue, queue_waiters.wake)
        queue_waiters.add(waiter)
        try:
            return await waiter.result
        except asyncio.CancelledError:
            result = waiter.result
            if result.done() and not result.cancelled() and result.exception() is None:
                self.release(waiter.ident, [result.result()])
            raise
        finally:
            if timer is not None:
                timer.cancel()
                get_credential_monitor().discard(waiter)
            queue_waiters.remove(waiter)
            self._remove(waiter)

    def _add(self, waiter: WaitingRequest) -> None:
        if (waiter.queue, waiter.tid) in self._waiters:
            raise ApiError(409, f"a request {waiter.tid} is already waiting for this queue")
        if self._waiters_by_user[waiter.credentials.user] >= MAX_WAITERS_PER_USER:
            raise ApiError(429, f"{MAX_WAITERS_PER_USER} requests of this user are already waiting")
        if len(self._waiters) >= MAX_WAITERS:
            raise ApiError(429, f"{MAX_WAITERS} requests are already waiting")
        self._waiters[waiter.queue, waiter.tid] = waiter
        self._waiters_by_user[waiter.credentials.user] += 1

    def _remove(self, waiter: WaitingRequest) -> None:
        del self._waiters[waiter.queue, waiter.tid]
        self._waiters_by_user[waiter.credentials.user] -= 1
        if not self._waiters_by_user[waiter.credentials.user]:
            del self._waiters_by_user[waiter.credentials.user]

    def list_waiters(self, queue: str) -> list[WaitingRequest]:
        """Return this process's waiting requests for a queue, in order of arrival."""
        return self._queues[queue].list_waiting() if queue in self._queues else []

    def on_no_waiters(self, queue_waiters: QueueWaiters) -> None:
        """Stop listening to a queue whose last waiter was removed."""
        self.listener.remove(queue_waiters.queue, queue_waiters.wake)
        del self._queues[queue_waiters.queue]

    def release(self, ident: str, elements: Sequence[LeasedElement]) -> None:
        """Release undelivered elements in the background."""
        leases = [element.lease for element in elements]
        task = asyncio.create_task(self._release(ident, leases), name="rest release")
        self._release_tasks.add(task)
        task.add_done_callback(self._release_tasks.discard)

    async def _release(self, ident: str, leases: list[str]) -> None:
        try:
            await self.pool.call("release(%s, VARIADIC %s::text[])", ident, leases)
        except (MessagesError, psycopg.Error, ServiceUnavailable) as error:
            log.warning("elements stay reserved until their lease expires: %s", error)


# The databases of one event loop. The keys are aliases.
_Databases = dict[str, RestDatabase]
_databases: WeakKeyDictionary[asyncio.AbstractEventLoop, _Databases] = WeakKeyDictionary()


def get_database(alias: str) -> RestDatabase:
    """Return the database of a namespace for this event loop; raise ApiError 404 if unknown."""
    databases = _databases.setdefault(asyncio.get_running_loop(), {})
    if alias not in databases:
        if problem := namespace_error(alias):
            raise ApiError(404, problem)
        databases[alias] = RestDatabase(alias)
    return databases[alias]


def _is_broken() -> bool:
    """Return whether the API cannot reach one of its databases; /healthz calls it."""
    databases = _databases.get(asyncio.get_running_loop(), {})
    return any(database.pool.is_broken() for database in databases.values())


health.register("rest", _is_broken)
