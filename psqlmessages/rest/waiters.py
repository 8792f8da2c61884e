"""Queue waiters: the requests that wait for one queue, and the task that serves them.

Waiting costs only an occasional call of queue_listen. A push sends a notification, and one call of
reserve then takes elements for as many readers at the front as possible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Any, Final, NamedTuple, Protocol

import psycopg

from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.relay.revalidation import Credentials
from psqlmessages.rest.errors import ApiError, ServiceUnavailable
from psqlmessages.rest.pool import TakenRow
from psqlmessages.rest.queue_listener import QueueEvent
from psqlmessages.retry import RateLimitedLogger

# Waiting requests

TIMED_OUT: Final = 504
CANCELLED: Final = 410


class WaiterKey(NamedTuple):
    """The properties that readers must share to be served by one call of reserve."""

    ident: str
    seconds: float


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request that waits for an element; the credential monitor checks it like a WebSocket.

    ``is_hasty``: it does not wait if the queue is empty.
    """

    tid: str
    queue: str
    ident: str
    lease_seconds: float
    is_reserving: bool
    is_hasty: bool
    credentials: Credentials
    since: datetime
    until: datetime
    result: asyncio.Future[TakenRow] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def key(self) -> WaiterKey:
        """The key that it shares with readers that the same call can serve."""
        return WaiterKey(self.ident, self.lease_seconds)

    @property
    def is_waiting(self) -> bool:
        """Whether it has no result yet and was not cancelled."""
        return not self.result.done()

    def give(self, element: TakenRow) -> None:
        """End the wait with an element."""
        self.result.set_result(element)

    def fail(self, error: Exception) -> None:
        """End the wait with an error, unless it has ended."""
        if self.is_waiting:
            self.result.set_exception(error)

    def time_out(self) -> None:
        """End the wait with a timeout."""
        self.fail(ApiError(TIMED_OUT, f"timeout: no element of {self.queue} is available"))

    def cancel(self) -> None:
        """End the wait at a user's request."""
        self.fail(ApiError(CANCELLED, f"the reader {self.tid} was cancelled"))

    # Called by the credential monitor of the relay

    def permits(self, _user: Any) -> bool:
        """Allow any user whose credentials are still valid."""
        return True

    def revoked(self, reason: str) -> None:
        """End the wait: the user has lost access."""
        self.fail(ApiError(401, reason))

    def ident_revoked(self, ident: str) -> None:
        """End the wait: the user may no longer act as this node."""
        self.fail(ApiError(403, f"you may no longer act as {ident}"))

    def unchecked(self) -> None:
        """End the wait: the credentials could not be checked for too long."""
        self.fail(ServiceUnavailable())

    def reap(self) -> None:
        """Do nothing: the request itself removes its reader."""


logger: Final = logging.getLogger("psqlmessages.rest")
log: Final = RateLimitedLogger(logger)

# Elements per call of reserve. Bodies may be large, and all of a call are in memory together.
_MOST_AT_ONCE: Final = 10
# A push whose transaction began before our LISTEN sends no notification, so poll.
_LEAST_POLL_SECONDS: Final = 0.1
_MOST_POLL_SECONDS: Final = 10.0
_MOST_HELD_SECONDS: Final = 1.0
# Readers wait for this long if the database is unreachable.
_AWAY_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.5


class ElementSource(Protocol):
    """The namespace as QueueWaiters uses it; methods raise MessagesError and psycopg.Error."""

    async def reserve(self, key: WaiterKey, queue: str, count: int) -> list[TakenRow]:
        """Reserve elements as the key's node."""

    async def listen(self, ident: str, queue: str) -> QueueEvent:
        """Listen to the queue."""

    def give_back(self, ident: str, elements: Sequence[TakenRow]) -> None:
        """Release unread elements."""


