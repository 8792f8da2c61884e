"""Wake-ups: counters for readers of streams, wait lists of queues, poll schedule. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from psqlmessages import wire
from psqlmessages.wire import MalformedPayload

# Limit the number of counters, because there is one for each name in an event, and any client that
# knows the channel can send events with invented names.
_MAX_TOPICS: Final = 10_000
_MAX_TOPIC_CHARACTERS: Final = 100
# The event that wakes readers of a stream; a node does not yield it as a message.
PUBLISHED: Final = "published"


class WakeupCounters:
    """Counts the reasons to read each topic. Readers compare counts, so they miss no wake-up.

    ``has_readers``: the node has readers of streams or queues.
    """

    def __init__(self) -> None:
        self._published: Counter[str] = Counter()
        # The count of each topic at its last ``mark_seen``.
        self._seen: Counter[str] = Counter()
        self._ends: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self._uncounted_publications = 0
        self.has_readers = False

    def on_published(self, topic: str) -> None:
        """Count a publication to a topic."""
        has_room = len(topic) <= _MAX_TOPIC_CHARACTERS and len(self._published) < _MAX_TOPICS
        if topic in self._published or has_room:
            self._published[topic] += 1
        else:
            # There is no room for another counter, so wake the readers of all topics.
            self._uncounted_publications += 1

    def on_connected(self) -> None:
        """Count a new connection: wake-ups may have been lost before."""
        self.connections += 1

    def on_unsubscribed(self, ident: str, topic: str) -> None:
        """Count the end of a subscription, and wake its readers, so that they stop."""
        self._ends[ident, topic] += 1
        self._published[topic] += 1

    def count(self, topic: str) -> int:
        """Return how many reasons there were so far to read a topic."""
        return self._published[topic] + self._uncounted_publications + self.connections

    def end_count(self, ident: str, topic: str) -> int:
        """Return how often a subscription has ended."""
        return self._ends[ident, topic]

    def has_new(self, topic: str) -> bool:
        """Return whether there was a reason to read a topic since the last ``mark_seen``."""
        return self.count(topic) != self._seen[topic]

    def mark_seen(self, topic: str) -> bool:
        """Return ``has_new``, then mark all reasons so far as seen."""
        has_new = self.has_new(topic)
        self._seen[topic] = self.count(topic)
        return has_new


# Wait lists: the waiters of each queue, and when to try to take elements.
#
# Only the first waiter tries to take elements, and wakes the next one if it gets some. So one push
# costs a few calls, for any number of waiters.

# A push whose transaction began before our LISTEN sends no notification, so poll with growing
# intervals.
MIN_POLL_SECONDS: Final = 0.1
MAX_POLL_SECONDS: Final = 10.0
# If a transaction that locked elements rolls back, no notification is sent, so poll every second.
_LOCKED_POLL_SECONDS: Final = 1.0
# After an attempt that found nothing, wait this long for a notification. Then call queue_listen,
# whose answer tells when the next element becomes available.
_LISTEN_AFTER_EMPTY_SECONDS: Final = 0.02
# The event that a queue has a new channel, because a rule to read the queue was removed.
MOVED: Final = "moved"


class ListenResult(NamedTuple):
    """Result of listening to a queue: for ``seconds``, pushes notify its ``channel``.

    ``next_seconds``: time until the next element becomes available; None if there is none.
    """

    channel: str
    seconds: float
    next_seconds: float | None
    is_paused: bool


class QueueState(NamedTuple):
    """State of a queue; times are those of ``monotonic``.

    ``next_at``: when the next element becomes available; None if there is none, or if that is
    unknown. ``listen_again_at``: when to listen again or, without listening, to poll.
    ``is_listening``: pushes notify this session. ``is_new``: the session has just begun to listen,
    so it may have missed pushes.
    """

    next_at: float | None
    listen_again_at: float
    is_listening: bool = False
    is_new: bool = False

    def is_stale(self, now: float) -> bool:
        """Return whether an element has become available, or it is time to listen again."""
        return (self.next_at is not None and self.next_at <= now) or self.listen_again_at <= now


class PollSchedule:
    """Growing intervals between attempts to take elements if no notification arrives."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again with the shortest interval."""
        self.interval = MIN_POLL_SECONDS

    def lengthen(self) -> None:
        """Double the interval."""
        self.interval = min(self.interval * 2, MAX_POLL_SECONDS)

    def seconds_until_poll(self, state: QueueState, now: float) -> float:
        """Return how long to wait for a notification before the next attempt."""
        seconds = min(self.interval, max(state.listen_again_at - now, MIN_POLL_SECONDS))
        if state.next_at is None:
            return seconds
        until_next = state.next_at - now
        if until_next > 0:
            return min(seconds, until_next)
        # An element is available but could not be taken: another transaction has locked it.
        return min(seconds, _LOCKED_POLL_SECONDS)


@dataclass(eq=False)
class Waiter:
    """One waiter in a wait list; ``wake`` is called when it may be its turn."""

    wake: Callable[[], None]


