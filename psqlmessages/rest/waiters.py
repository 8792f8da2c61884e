"""Queue waiters: the requests that wait for one queue, and the task that serves them.

Waiting costs only an occasional call of queue_listen. A push sends a notification, and one call of
reserve then takes elements for as many readers at the front as possible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg

from psqlmessages.client.wakeups import PollSchedule, QueueState
from psqlmessages.exceptions import MessagesError, ServerUnreachable
from psqlmessages.relay.revalidation import Credentials
from psqlmessages.rest.errors import ApiError, ServiceUnavailable
from psqlmessages.rest.pool import TakenRow
from psqlmessages.retry import RateLimitedLogger

if TYPE_CHECKING:
    from psqlmessages.rest.namespaces import RestDatabase

# Waiting requests


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
        self.fail(ApiError(504, f"timeout: no element of {self.queue} is available"))

    def cancel(self) -> None:
        """End the wait at a user's request."""
        self.fail(ApiError(410, f"the reader {self.tid} was cancelled"))

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
# Readers wait for this long if the database is unreachable.
_AWAY_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.5


class QueueWaiters:
    """The readers of one queue. ``ended`` is called after the last one has left."""

    def __init__(
        self, queue: str, source: RestDatabase, ended: Callable[[QueueWaiters], None]
    ) -> None:
        self.queue = queue
        self.readers: list[WaitingRequest] = []
        self._source = source
        self._ended = ended
        self._admitted: set[str] = set()
        self._state: QueueState | None = None
        self._schedule = PollSchedule()
        self._unreachable_since: float | None = None
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

    def wake(self) -> None:
        """Look again: an element may be available, or the connection that listens is lost."""
        self._state = None
        self._changed.set()

    # The task

    async def _run(self) -> None:
        try:
            while self._waiting():
                self._changed.clear()
                try:
                    seconds = await self._run_once()
                except (ServerUnreachable, ServiceUnavailable, psycopg.Error) as error:
                    seconds = self._on_unreachable(error)
                await self._wait(seconds)
        except Exception as error:
            logger.exception("serving the readers of %s failed", self.queue)
            for reader in self._waiting():
                reader.fail(error)
        finally:
            self._task = None
            self._ended(self)

    def _waiting(self) -> list[WaitingRequest]:
        return [reader for reader in self.readers if reader.is_waiting]

    async def _run_once(self) -> float:
        """Serve as many readers as possible; return the seconds until the next poll."""
        await self._serve()
        while hasty := [reader for reader in self._waiting() if reader.is_hasty]:
            # It acts as another node than the readers at the front, with permissions of its own.
            await self._take(hasty[0].key, 1)
            await self._serve()
        self._unreachable_since = None
        if not self._waiting() or await self._must_look_again() or self._state is None:
            return 0.0
        return self._schedule.seconds(self._state, monotonic())

    def _on_unreachable(self, error: Exception) -> float:
        """Fail readers that have waited too long for the database; return the retry delay."""
        log.warning("the queue %s cannot be read: %s", self.queue, error)
        is_first, now = self._unreachable_since is None, monotonic()
        self._unreachable_since = self._unreachable_since or now
        is_over = now - self._unreachable_since >= _AWAY_SECONDS
        for reader in self._waiting():
            # The first error may come from a broken idle connection: the retry opens a new one.
            if is_over or (reader.is_hasty and not is_first):
                reader.fail(ServiceUnavailable())
        return _RETRY_SECONDS

    async def _wait(self, seconds: float) -> None:
        """Wait for a notification or a new reader, or until it is time to poll."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            self._schedule.polled()

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

    async def _must_look_again(self) -> bool:
        """Listen if due; return True if a notification may have been missed before."""
        idents = list(dict.fromkeys(reader.ident for reader in self._waiting()))
        new = [ident for ident in idents if ident not in self._admitted]
        if not new and self._state is not None and not self._state.is_stale(monotonic()):
            return False
        is_new = False
        for ident in new or idents[:1]:
            try:
                state = await self._source.listen(ident, self.queue)
            except ServerUnreachable:
                raise
            except MessagesError as error:
                self._refuse(ident, error)
                continue
            if state.is_new:
                # A rule may have changed, and any of the readers may be affected.
                self._admitted.clear()
                self._schedule.reset()
                is_new = True
            if state.is_listening:
                self._admitted.add(ident)
            if not self._changed.is_set():
                self._state = state
        return is_new
