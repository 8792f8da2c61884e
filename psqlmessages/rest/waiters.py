"""Line: the readers who wait for one queue, in the order they came, and the task that serves them.

While they wait a line costs nothing but a call of queue_listen now and then: whoever makes an
element available notifies, and one call of reserve takes for as many at the front as there is.
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

# Reader: a request that waits for an element of a queue, and what may end its wait.

TIMED_OUT: Final = 504
CANCELLED: Final = 410


class WaiterKey(NamedTuple):
    """What readers have in common that one call of reserve can serve."""

    ident: str
    seconds: float


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """One that waits; the relay's watch looks after it as after a WebSocket.

    ``is_hasty``: it wants what is there now, and waits for nothing.
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
        """What it has in common with those whom the same call can serve."""
        return WaiterKey(self.ident, self.lease_seconds)

    @property
    def is_waiting(self) -> bool:
        """Whether it has got nothing yet, and is still there."""
        return not self.result.done()

    def give(self, element: TakenRow) -> None:
        """End its wait with an element."""
        self.result.set_result(element)

    def fail(self, error: Exception) -> None:
        """End its wait with an error, unless it has ended."""
        if self.is_waiting:
            self.result.set_exception(error)

    def time_out(self) -> None:
        """End its wait, as its time is over."""
        self.fail(ApiError(TIMED_OUT, f"nothing came: no element of {self.queue} can be taken"))

    def cancel(self) -> None:
        """End its wait, as somebody asked for."""
        self.fail(ApiError(CANCELLED, f"the reader {self.tid} was cancelled"))

    # What the watch of the relay calls

    def permits(self, _user: Any) -> bool:
        """Any user may wait whose credentials still hold."""
        return True

    def revoked(self, reason: str) -> None:
        """End the wait: the user may not be here any more."""
        self.fail(ApiError(401, reason))

    def ident_revoked(self, ident: str) -> None:
        """End the wait: the user may not be this node any more."""
        self.fail(ApiError(403, f"you may not act as {ident} any more"))

    def unchecked(self) -> None:
        """End the wait: for too long it could not be told who may be here."""
        self.fail(ServiceUnavailable())

    def reap(self) -> None:
        """Do nothing: who has gone is taken off the list by the request itself."""


logger: Final = logging.getLogger("psqlmessages.rest")
log: Final = RateLimitedLogger(logger)

# Bodies may be large, and all of a call are in memory at once.
_MOST_AT_ONCE: Final = 10
# Whoever had begun to push before anybody listened notifies nobody.
_LEAST_POLL_SECONDS: Final = 0.1
_MOST_POLL_SECONDS: Final = 10.0
_MOST_HELD_SECONDS: Final = 1.0
# So long readers wait for a database that is away.
_AWAY_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.5


class ElementSource(Protocol):
    """What a line needs of its namespace; all raise errors of MessagesError and psycopg."""

    async def reserve(self, key: WaiterKey, queue: str, count: int) -> list[TakenRow]:
        """Reserve elements as the node of a key."""

    async def listen(self, ident: str, queue: str) -> QueueEvent:
        """Listen to the queue."""

    def give_back(self, ident: str, elements: Sequence[TakenRow]) -> None:
        """Give back what nobody has looked at."""


@dataclass(slots=True)
class PollState:
    """What a line knows of its queue, and till when; in seconds of the event loop's clock."""

    is_listening: bool = False
    is_next_known: bool = False
    is_held: bool = False
    renew_at: float = 0.0
    next_at: float = inf
    poll_seconds: float = _LEAST_POLL_SECONDS
    away_since: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether queue_listen has to be called."""
        return not (self.is_listening and self.is_next_known and now < self.renew_at)

    def on_listening(self, event: QueueEvent, now: float) -> None:
        """Take note of what queue_listen said."""
        self.is_listening = self.is_next_known = True
        self.renew_at = now + event.seconds / 2
        # There, but held by a transaction, whose rollback nobody tells of.
        self.is_held = event.next == 0
        if self.is_held:
            self.poll_seconds = min(self.poll_seconds, _MOST_HELD_SECONDS)
        self.next_at = now + event.next if event.next else inf

    def held_up(self, now: float) -> None:
        """Take note that a transaction holds queue_listen up, and that it is tried again soon."""
        self.is_listening, self.next_at = False, inf
        self.renew_at = now + _MOST_HELD_SECONDS

    def polled(self, now: float) -> None:
        """Poll less and less often; after the next mature time ask for the one after it."""
        most = _MOST_HELD_SECONDS if self.is_held else _MOST_POLL_SECONDS
        self.poll_seconds = min(self.poll_seconds * 2, most)
        if now >= self.next_at:
            self.is_next_known = False

    def on_connection_lost(self) -> None:
        """Listen anew, and poll often at first."""
        self.is_listening, self.poll_seconds = False, _LEAST_POLL_SECONDS


class QueueWaiters:
    """The readers of one queue. ``ended`` is called when the last has gone."""

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
        """Put a reader at the end."""
        self.readers.append(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"readers of {self.queue}")
        elif reader.is_hasty or reader.ident not in self._admitted:
            # For the others the task takes anyhow, or knows that there is nothing.
            self._changed.set()

    def leave(self, reader: WaitingRequest) -> None:
        """Take a reader off, wherever it stands."""
        self.readers.remove(reader)
        if not self.readers:
            self._changed.set()

    def on_event(self, *, is_moved: bool) -> None:
        """Look again: something may have become available, or the channel is another now."""
        self._times.is_next_known = False
        if is_moved:
            # A rule has changed, and may have been anybody's.
            self.on_connection_lost()
        self._changed.set()

    def on_connection_lost(self) -> None:
        """Listen anew: till then nothing is heard."""
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
            logger.exception("the readers of %s are not served any more", self.queue)
            for reader in self._waiting():
                reader.fail(error)
        finally:
            self._task = None
            self._ended(self)

    def _waiting(self) -> list[WaitingRequest]:
        return [reader for reader in self.readers if reader.is_waiting]

    async def _turn(self) -> float:
        """Serve who can be served; return for how many seconds the others can only wait."""
        await self._serve()
        while hasty := [reader for reader in self._waiting() if reader.is_hasty]:
            # Of another node than those at the front: its right is its own.
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
        """Tell those who have waited for the database for too long; try again after a while."""
        log.warning("the queue %s cannot be read: %s", self.queue, error)
        now, times = asyncio.get_running_loop().time(), self._times
        is_first = times.away_since is None
        times.away_since = now if times.away_since is None else times.away_since
        is_over = now - times.away_since >= _AWAY_SECONDS
        for reader in self._waiting():
            # A connection may have broken that had rested for long: the next try makes another.
            if is_over or (reader.is_hasty and not is_first):
                reader.fail(ServiceUnavailable())
        return _RETRY_SECONDS

    async def _rest(self, seconds: float) -> None:
        """Wait until something stirs, or the time has come to look by oneself."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            self._times.polled(asyncio.get_running_loop().time())

    # Taking

    async def _serve(self) -> None:
        """Take for those at the front, until nothing is left, or nobody."""
        while waiting := self._waiting():
            front, wanted = waiting[0].key, 0
            for reader in waiting[:_MOST_AT_ONCE]:
                if reader.key != front:
                    break
                wanted += 1
            if await self._take(front, wanted) < wanted:
                return

    async def _take(self, key: WaiterKey, count: int) -> int:
        """Take as a node, and hand out to its readers; return how many there were."""
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
            # Only those who were there before the call know now that there was nothing.
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
        """Listen where it is due; True where something may have come before that, unheard."""
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
