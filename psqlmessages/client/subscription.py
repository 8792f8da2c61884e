"""Subscriptions: reading, acknowledging and waiting.

See docs/adr/0006: what was handed out is passed in the database once the next is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from datetime import timedelta
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import psycopg

from psqlmessages.client import stream_calls
from psqlmessages.client.calls import is_transient
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.stream_calls import (
    NOTHING,
    MessageBatch,
    StreamMessage,
    SubscriptionKey,
    SubscriptionState,
    Watermark,
    message_of,
)
from psqlmessages.client.transactions import (
    Script,
    Steps,
    Wait,
    drive,
    drive_async,
    transaction,
)
from psqlmessages.exceptions import ConnectionLost, MessagesError, NodeClosed, NotSubscribed

if TYPE_CHECKING:
    from psqlmessages.client.async_session import AsyncNodeSession
    from psqlmessages.client.session import NodeSession


T = TypeVar("T")

DEFAULT_TIMEOUT: Final = timedelta(minutes=5)
DEFAULT_ROWS: Final = 1000
DEFAULT_WAIT: Final = timedelta(seconds=30)

# A batch is to hold about so many characters, so that large bodies do not fill the memory.
_BATCH_CHARACTERS = 4 * 1024 * 1024
_FIRST_ROWS = 100
# A publisher that was there before us wakes nobody here: look again, later and later.
_FIRST_PAUSE_SECONDS = 1.0
# What waits behind an open transaction is free without a wake if that is rolled back.
_HELD_BACK_SECONDS = (0.05, 1.0)
_AGAIN_SECONDS = 1.0


class SubscriptionReader:
    """The reader of one subscription: what it read, handed out and passed.

    Each method yields steps, gets the answers of its calls or their errors, and may be left off
    at any of them.
    """

    def __init__(
        self,
        state: NodeState,
        place: SubscriptionKey,
        *,
        max_rows: int,
        idle: timedelta | None,
        poll: timedelta,
    ) -> None:
        self._state = state
        self._place = place
        self._max_rows = max_rows
        self._rows = min(max_rows, _FIRST_ROWS)
        self._idle_seconds = idle.total_seconds() if idle is not None else inf
        self._ping_seconds = place.seconds / 3
        self._poll_seconds = min(poll.total_seconds(), self._ping_seconds)
        self._buffer: deque[tuple[Any, ...]] = deque()
        # Ids given to the caller, or given before, that the database does not know to be passed.
        self._handed: deque[int] = deque()
        self._last = NOTHING
        self._is_begun = False
        self._since: object = None
        self._pinged_at = -inf
        self._pause = _FIRST_PAUSE_SECONDS
        self._held_pause = _HELD_BACK_SECONDS[0]
        self._due_at = self._read_at = -inf
        state.wakes.are_wanted = True
        self._ends = state.wakes.ends(place.ident, place.topic)
        self._connections = -1
        self._seen = state.wakes.count(place.topic)

    @property
    def topic(self) -> str:
        """The topic that is read."""
        return self._place.topic

    @property
    def is_ended(self) -> bool:
        """Whether this node has ended the subscription since."""
        return self._state.wakes.ends(self._place.ident, self._place.topic) != self._ends

    def begin(self) -> Steps[None]:
        """Subscribe, or take up the subscription that is there; what waits is read with it."""
        if self._is_begun:
            return
        state = yield from self._state_before()
        if state is not None and not state.is_recovered:
            # Of an earlier time, and told then: from now on it is about what is missed now.
            yield stream_calls.connect_stream(self._place.ident)
        self._since = state.since if state is not None else None
        yield from self._read()
        self._is_begun = True

    def next(self, is_stopped: Callable[[], bool]) -> Steps[StreamMessage | None]:
        """Give the next message, when it comes; None at the end, or when none came for so long."""
        asked_at = monotonic()
        until = asked_at + self._idle_seconds
        while not (is_stopped() or self.is_ended):
            message = yield from self._attempt(is_stopped)
            if message is not None:
                return message
            now = monotonic()
            if now >= until and self._read_at >= asked_at:
                return None
            if now >= until:
                # A wake comes a moment after the commit: who does not wait gets what is there too.
                self._due_at = -inf
            elif self._due_at > now:
                yield Wait(self._is_woken, min(self._due_at, until))
        yield from self._leave()
        return None

    def confirm(self, last_id: int | None = None) -> Steps[None]:
        """Pass what was handed out, or that up to an id."""
        last = self._last if last_id is None else self._last.up_to(last_id)
        count = sum(1 for id_ in self._handed if id_ <= last.id)
        if not count:
            return
        started_at = monotonic()
        is_ours = yield transaction(lambda: self._unless_ended(self._confirming(count, last)))
        for _ in range(count):
            self._handed.popleft()
        if is_ours:
            self._pinged_at = started_at

    # Inside

    def _attempt(self, is_stopped: Callable[[], bool]) -> Steps[StreamMessage | None]:
        try:
            return (yield from self._poll())
        except ConnectionLost:
            # The node comes back by itself, which wakes.
            self._due_at = monotonic() + self._poll_seconds
        except NodeClosed:
            if not is_stopped():
                raise
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            self._state.log.warning(
                "%s: the subscription to %s cannot be read now, or is being read elsewhere: %s",
                self._place.ident, self.topic, error,
            )  # fmt: skip
            self._due_at = monotonic() + _AGAIN_SECONDS
        return None

    def _poll(self) -> Steps[StreamMessage | None]:
        """Hand out a message, or read; None where there was nothing."""
        if not self._is_begun:
            yield from self.begin()
        elif not self._buffer and self._wants_to_read():
            yield from self._read()
        if self._handed and monotonic() - self._pinged_at >= self._ping_seconds:
            yield from self.confirm()
        while self._buffer:
            row = self._buffer.popleft()
            self._handed.append(row[0])
            # What was handed out and could not be confirmed comes again, but not to the caller.
            if not self._last.includes(row[0], row[3]):
                self._last = self._last.then(row[0], row[3])
                return message_of(self.topic, row)
        return None

    def _read(self) -> Steps[None]:
        self._read_at = started_at = monotonic()
        self._seen = self._state.wakes.count(self.topic)
        self._due_at = -inf
        batch: MessageBatch | None = yield transaction(lambda: self._unless_ended(self._reading()))
        if batch is None:
            return
        self._handed.clear()
        self._buffer.extend(batch.rows)
        if batch.is_confirmed or batch.state is not None:
            self._pinged_at = started_at
        if batch.state is not None:
            self._compare(batch.state)
            self._due_at = started_at + self._next_pause(batch.state)
        else:
            self._choose_size(batch)

    def _state_before(self) -> Steps[SubscriptionState | None]:
        try:
            state: SubscriptionState = yield stream_calls.subscription(
                self._place.ident, self.topic
            )
        except NotSubscribed:
            return None
        return state

    def _compare(self, state: SubscriptionState) -> None:
        if self._since not in (None, state.since) and not state.is_recovered:
            self._state.counters.gaps += 1
            self._state.log.warning(
                "%s: the subscription to %s had timed out, and messages before %s were missed",
                self._place.ident, self.topic, state.since,
            )  # fmt: skip
        self._since = state.since

    def _next_pause(self, state: SubscriptionState) -> float:
        connections = self._state.wakes.connections
        if state.backlog:
            self._pause = self._held_pause
            self._held_pause = min(2 * self._held_pause, _HELD_BACK_SECONDS[1])
        else:
            is_new = connections != self._connections
            self._pause = _FIRST_PAUSE_SECONDS if is_new else 2 * self._pause
            self._held_pause = _HELD_BACK_SECONDS[0]
        self._connections = connections
        self._pause = min(self._pause, self._poll_seconds)
        return self._pause

    def _choose_size(self, batch: MessageBatch) -> None:
        characters = sum(len(row[2]) for row in batch.rows)
        fitting = len(batch.rows) * _BATCH_CHARACTERS // max(characters, 1)
        self._rows = max(1, min(fitting, 4 * self._rows, self._max_rows))

    def _wants_to_read(self) -> bool:
        return bool(self._handed) or self._is_woken() or self._due_at <= monotonic()

    def _is_woken(self) -> bool:
        return self.is_ended or self._state.wakes.count(self.topic) != self._seen

    def _leave(self) -> Steps[None]:
        """Confirm, where that is possible at once."""
        if self._handed and self._state.heartbeat.is_connected:
            try:
                yield from self.confirm()
            except NodeClosed:
                return
            except (MessagesError, psycopg.Error) as error:
                self._state.log.warning(
                    "%s: what was read of %s is not confirmed, and comes again: %s",
                    self._place.ident, self.topic, error,
                )  # fmt: skip

    def _reading(self) -> Script[MessageBatch]:
        return stream_calls.read(self._place, self._rows, len(self._handed), self._last)

    def _confirming(self, count: int, last: Watermark) -> Script[bool]:
        return stream_calls.confirm(self._place, count, last)

    def _unless_ended(self, script: Script[T]) -> Script[T | None]:
        # Looked at amid the calls of the node, as unsubscribe is one of them: reading after it
        # would subscribe anew.
        if self.is_ended:
            return None
        return (yield from script)


# Subscriptions: what a node's ``subscribe`` gives: iterators over reading, sync and async.


class Subscription(Iterator[StreamMessage]):
    """The messages of a subscription: what waited first, then each as it is published.

    Who asks for the next message says that those before are done: from then on they are passed,
    in batches. What was not passed comes again: after a crash, or where the loop was left. One
    thread iterates.
    """

    def __init__(self, session: NodeSession, reading: SubscriptionReader) -> None:
        self._session = session
        self._reading = reading
        self._take(reading.begin())

    @property
    def topic(self) -> str:
        """The topic that is read."""
        return self._reading.topic

    def __next__(self) -> StreamMessage:
        message = self._take(self._reading.next(lambda: self._session.is_stopped))
        if message is None:
            raise StopIteration
        return message

    def confirm(self, message: StreamMessage | None = None) -> None:
        """Pass all messages given so far, or up to this one, at once: they do not come again."""
        self._take(self._reading.confirm(message.id if message is not None else None))

    def _take(self, steps: Steps[T]) -> T:
        return drive(steps, self._do)

    def _do(self, step: Any) -> Any:
        if isinstance(step, Wait):
            return self._session.wait(step.is_ready, step.deadline)
        return self._session.run(step)


class AsyncSubscription(AsyncIterator[StreamMessage]):
    """See :class:`Subscription`; one task iterates.

    Awaited, it subscribes at once, else with the first message.
    """

    def __init__(self, session: AsyncNodeSession, reading: SubscriptionReader) -> None:
        self._session = session
        self._reading = reading

    @property
    def topic(self) -> str:
        """See :attr:`Subscription.topic`."""
        return self._reading.topic

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._begin().__await__()

    async def __anext__(self) -> StreamMessage:
        message = await self._take(self._reading.next(lambda: self._session.is_stopped))
        if message is None:
            raise StopAsyncIteration
        return message

    async def _begin(self) -> Self:
        await self._take(self._reading.begin())
        return self

    async def confirm(self, message: StreamMessage | None = None) -> None:
        """See :meth:`Subscription.confirm`."""
        await self._take(self._reading.confirm(message.id if message is not None else None))

    async def _take(self, steps: Steps[T]) -> T:
        return await drive_async(steps, self._do)

    async def _do(self, step: Any) -> Any:
        if isinstance(step, Wait):
            return await self._session.wait(step.is_ready, step.deadline)
        return await self._session.run(step)
