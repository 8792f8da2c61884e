"""Databases whose queues the API serves, with a few connections each."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg

from psqlmessages import health
from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.client.wakeups import QueueState
from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.store.definitions import namespace_error
from psqlmessages.orm import direct_dsn, dsn
from psqlmessages.relay.revalidation import get_credential_monitor
from psqlmessages.rest import pool
from psqlmessages.rest.errors import ApiError, ServiceUnavailable
from psqlmessages.rest.pool import Pool, TakenRow
from psqlmessages.rest.waiters import QueueWaiters, WaiterKey, WaitingRequest
from psqlmessages.retry import RateLimitedLogger

log: Final = RateLimitedLogger(logging.getLogger("psqlmessages.rest"))

_CONNECTIONS: Final = 5
# Limits for waiting requests per process and namespace; further requests get 429.
MOST_READERS: Final = 10_000
MOST_READERS_OF_USER: Final = 2_000


class RestDatabase:
    """One database: a connection pool for calls, and the requests that wait for its queues."""

    def __init__(self, alias: str) -> None:
        self.calls = Pool(dsn(alias), "rest", _CONNECTIONS)
        self._listener = QueueListener(direct_dsn(alias), "rest listens", may_poll=True)
        self._waiting: dict[str, QueueWaiters] = {}
        self._readers: dict[tuple[str, str], WaitingRequest] = {}
        self._by_user: Counter[Any] = Counter()
        self._releasing: set[asyncio.Task[None]] = set()

    # Waiting requests

    async def take(self, reader: WaitingRequest) -> TakenRow:
        """Wait in order of arrival for an element, and reserve it.

        Raises the error that ends the wait. If cancelled, releases the element for the next reader.
        """
        self._admit(reader)
        timer = None
        if not reader.is_hasty:
            seconds = (reader.until - reader.since).total_seconds()
            timer = asyncio.get_running_loop().call_later(seconds, reader.time_out)
            get_credential_monitor().add(reader)
        waiting = self._waiting.get(reader.queue)
        if waiting is None:
            waiting = self._waiting[reader.queue] = QueueWaiters(reader.queue, self, self._ended)
            self._listener.add(reader.queue, waiting.wake)
        waiting.join(reader)
        try:
            return await reader.result
        except asyncio.CancelledError:
            result = reader.result
            if result.done() and not result.cancelled() and result.exception() is None:
                self.give_back(reader.ident, [result.result()])
            raise
        finally:
            if timer is not None:
                timer.cancel()
                get_credential_monitor().discard(reader)
            waiting.leave(reader)
            self._forget(reader)

    def _admit(self, reader: WaitingRequest) -> None:
        if (reader.queue, reader.tid) in self._readers:
            raise ApiError(409, f"a reader {reader.tid} is already waiting for this queue")
        if self._by_user[reader.credentials.user] >= MOST_READERS_OF_USER:
            raise ApiError(
                429, f"more than {MOST_READERS_OF_USER} readers of this user are waiting"
            )
        if len(self._readers) >= MOST_READERS:
            raise ApiError(429, f"more than {MOST_READERS} readers are waiting")
        self._readers[reader.queue, reader.tid] = reader
        self._by_user[reader.credentials.user] += 1

    def _forget(self, reader: WaitingRequest) -> None:
        del self._readers[reader.queue, reader.tid]
        self._by_user[reader.credentials.user] -= 1
        if not self._by_user[reader.credentials.user]:
            del self._by_user[reader.credentials.user]

    def readers(self, queue: str) -> Iterator[WaitingRequest]:
        """Yield this process's waiting requests for a queue, in order of arrival."""
        waiting = self._waiting.get(queue)
        yield from (reader for reader in waiting.readers if reader.is_waiting) if waiting else ()

    def reader(self, queue: str, tid: str) -> WaitingRequest | None:
        """Return a waiting request of this process, or None."""
        reader = self._readers.get((queue, tid))
        return reader if reader is not None and reader.is_waiting else None

    def _ended(self, waiting: QueueWaiters) -> None:
        self._listener.remove(waiting.queue, waiting.wake)
        del self._waiting[waiting.queue]

    # Called by QueueWaiters

    async def reserve(self, key: WaiterKey, queue: str, count: int) -> list[TakenRow]:
        """Reserve elements as the key's node."""
        return await pool.reserve(self.calls, key.ident, queue, count, key.seconds)

    async def listen(self, ident: str, queue: str) -> QueueState:
        """Listen to a queue on the connection that all queues share."""
        return await self._listener.listen(ident, queue)

    def give_back(self, ident: str, given: Sequence[TakenRow]) -> None:
        """Release unread elements in the background."""
        leases = [element.lease for element in given]
        task = asyncio.create_task(self._release(ident, leases), name="rest gives back")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, ident: str, leases: list[str]) -> None:
        try:
            await self.calls.call("release(%s, VARIADIC %s::text[])", ident, leases)
        except (MessagesError, psycopg.Error, ServiceUnavailable) as error:
            # They become available again when their leases expire.
            log.warning(
                "elements could not be given back, and return when their leases expire: %s", error
            )


_open: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, RestDatabase]] = WeakKeyDictionary()


def namespace(alias: str) -> RestDatabase:
    """Return the namespace for the running event loop; raise 404 if there is none."""
    opened = _open.setdefault(asyncio.get_running_loop(), {})
    if alias not in opened:
        if problem := namespace_error(alias):
            raise ApiError(404, problem)
        opened[alias] = RestDatabase(alias)
    return opened[alias]


def _is_broken() -> bool:
    """Return whether the API's last attempt to reach a database failed."""
    opened = _open.get(asyncio.get_running_loop(), {})
    return any(each.calls.is_broken() for each in opened.values())


health.register("rest", _is_broken)