@dataclass(slots=True)
class PollState:
    """When to listen and to poll next. Times are seconds of the event loop's clock."""

    is_listening: bool = False
    is_next_known: bool = False
    is_held: bool = False
    renew_at: float = 0.0
    next_at: float = inf
    poll_seconds: float = _LEAST_POLL_SECONDS
    away_since: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether queue_listen must be called."""
        return not (self.is_listening and self.is_next_known and now < self.renew_at)

    def on_listening(self, event: QueueEvent, now: float) -> None:
        """Record the result of queue_listen."""
        self.is_listening = self.is_next_known = True
        self.renew_at = now + event.seconds / 2
        # An element is available but locked: if its transaction rolls back, nothing notifies.
        self.is_held = event.next == 0
        if self.is_held:
            self.poll_seconds = min(self.poll_seconds, _MOST_HELD_SECONDS)
        self.next_at = now + event.next if event.next else inf

    def held_up(self, now: float) -> None:
        """Record that queue_listen ran into a lock, and retry it soon."""
        self.is_listening, self.next_at = False, inf
        self.renew_at = now + _MOST_HELD_SECONDS

    def polled(self, now: float) -> None:
        """Double the poll interval; once ``next_at`` has passed, ask for the time after it."""
        most = _MOST_HELD_SECONDS if self.is_held else _MOST_POLL_SECONDS
        self.poll_seconds = min(self.poll_seconds * 2, most)
        if now >= self.next_at:
            self.is_next_known = False

    def on_connection_lost(self) -> None:
        """Listen again, and poll with the shortest interval at first."""
        self.is_listening, self.poll_seconds = False, _LEAST_POLL_SECONDS


class QueueWaiters:
    """The readers of one queue. ``ended`` is called after the last one has left."""

    def __init__(
        self, queue: str, source: ElementSource, ended: Callable[[QueueWaiters], None]
    ) -> None:
        self.queue = queue
        self.readers: list[WaitingRequest] = []
        self._source = source
        self._ended = ended
        self._admitted: set[str] = set()
        self._times = PollState()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def join(self, reader: WaitingRequest) -> None:
        """Add a reader at the end."""
        self.readers.append(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"readers of {self.queue}")
        elif reader.is_hasty or reader.ident not in self._admitted:
            # The task already serves the other readers, or knows that the queue is empty.
            self._changed.set()

    def leave(self, reader: WaitingRequest) -> None:
        """Remove a reader from any position."""
        self.readers.remove(reader)
        if not self.readers:
            self._changed.set()

    def on_event(self, *, is_moved: bool) -> None:
        """Look again: an element may be available, or the channel has changed."""
        self._times.is_next_known = False
        if is_moved:
            # A rule has changed, and any of the readers may be affected.
            self.on_connection_lost()
        self._changed.set()

    def on_connection_lost(self) -> None:
        """Listen again: no notifications arrive until then."""
        self._admitted.clear()
        self._times.on_connection_lost()
        self._changed.set()

    # The task

    async def _run(self) -> None:
        try:
            while self._waiting():
                self._changed.clear()
                try:
                    seconds = await self._turn()
                except (ServerUnreachable, ServiceUnavailable, psycopg.Error) as error:
                    seconds = self._away(error)
                await self._rest(seconds)
        except Exception as error:
            logger.exception("serving the readers of %s failed", self.queue)
            for reader in self._waiting():
                reader.fail(error)
        finally:
            self._task = None
            self._ended(self)

    def _waiting(self) -> list[WaitingRequest]:
        return [reader for reader in self.readers if reader.is_waiting]

    async def _turn(self) -> float:
        """Serve as many readers as possible; return the seconds until the next poll."""
        await self._serve()
        while hasty := [reader for reader in self._waiting() if reader.is_hasty]:
            # It acts as another node than the readers at the front, with permissions of its own.
            await self._take(hasty[0].key, 1)
            await self._serve()
        times = self._times
        if times.away_since is not None:
            times.away_since = None
            times.on_connection_lost()
        if not self._waiting() or await self._has_listened_late():
            return 0.0
        now = asyncio.get_running_loop().time()
        return min(times.renew_at, times.next_at, now + times.poll_seconds) - now

    def _away(self, error: Exception) -> float:
        """Fail readers that have waited too long for the database; return the retry delay."""
        log.warning("the queue %s cannot be read: %s", self.queue, error)
        now, times = asyncio.get_running_loop().time(), self._times
        is_first = times.away_since is None
        times.away_since = now if times.away_since is None else times.away_since
        is_over = now - times.away_since >= _AWAY_SECONDS
        for reader in self._waiting():
            # The first error may come from a broken idle connection: the retry opens a new one.
            if is_over or (reader.is_hasty and not is_first):
                reader.fail(ServiceUnavailable())
        return _RETRY_SECONDS

    async def _rest(self, seconds: float) -> None:
        """Wait for a notification or a new reader, or until it is time to poll."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            self._times.polled(asyncio.get_running_loop().time())

    # Taking

    async def _serve(self) -> None:
        """Take elements for the readers at the front, until either runs out."""
        while waiting := self._waiting():
            front, wanted = waiting[0].key, 0
            for reader in waiting[:_MOST_AT_ONCE]:
                if reader.key != front:
                    break
                wanted += 1
            if await self._take(front, wanted) < wanted:
                return

    async def _take(self, key: WaiterKey, count: int) -> int:
        """Take elements as a node and give them to its readers; return their number."""
        present = self._waiting()
        try:
            elements = await self._source.reserve(key, self.queue, count)
        except ServerUnreachable:
            raise
        except MessagesError as error:
            self._refuse(key.ident, error)
            return count
        self._admitted.add(key.ident)
        left = list(elements)
        for reader in self._waiting():
            if left and reader.key == key:
                reader.give(left.pop(0))
        if left:
            self._source.give_back(key.ident, left)
        if len(elements) < count:
            # Readers that joined during the call do not know yet whether the queue is empty.
            for reader in present:
                if reader.is_hasty and reader.ident in self._admitted:
                    reader.time_out()
        return len(elements)

    def _refuse(self, ident: str, error: MessagesError) -> None:
        self._admitted.discard(ident)
        for reader in self._waiting():
            if reader.ident == ident:
                reader.fail(error)

    # Listening

    async def _has_listened_late(self) -> bool:
        """Listen if due; return True if an earlier notification may have been missed."""
        times, waiting = self._times, self._waiting()
        idents = dict.fromkeys(reader.ident for reader in waiting)
        new = [ident for ident in idents if ident not in self._admitted]
        if not new and not times.is_due(asyncio.get_running_loop().time()):
            return False
        was_listening = times.is_listening
        for ident in new or [waiting[0].ident]:
            try:
                heard = await self._source.listen(ident, self.queue)
            except ServerUnreachable:
                raise
            except psycopg.errors.LockNotAvailable:
                times.held_up(asyncio.get_running_loop().time())
                return False
            except MessagesError as error:
                self._refuse(ident, error)
            else:
                self._admitted.add(ident)
                times.on_listening(heard, asyncio.get_running_loop().time())
        return not (was_listening and times.is_listening)
