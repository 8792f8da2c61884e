"""Queue waiters: the requests that wait for elements of one queue, and the task that serves them.

While all wait, the task only calls queue_listen from time to time. After the notification of a
push, one call of reserve takes elements for up to ten waiters, in order of arrival.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Final

import psycopg

from psqlmessages.client.wakeups import PollSchedule, QueueState
from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.relay.revalidation import Credentials, MonitoredSocket
from psqlmessages.rest.errors import ApiError, ServiceUnavailable
from psqlmessages.rest.pool import LeasedElement, reserve
from psqlmessages.retry import RateLimitedLogger, wait_for_event

if TYPE_CHECKING:
    from psqlmessages.rest.namespaces import RestDatabase


@dataclass(eq=False, slots=True)
class WaitingRequest(MonitoredSocket):
    """A request that waits for an element; the credential monitor checks it like a WebSocket.

    ``tid`` is the name of the request: chosen by the client, or random. Without ``waits_if_empty``,
    the request fails immediately if the queue is empty.
    """

    tid: str
    queue: str
    ident: str
    lease_seconds: float
    is_reserving: bool
    waits_if_empty: bool
    credentials: Credentials
    since: datetime
    until: datetime
    result: asyncio.Future[LeasedElement] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        """End the wait with an error, unless it has already ended."""
        if not self.result.done():
            self.result.set_exception(error)

    def time_out(self) -> None:
        """End the wait with a timeout."""
        self.fail(ApiError(504, f"timeout: no element of {self.queue} is available"))

    def cancel(self) -> None:
        """End the wait because another request cancelled it."""
        self.fail(ApiError(410, f"the request {self.tid} was cancelled"))

    # Called by the credential monitor of the relay

    def on_access_revoked(self, reason: str) -> None:
        """End the wait: the user has lost access."""
        self.fail(ApiError(401, reason))

    def on_ident_revoked(self, ident: str) -> None:
        """End the wait: the user may no longer act as this node."""
        self.fail(ApiError(403, f"you may no longer act as {ident}"))

    def on_unchecked(self) -> None:
        """End the wait: the credentials could not be checked for too long."""
        self.fail(ServiceUnavailable())


logger: Final = logging.getLogger("psqlmessages.rest")
log: Final = RateLimitedLogger(logger)

# Maximum number of elements per call of reserve: all their bodies are in memory at the same time.
_MAX_RESERVED: Final = 10
# Waiters fail if the database is unreachable for this long.
_UNREACHABLE_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.5


class QueueWaiters:
    """The waiters of one queue.

    ``_allowed_idents``: the nodes whose last call, reserve or queue_listen, was allowed.
    """

    def __init__(self, queue: str, database: RestDatabase) -> None:
        self.queue = queue
        self.waiters: list[WaitingRequest] = []
        self._database = database
        self._allowed_idents: set[str] = set()
        # The last answer of queue_listen; None: call it again before waiting.
        self._state: QueueState | None = None
        self._schedule = PollSchedule()
        self._unreachable_since: float | None = None
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, waiter: WaitingRequest) -> None:
        """Add a waiter at the end."""
        self.waiters.append(waiter)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"waiters of {self.queue}")
        elif not waiter.waits_if_empty or waiter.ident not in self._allowed_idents:
            # In other cases, a wake-up is unnecessary: the queue is empty, or the task will serve
            # this waiter too.
            self._wakeup.set()

    def remove(self, waiter: WaitingRequest) -> None:
        """Remove a waiter, at any position."""
        self.waiters.remove(waiter)
        if not self.waiters:
            self._wakeup.set()

    def wake(self) -> None:
        """Let the task try again: there may be an element, or the listening connection is lost."""
        self._state = None
        self._wakeup.set()

    # The task

    async def _run(self) -> None:
        try:
            while self.list_waiting():
                self._wakeup.clear()
                try:
                    seconds = await self._run_once()
                except (ServerUnreachable, ServiceUnavailable, psycopg.Error) as error:
                    seconds = self._on_unreachable(error)
                # Wait for a notification or a new waiter, or until it is time to poll.
                if seconds > 0:
                    await wait_for_event(self._wakeup, seconds)
                    if not self._wakeup.is_set():
                        self._schedule.lengthen()
        except Exception as error:
            logger.exception("serving the waiters of %s failed", self.queue)
            for waiter in self.list_waiting():
                waiter.fail(error)
        finally:
            self._task = None
            self._database.on_no_waiters(self)

    def list_waiting(self) -> list[WaitingRequest]:
        """Return the waiters without a result, in order of arrival."""
        return [waiter for waiter in self.waiters if not waiter.result.done()]

    async def _run_once(self) -> float:
        """Serve as many waiters as possible; return the seconds until the next poll."""
        await self._serve()
        # Waiters without waits_if_empty need an answer now, even if the first waiters, which have
        # another node or duration, got nothing.
        while urgent := [waiter for waiter in self.list_waiting() if not waiter.waits_if_empty]:
            await self._take(urgent[0].ident, urgent[0].lease_seconds, 1)
            await self._serve()
        self._unreachable_since = None
        if not self.list_waiting() or await self._listen_if_due() or self._state is None:
            return 0.0
        return self._schedule.seconds_until_poll(self._state, monotonic())

    def _on_unreachable(self, error: Exception) -> float:
        """Fail waiters if the database was unreachable for too long; return the retry delay."""
        log.warning("the queue %s cannot be read: %s", self.queue, error)
        is_first, now = self._unreachable_since is None, monotonic()
        self._unreachable_since = self._unreachable_since or now
        is_too_long = now - self._unreachable_since >= _UNREACHABLE_SECONDS
        for waiter in self.list_waiting():
            # The first error may come from a broken idle connection: the retry opens a new one.
            if is_too_long or (not waiter.waits_if_empty and not is_first):
                waiter.fail(ServiceUnavailable())
        return _RETRY_SECONDS

    # Taking

    async def _serve(self) -> None:
        """Reserve elements for the first waiters, until no element or no waiter is left."""
        while waiters := self.list_waiting():
            # One call of reserve serves only waiters with the same node and duration of a lease.
            groups = groupby(waiters[:_MAX_RESERVED], attrgetter("ident", "lease_seconds"))
            (ident, seconds), first_waiters = next(groups)
            count = len(list(first_waiters))
            if await self._take(ident, seconds, count) < count:
                return

    async def _take(self, ident: str, seconds: float, count: int) -> int:
        """Reserve up to ``count`` elements for waiters of this node; return the number of elements.

        If the call is refused, fail all waiters of the node, and return ``count``.
        """
        waiters_before = self.list_waiting()
        try:
            elements = await reserve(self._database.pool, ident, self.queue, count, seconds)
        except ServerUnreachable:
            raise
        except MessagesError as error:
            self._fail_ident(ident, error)
            # The queue may have elements: let _serve continue with the waiters of other nodes.
            return count
        self._allowed_idents.add(ident)
        undelivered = list(elements)
        for waiter in self.list_waiting():
            if undelivered and (waiter.ident, waiter.lease_seconds) == (ident, seconds):
                waiter.result.set_result(undelivered.pop(0))
        if undelivered:
            self._database.release(ident, undelivered)
        if len(elements) < count:
            # The queue was empty. Waiters that were added during the call try again first.
            for waiter in waiters_before:
                if not waiter.waits_if_empty and waiter.ident in self._allowed_idents:
                    waiter.time_out()
        return len(elements)

    def _fail_ident(self, ident: str, error: MessagesError) -> None:
        self._allowed_idents.discard(ident)
        for waiter in self.list_waiting():
            if waiter.ident == ident:
                waiter.fail(error)

    # Listening

    async def _listen_if_due(self) -> bool:
        """Call queue_listen if due; return whether listening has just begun.

        If so, earlier pushes have sent no notification, so the caller must try to reserve again.
        """
        idents = list(dict.fromkeys(waiter.ident for waiter in self.list_waiting()))
        unchecked = [ident for ident in idents if ident not in self._allowed_idents]
        if not unchecked and self._state is not None and not self._state.is_stale(monotonic()):
            return False
        is_new = False
        for ident in unchecked or idents[:1]:
            try:
                state = await self._database.listener.listen(ident, self.queue)
            except ServerUnreachable:
                raise
            except MessagesError as error:
                self._fail_ident(ident, error)
                continue
            if state.is_new:
                # Listening had ended, perhaps after a change of rules: check all nodes again.
                self._allowed_idents.clear()
                self._schedule.reset()
                is_new = True
            if state.is_listening:
                self._allowed_idents.add(ident)
            if not self._wakeup.is_set():
                self._state = state
        return is_new
