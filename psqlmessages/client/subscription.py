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
from psqlmessages.client.calls import check_int, is_transient
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
_FIRST_BATCH_ROWS = 100
# A publisher whose transaction began before we connected sends no wake-up, so poll with growing
# intervals.
_FIRST_POLL_SECONDS = 1.0
# If a publisher's transaction is open, the messages after its own cannot be read yet. If it rolls
# back, no wake-up is sent, so poll more often.
_MIN_BLOCKED_POLL_SECONDS = 0.05
_MAX_BLOCKED_POLL_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class SubscriptionReader:
    """Reads one subscription and acknowledges its messages, in steps.

    An error may interrupt a method at any step. A later call continues from the state so far.
    """

    def __init__(
        self, state: NodeState, topic: str, timeout: Duration, max_rows: int, idle: Duration | None
    ) -> None:
        self._state = state
        self.topic = topic
        self._key = key = SubscriptionKey.of(state.registration.acting_node, topic, timeout)
        self._max_rows = check_int(max_rows, "max_rows")
        self._batch_rows = min(max_rows, _FIRST_BATCH_ROWS)
        self._idle_seconds = seconds_of(idle, "idle") if idle is not None else inf
        # Each acknowledgement, and each read without messages, keeps the subscription alive.
        self._keep_alive_seconds = key.timeout_seconds / 3
        self._kept_alive_at = -inf
        # Rows of messages that were read and not yet returned.
        self._buffer: deque[tuple[Any, ...]] = deque()
        # Ids of messages that were returned and not yet acknowledged in the database.
        self._unacknowledged: deque[int] = deque()
        self._position = START
        self._has_begun = False
        self._subscribed_since: object = None
        poll_interval_seconds = state.options.stream_poll_interval.total_seconds()
        self._max_poll_seconds = min(poll_interval_seconds, self._keep_alive_seconds)
        self._poll_seconds = _FIRST_POLL_SECONDS
        self._blocked_poll_seconds = _MIN_BLOCKED_POLL_SECONDS
        self._poll_at = self._read_at = -inf
        state.wakeups.has_readers = True
        self._end_count = state.wakeups.end_count(key.ident, key.topic)
        self._seen_connections = -1
        self._seen_wakeup_count = state.wakeups.count(key.topic)

    @property
    def is_ended(self) -> bool:
        """Whether this node has ended the subscription since the reader was created."""
        return self._state.wakeups.end_count(self._key.ident, self._key.topic) != self._end_count

    def begin(self) -> Steps[None]:
        """Subscribe, or resume an existing subscription; also read the first messages."""
        if self._has_begun:
            return
        try:
            state: SubscriptionState | None = yield stream_calls.subscription(*self._key[:2])
        except NotSubscribed:
            state = None
        if state is not None and not state.is_recovered:
            # Earlier readers have reported this gap. After this call, a new gap can be detected.
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
                # The wake-up of a committed message may come later, so read at least once.
                self._poll_at = -inf
            elif self._poll_at > now:
                yield Wait(self._is_woken, min(self._poll_at, until))
        yield from self._acknowledge_rest()
        return None

    def acknowledge(self, message: StreamMessage | None = None) -> Steps[None]:
        """Acknowledge the messages that were returned, or those up to ``message``."""
        last = self._position
        if message is not None:
            last = last._replace(id=min(message.id, last.id))
        count = sum(1 for id_ in self._unacknowledged if id_ <= last.id)
        if not count:
            return
        started_at = monotonic()
        is_done = yield self._unless_ended(stream_calls.acknowledge(self._key, count, last))
        for _ in range(count):
            self._unacknowledged.popleft()
        if is_done:
            self._kept_alive_at = started_at

    def _attempt(self) -> Steps[StreamMessage | None]:
        """Return the next message; None if there is none now, or after a temporary error."""
        try:
            return (yield from self._poll())
        except ConnectionLost:
            # The node reconnects, which wakes this reader.
            self._poll_at = monotonic() + self._max_poll_seconds
        except NodeClosed:
            if not self._state.is_stopped:
                raise
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            text = (
                "%s: could not read the subscription to %s, which another reader may have locked;"
                " retrying: %s"
            )
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
            # Skip messages that were returned but not acknowledged, and so were read again.
            if not self._position.includes(row[0], row[3]):
                self._position = self._position.advance_to(row[0], row[3])
                return message_of(self.topic, row)
        return None

    def _read(self) -> Steps[None]:
        self._read_at = started_at = monotonic()
        self._seen_wakeup_count = self._state.wakeups.count(self.topic)
        self._poll_at = -inf
        count = len(self._unacknowledged)
        script = stream_calls.read(self._key, self._batch_rows, count, self._position)
        batch: MessageBatch | None = yield self._unless_ended(script)
        if batch is None:
            return
        self._unacknowledged.clear()
        self._buffer.extend(batch.rows)
        if batch.has_acknowledged or batch.state is not None:
            self._kept_alive_at = started_at
        if batch.state is not None:
            self._report_gap(batch.state)
            self._poll_at = started_at + self._next_poll_seconds(batch.state)
        else:
            # Adapt the next batch to the size of the bodies.
            characters = sum(len(row[2]) for row in batch.rows)
            fitting_rows = len(batch.rows) * _BATCH_CHARACTERS // max(characters, 1)
            self._batch_rows = max(1, min(fitting_rows, 4 * self._batch_rows, self._max_rows))

    def _report_gap(self, state: SubscriptionState) -> None:
        """Log and count an expiry of the subscription since the last read without messages."""
        if self._subscribed_since not in (None, state.since) and not state.is_recovered:
            self._state.counters.gaps += 1
            text = "%s: the subscription to %s timed out; messages before %s were missed"
            self._warn(text, state.since)
        self._subscribed_since = state.since

    def _next_poll_seconds(self, state: SubscriptionState) -> float:
        """Return the pause after a read without messages, and adapt the pauses that follow."""
        connections = self._state.wakeups.connections
        if state.backlog:
            self._poll_seconds = self._blocked_poll_seconds
            self._blocked_poll_seconds = min(2 * self._poll_seconds, _MAX_BLOCKED_POLL_SECONDS)
        else:
            is_reconnected = connections != self._seen_connections
            self._poll_seconds = _FIRST_POLL_SECONDS if is_reconnected else 2 * self._poll_seconds
            self._blocked_poll_seconds = _MIN_BLOCKED_POLL_SECONDS
        self._seen_connections = connections
        self._poll_seconds = min(self._poll_seconds, self._max_poll_seconds)
        return self._poll_seconds

    def _is_woken(self) -> bool:
        return self.is_ended or self._state.wakeups.count(self.topic) != self._seen_wakeup_count

    def _acknowledge_rest(self) -> Steps[None]:
        """Acknowledge the messages that were returned, if there is a connection; log errors."""
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
        """Create a call that runs a script, or does nothing if the subscription has ended."""

        def run() -> Script[T | None]:
            # Check when the call runs: after ``unsubscribe``, a read would subscribe again.
            return None if self.is_ended else (yield from script)

        return transaction(run)


# Iterators that ``subscribe`` of a node returns, sync and async


class Subscription(Iterator[StreamMessage]):
    """The messages of a subscription: unread ones first, then new ones when they are published.

    Requesting the next message acknowledges the previous ones; the position in the database moves
    once per batch. Messages after that position are delivered again after a crash, or if the
    program leaves the loop. Only one thread may iterate.
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
        """Move the position now: past all messages returned so far, or past ``message``."""
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