class WaitList:
    """Waiters of one queue, served first come, first served; and when to try to take elements.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(self, wakeups: WakeupCounters) -> None:
        self._wakeups = wakeups
        self._waiters: deque[Waiter] = deque()
        self._notifications = 0
        # The number of the connection that listens to the queue, and when to listen again.
        self._listening_connection = -1
        self._listen_again_at = -inf
        # When to listen again after a lock timeout.
        self._retry_at = -inf
        # When the next element becomes available, if that is known.
        self._next_at: float | None = None
        self._is_next_at_known = False
        self._has_locked_element = False
        # ``reason_count`` before the last attempt that found nothing; -1: try again immediately.
        self._empty_at_count = -1
        self._schedule = PollSchedule()
        self._poll_at = -inf

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self._waiters.append(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter, and wake the first one."""
        self._waiters.remove(waiter)
        self.wake()

    def is_first(self, waiter: Waiter) -> bool:
        """Return whether it is this waiter's turn."""
        return bool(self._waiters) and self._waiters[0] is waiter

    def wake(self) -> None:
        """Wake the first waiter."""
        # Iterate over a copy: another thread may remove the last waiter.
        for waiter in list(self._waiters)[:1]:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake all waiters."""
        for waiter in list(self._waiters):
            waiter.wake()

    @property
    def reason_count(self) -> int:
        """Number of reasons to try so far; a flag would lose a reason that comes during a try."""
        return self._notifications + self._wakeups.connections

    def on_notification(self, event: str) -> None:
        """Count a notification, and wake the first waiter."""
        if event == MOVED:
            self._listen_again_at = -inf
        self._notifications += 1
        self._is_next_at_known = False
        self.wake()

    def is_due(self, now: float) -> bool:
        """Return whether the first waiter should try now."""
        if not self.is_listening(now):
            return now >= self._retry_at
        return self.reason_count != self._empty_at_count or now >= self._poll_at

    @property
    def due_at(self) -> float:
        """When the first waiter should try if no notification comes."""
        return max(min(self._poll_at, self._listen_again_at), self._retry_at)

    def is_listening(self, now: float) -> bool:
        """Return whether pushes notify this session."""
        is_current = self._listening_connection == self._wakeups.connections
        return is_current and now < self._listen_again_at

    def must_listen(self, now: float) -> bool:
        """Return whether to call queue_listen before the next attempt."""
        if not self.is_listening(now):
            return True
        # Without a new reason to try, ask when the next element becomes available.
        return self.reason_count == self._empty_at_count and not self._is_next_at_known

    def record_listen_answer(
        self, answer: ListenResult, connection_number: int, reason_count: int, now: float
    ) -> None:
        """Record an answer of queue_listen; both counts are those before the call."""
        self._listening_connection = connection_number
        self._retry_at = -inf
        self._listen_again_at = now + answer.seconds / 2
        # An element pushed during the call may become available before the one in the answer.
        self._is_next_at_known = reason_count == self.reason_count
        next_seconds = None if answer.is_paused else answer.next_seconds
        # An element that is available but could not be taken is locked.
        self._has_locked_element = next_seconds == 0
        self._next_at = now + next_seconds if next_seconds else None

    def record_lock_timeout(self, now: float) -> None:
        """Record that another session has locked the queue: listen later."""
        self._retry_at = now + self._schedule.interval
        self._schedule.lengthen()

    def record_attempt(self, reason_count: int, now: float, *, has_taken: bool) -> None:
        """Record an attempt to take elements; ``reason_count`` is the number before it."""
        is_next_due = self._next_at is not None and self._next_at <= now
        if has_taken or is_next_due:
            # The element of ``_next_at`` may be taken now, so ask again.
            self._next_at, self._is_next_at_known = None, False
            self._empty_at_count = -1
        if reason_count != self._empty_at_count:
            self._schedule.reset()
        else:
            self._schedule.lengthen()
        if not has_taken:
            self._empty_at_count = reason_count
        pause = self._schedule.interval if self._is_next_at_known else _LISTEN_AFTER_EMPTY_SECONDS
        if self._has_locked_element:
            pause = min(pause, _LOCKED_POLL_SECONDS)
        self._poll_at = now + pause
        if self._next_at is not None:
            self._poll_at = min(self._poll_at, self._next_at)


class WaitLists:
    """Wait lists of a node, by queue and by channel."""

    def __init__(self, wakeups: WakeupCounters) -> None:
        self._wakeups = wakeups
        self._by_queue: dict[str, WaitList] = {}
        # Filled from the answers of queue_listen, since the channel of a queue may change.
        self.by_channel: dict[str, WaitList] = {}

    def of(self, queue: str) -> WaitList:
        """Return the wait list of a queue."""
        return self._by_queue.setdefault(queue, WaitList(self._wakeups))

    def on_notification(self, channel: str, payload: str) -> bool:
        """Process a notification; return False if its channel belongs to no queue."""
        if (wait_list := self.by_channel.get(channel)) is None:
            return False
        try:
            header = wire.parse(payload).header
        except MalformedPayload:
            # Any notification, even a malformed one, is a reason to try.
            header = {}
        wait_list.on_notification(str(header.get("Evt")))
        return True

    def wake_all(self) -> None:
        """Wake all waiters, because the node has connected or was stopped."""
        for wait_list in list(self._by_queue.values()):
            wait_list.wake_all()
