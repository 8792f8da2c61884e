"""Subscriptions: reading, acknowledging and waiting.

Requesting the next message acknowledges the previous ones: see docs/adr/0006.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from datetime import timedelta
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import psycopg

from psqlmessages.client import stream_calls
from psqlmessages.client.calls import is_transient
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.stream_calls import (
    NOTHING,
    MessageBatch,
    StreamMessage,
    SubscriptionKey,
    SubscriptionState,
    message_of,
)
from psqlmessages.client.transactions import Script, Steps, TransactionCall, Wait, transaction
from psqlmessages.exceptions import ConnectionLost, MessagesError, NodeClosed, NotSubscribed

if TYPE_CHECKING:
    from psqlmessages.client.async_session import AsyncNodeSession
    from psqlmessages.client.session import NodeSession


T = TypeVar("T")

DEFAULT_TIMEOUT: Final = timedelta(minutes=5)
DEFAULT_ROWS: Final = 1000
DEFAULT_WAIT: Final = timedelta(seconds=30)

# Approximate size of a batch, so that large bodies do not fill the memory.
_BATCH_CHARACTERS = 4 * 1024 * 1024
_FIRST_ROWS = 100
# A publisher that began before we connected sends no wake-up, so poll with growing intervals.
_FIRST_PAUSE_SECONDS = 1.0
# If a transaction that holds back messages rolls back, no wake-up is sent, so poll for them.
_HELD_BACK_SECONDS = (0.05, 1.0)
_AGAIN_SECONDS = 1.0


class SubscriptionReader:
    """Reader of one subscription: messages buffered, handed out and acknowledged.

    Each method yields steps and receives the answers or errors of its calls. The caller may stop
    at any step.
    """

    def __init__(
        self,
        state: NodeState,
        topic: str,
        timeout: Duration,
        max_rows: int,
        idle: Duration | None,
    ) -> None:
        self._state = state
        self._key = key = SubscriptionKey.of(state.registration.acting, topic, timeout)
        self._max_rows = max_rows
        self._rows = min(max_rows, _FIRST_ROWS)
        self._idle_seconds = seconds_of(idle, "idle") if idle is not None else inf
        self._ping_seconds = key.seconds / 3
        self._poll_seconds = min(
            state.options.stream_poll_interval.total_seconds(), self._ping_seconds
        )
        self._buffer: deque[tuple[Any, ...]] = deque()
        # Ids handed out, now or in an earlier read, that are not yet acknowledged in the database.
        self._unacknowledged: deque[int] = deque()
        self._last = NOTHING
        self._is_begun = False
        self._since: object = None
        self._pinged_at = -inf
        self._pause = _FIRST_PAUSE_SECONDS
        self._held_pause = _HELD_BACK_SECONDS[0]
        self._due_at = self._read_at = -inf
        state.wakes.is_used = True
        self._ends = state.wakes.ends(key.ident, key.topic)
        self._connections = -1
        self._seen = state.wakes.count(key.topic)

    @property
    def topic(self) -> str:
        """The topic that is read."""
        return self._key.topic

    @property
    def is_ended(self) -> bool:
        """Whether this node has ended the subscription since the reader was created."""
        return self._state.wakes.ends(self._key.ident, self._key.topic) != self._ends

    def begin(self) -> Steps[None]:
        """Subscribe, or resume an existing subscription; this also reads unread messages."""
        if self._is_begun:
            return
        try:
            state: SubscriptionState | None = yield stream_calls.subscription(*self._key[:2])
        except NotSubscribed:
            state = None
        if state is not None and not state.is_recovered:
            # This gap was reported before. After this, only new gaps are reported.
            yield stream_calls.connect_stream(self._key.ident)
        self._since = state.since if state is not None else None
        yield from self._read()
        self._is_begun = True

    def next(self) -> Steps[StreamMessage | None]:
        """Return the next message; None at the end, or if none comes within ``idle``."""
        asked_at = monotonic()
        until = asked_at + self._idle_seconds
        while not (self._state.is_stopped or self.is_ended):
            message = yield from self._attempt()
            if message is not None:
                return message
            now = monotonic()
            if now >= until and self._read_at >= asked_at:
                return None
            if now >= until:
                # A wake-up arrives shortly after the commit, so read once even if ``idle`` is 0.
                self._due_at = -inf
            elif self._due_at > now:
                yield Wait(self._is_woken, min(self._due_at, until))
        yield from self._leave()
        return None

    def confirm(self, last_id: int | None = None) -> Steps[None]:
        """Acknowledge the messages handed out, or those up to an id."""
        last = self._last if last_id is None else self._last.up_to(last_id)
        count = sum(1 for id_ in self._unacknowledged if id_ <= last.id)
        if not count:
            return
        started_at = monotonic()
        is_ours = yield self._unless_ended(stream_calls.confirm(self._key, count, last))
        for _ in range(count):
            self._unacknowledged.popleft()
        if is_ours:
            self._pinged_at = started_at

    # Internals

    def _attempt(self) -> Steps[StreamMessage | None]:
        try:
            return (yield from self._poll())
        except ConnectionLost:
            # The node reconnects, which wakes this reader.
            self._due_at = monotonic() + self._poll_seconds
        except NodeClosed:
            if not self._state.is_stopped:
                raise
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            self._state.log.warning(
                "%s: could not read the subscription to %s, maybe read elsewhere; retrying: %s",
                self._key.ident, self.topic, error,
            )  # fmt: skip
            self._due_at = monotonic() + _AGAIN_SECONDS
        return None

    def _poll(self) -> Steps[StreamMessage | None]:
        """Hand out a message, or read; None if there was nothing."""
        if not self._is_begun:
            yield from self.begin()
        elif not self._buffer and self._wants_to_read():
            yield from self._read()
        if self._unacknowledged and monotonic() - self._pinged_at >= self._ping_seconds:
            yield from self.confirm()
        while self._buffer:
            row = self._buffer.popleft()
            self._unacknowledged.append(row[0])
            # Skip messages that were handed out but not acknowledged, and so were read again.
            if not self._last.includes(row[0], row[3]):
                self._last = self._last.then(row[0], row[3])
                return message_of(self.topic, row)
        return None

    def _read(self) -> Steps[None]:
        self._read_at = started_at = monotonic()
        self._seen = self._state.wakes.count(self.topic)
        self._due_at = -inf
        script = stream_calls.read(self._key, self._rows, len(self._unacknowledged), self._last)
        batch: MessageBatch | None = yield self._unless_ended(script)
        if batch is None:
            return
        self._unacknowledged.clear()
        self._buffer.extend(batch.rows)
        if batch.is_confirmed or batch.state is not None:
            self._pinged_at = started_at
        if batch.state is not None:
            self._compare(batch.state)
            self._due_at = started_at + self._next_pause(batch.state)
        else:
            # Adapt the next batch to the size of the bodies.
            characters = sum(len(row[2]) for row in batch.rows)
            fitting = len(batch.rows) * _BATCH_CHARACTERS // max(characters, 1)
            self._rows = max(1, min(fitting, 4 * self._rows, self._max_rows))

    def _compare(self, state: SubscriptionState) -> None:
        if self._since not in (None, state.since) and not state.is_recovered:
            self._state.counters.gaps += 1
            self._state.log.warning(
                "%s: the subscription to %s timed out; messages before %s were missed",
                self._key.ident, self.topic, state.since,
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

    def _wants_to_read(self) -> bool:
        return bool(self._unacknowledged) or self._is_woken() or self._due_at <= monotonic()

    def _is_woken(self) -> bool:
        return self.is_ended or self._state.wakes.count(self.topic) != self._seen

    def _leave(self) -> Steps[None]:
        """Acknowledge the messages handed out, if there is a connection."""
        if self._unacknowledged and self._state.heartbeat.is_connected:
            try:
                yield from self.confirm()
            except NodeClosed:
                return
            except (MessagesError, psycopg.Error) as error:
                self._state.log.warning(
                    "%s: could not acknowledge messages of %s; they are delivered again: %s",
                    self._key.ident, self.topic, error,
                )  # fmt: skip

    def _unless_ended(self, script: Script[T]) -> TransactionCall[T | None]:
        def run() -> Script[T | None]:
            # Checked when the call runs, because unsubscribe may have run before it: a read would
            # subscribe again.
            return None if self.is_ended else (yield from script)

        return transaction(run)


# Iterators that a node's ``subscribe`` returns, sync and async


class Subscription(Iterator[StreamMessage]):
    """The messages of a subscription: unread ones first, then new ones when they are published.

    Requesting the next message marks the previous ones as done; they are acknowledged in batches.
    Unacknowledged messages are delivered again, after a crash or if the loop is left. Only one
    thread may iterate.
    """

    def __init__(self, session: NodeSession, reader: SubscriptionReader) -> None:
        self._session = session
        self._reader = reader
        self._session.drive(reader.begin())

    @property
    def topic(self) -> str:
        """The topic that is read."""
        return self._reader.topic

    def __next__(self) -> StreamMessage:
        message = self._session.drive(self._reader.next())
        if message is None:
            raise StopIteration
        return message

    def confirm(self, message: StreamMessage | None = None) -> None:
        """Acknowledge all messages so far, or up to this one, now; they are not delivered again."""
        self._session.drive(self._reader.confirm(message.id if message is not None else None))


class AsyncSubscription(AsyncIterator[StreamMessage]):
    """See :class:`Subscription`; only one task may iterate.

    Awaiting it subscribes immediately; otherwise it subscribes with the first message.
    """

    def __init__(self, session: AsyncNodeSession, reader: SubscriptionReader) -> None:
        self._session = session
        self._reader = reader

    @property
    def topic(self) -> str:
        """See :attr:`Subscription.topic`."""
        return self._reader.topic

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._begin().__await__()

    async def __anext__(self) -> StreamMessage:
        message = await self._session.drive(self._reader.next())
        if message is None:
            raise StopAsyncIteration
        return message

    async def _begin(self) -> Self:
        await self._session.drive(self._reader.begin())
        return self

    async def confirm(self, message: StreamMessage | None = None) -> None:
        """See :meth:`Subscription.confirm`."""
        await self._session.drive(self._reader.confirm(message.id if message is not None else None))
