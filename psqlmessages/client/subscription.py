"""Subscriptions: requesting the next message acknowledges the previous ones (docs/adr/0006)."""

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
    START,
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
# An open transaction holds back later messages. If it rolls back, no wake-up is sent, so poll.
_MIN_HELD_BACK_PAUSE_SECONDS = 0.05
_MAX_HELD_BACK_PAUSE_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class SubscriptionReader:
    """Reads one subscription and acknowledges its messages, in steps; may stop at any step."""

    def __init__(
        self,
        state: NodeState,
        topic: str,
        timeout: Duration,
        max_rows: int,
        idle: Duration | None,
    ) -> None:
        self._state = state
        self.topic = topic
        self._key = key = SubscriptionKey.of(state.registration.acting, topic, timeout)
        self._max_rows = max_rows
        self._batch_rows = min(max_rows, _FIRST_ROWS)
        self._idle_seconds = seconds_of(idle, "idle") if idle is not None else inf
        # Each read and each acknowledgement keeps the subscription alive.
        self._keep_alive_seconds = key.seconds / 3
        self._poll_seconds = min(
            state.options.stream_poll_interval.total_seconds(), self._keep_alive_seconds
        )
        self._buffer: deque[tuple[Any, ...]] = deque()
        # Ids of messages that were handed out and are not yet acknowledged in the database.
        self._unacknowledged: deque[int] = deque()
        self._last = START
        self._has_begun = False
        self._subscribed_since: object = None
        self._kept_alive_at = -inf
        self._pause = _FIRST_PAUSE_SECONDS
        self._held_back_pause = _MIN_HELD_BACK_PAUSE_SECONDS
        self._poll_at = self._read_at = -inf
        state.wakeups.has_readers = True
        self._end_count = state.wakeups.end_count(key.ident, key.topic)
        self._connections = -1
        self._wakeup_count = state.wakeups.count(key.topic)

    @property
    def is_ended(self) -> bool:
        """Whether this node has ended the subscription since the reader was created."""
        return self._state.wakeups.end_count(self._key.ident, self._key.topic) != self._end_count

    def begin(self) -> Steps[None]:
        """Subscribe, or resume an existing subscription; this also reads unread messages."""
        if self._has_begun:
            return
        try:
            state: SubscriptionState | None = yield stream_calls.subscription(*self._key[:2])
        except NotSubscribed:
            state = None
        if state is not None and not state.is_recovered:
            # This gap was reported earlier. After this call, only new gaps are reported.
            yield stream_calls.connect_stream(self._key.ident)
        self._subscribed_since = state.since if state is not None else None
        yield from self._read()
        self._has_begun = True

    def next(self) -> Steps[StreamMessage | None]:
        """Return the next message; None at the end, or if none comes within ``idle``."""
        started_at = monotonic()
        until = started_at + self._idle_seconds
        while not (self._state.is_stopped or self.is_ended):
            message = yield from self._attempt()
            if message is not None:
                return message
            now = monotonic()
            if now >= until:
                if self._read_at >= started_at:
                    return None
                # A wake-up arrives shortly after the commit, so read once even if ``idle`` is 0.
                self._poll_at = -inf
            elif self._poll_at > now:
                yield Wait(self._is_woken, min(self._poll_at, until))
        yield from self._acknowledge_rest()
        return None

    def acknowledge(self, message: StreamMessage | None = None) -> Steps[None]:
        """Acknowledge the messages handed out, or those up to this one."""
        last = self._last if message is None else self._last.limit_to(message.id)
        count = sum(1 for id_ in self._unacknowledged if id_ <= last.id)
        if not count:
            return
        started_at = monotonic()
        is_acknowledged = yield self._unless_ended(stream_calls.acknowledge(self._key, count, last))
        for _ in range(count):
            self._unacknowledged.popleft()
        if is_acknowledged:
            self._kept_alive_at = started_at

    def _attempt(self) -> Steps[StreamMessage | None]:
        try:
            return (yield from self._poll())
        except ConnectionLost:
            # The node reconnects, which wakes this reader.
            self._poll_at = monotonic() + self._poll_seconds
        except NodeClosed:
            if not self._state.is_stopped:
                raise
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            text = "%s: could not read the subscription to %s, maybe read elsewhere; retrying: %s"
            self._warn(text, error)
            self._poll_at = monotonic() + _RETRY_SECONDS
        return None

    def _poll(self) -> Steps[StreamMessage | None]:
        """Return the next message, from the buffer or from a read; None if there is none."""
        if not self._has_begun:
            yield from self.begin()
        elif not self._buffer and (
            self._unacknowledged or self._is_woken() or self._poll_at <= monotonic()
        ):
            yield from self._read()
        if self._unacknowledged and monotonic() - self._kept_alive_at >= self._keep_alive_seconds:
            yield from self.acknowledge()
        while self._buffer:
            row = self._buffer.popleft()
            self._unacknowledged.append(row[0])
            # Skip messages that were handed out but not acknowledged, and so were read again.
            if not self._last.includes(row[0], row[3]):
                self._last = self._last.advance_to(row[0], row[3])
                return message_of(self.topic, row)
        return None

    def _read(self) -> Steps[None]:
        self._read_at = started_at = monotonic()
        self._wakeup_count = self._state.wakeups.count(self.topic)
        self._poll_at = -inf
        count = len(self._unacknowledged)
        script = stream_calls.read(self._key, self._batch_rows, count, self._last)
        batch: MessageBatch | None = yield self._unless_ended(script)
        if batch is None:
            return
        self._unacknowledged.clear()
        self._buffer.extend(batch.rows)
        if batch.is_acknowledged or batch.state is not None:
            self._kept_alive_at = started_at
        if batch.state is not None:
            self._report_gap(batch.state)
            self._poll_at = started_at + self._next_pause(batch.state)
        else:
            # Adapt the next batch to the size of the bodies.
            characters = sum(len(row[2]) for row in batch.rows)
            fitting_rows = len(batch.rows) * _BATCH_CHARACTERS // max(characters, 1)
            self._batch_rows = max(1, min(fitting_rows, 4 * self._batch_rows, self._max_rows))

    def _report_gap(self, state: SubscriptionState) -> None:
        if self._subscribed_since not in (None, state.since) and not state.is_recovered:
            self._state.counters.gaps += 1
            text = "%s: the subscription to %s timed out; messages before %s were missed"
            self._warn(text, state.since)
        self._subscribed_since = state.since

    def _next_pause(self, state: SubscriptionState) -> float:
        connections = self._state.wakeups.connections
        if state.backlog:
            self._pause = self._held_back_pause
            self._held_back_pause = min(2 * self._held_back_pause, _MAX_HELD_BACK_PAUSE_SECONDS)
        else:
            is_reconnected = connections != self._connections
            self._pause = _FIRST_PAUSE_SECONDS if is_reconnected else 2 * self._pause
            self._held_back_pause = _MIN_HELD_BACK_PAUSE_SECONDS
        self._connections = connections
        self._pause = min(self._pause, self._poll_seconds)
        return self._pause

    def _is_woken(self) -> bool:
        return self.is_ended or self._state.wakeups.count(self.topic) != self._wakeup_count

    def _acknowledge_rest(self) -> Steps[None]:
        """Acknowledge the messages handed out, if there is a connection."""
        if self._unacknowledged and self._state.heartbeat.is_connected:
            try:
                yield from self.acknowledge()
            except NodeClosed:
                return
            except (MessagesError, psycopg.Error) as error:
                text = "%s: could not acknowledge messages of %s; they are delivered again: %s"
                self._warn(text, error)

    def _warn(self, text: str, *values: object) -> None:
        self._state.log.warning(text, self._key.ident, self.topic, *values)

    def _unless_ended(self, script: Script[T]) -> TransactionCall[T | None]:
        def run() -> Script[T | None]:
            # Check when the call runs: after ``unsubscribe``, a read would subscribe again.
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
        self.topic = reader.topic
        self._session.run_steps(reader.begin())

    def __next__(self) -> StreamMessage:
        message = self._session.run_steps(self._reader.next())
        if message is None:
            raise StopIteration
        return message

    def confirm(self, message: StreamMessage | None = None) -> None:
        """Acknowledge all messages so far, or up to this one, now; they are not delivered again."""
        self._session.run_steps(self._reader.acknowledge(message))


class AsyncSubscription(AsyncIterator[StreamMessage]):
    """See :class:`Subscription`; only one task may iterate.

    Awaiting it subscribes immediately; otherwise it subscribes with the first message.
    """

    def __init__(self, session: AsyncNodeSession, reader: SubscriptionReader) -> None:
        self._session = session
        self._reader = reader
        self.topic = reader.topic

    def __await__(self) -> Generator[Any, Any, Self]:
        yield from self._session.run_steps(self._reader.begin()).__await__()
        return self

    async def __anext__(self) -> StreamMessage:
        message = await self._session.run_steps(self._reader.next())
        if message is None:
            raise StopAsyncIteration
        return message

    async def confirm(self, message: StreamMessage | None = None) -> None:
        """See :meth:`Subscription.confirm`."""
        await self._session.run_steps(self._reader.acknowledge(message))
