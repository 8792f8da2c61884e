"""Wake-up counters of streams, the waiters of queues, and when to poll. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from psqlmessages import wire
from psqlmessages.client.queue_calls import ListenResult
from psqlmessages.wire import MalformedPayload

# Anyone who knows a channel can forge events of topics that do not exist, so limit their number.
_MOST_TOPICS: Final = 10_000
_MOST_CHARACTERS: Final = 100
# The event that wakes readers of a stream; a node does not yield it as a message.
PUBLISHED: Final = "published"


class WakeupCounters:
    """Wake-up counters of streams: readers compare a count with their last one, so none is lost."""

    def __init__(self) -> None:
        self._published: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self.others = 0
        self.is_used = False

    def published(self, topic: str) -> None:
        """Count a publication to a topic."""
        has_room = len(topic) <= _MOST_CHARACTERS and len(self._published) < _MOST_TOPICS
        if topic in self._published or has_room:
            self._published[topic] += 1
        else:
            # No counter for this topic: wake the readers of all topics.
            self.others += 1

    def connected(self) -> None:
        """Count a new connection: publications before it have sent no wake-up to this session."""
        self.connections += 1

    def end(self, ident: str, topic: str) -> None:
        """Count the end of a subscription: its readers must stop."""
        self._ended[ident, topic] += 1
        self._published[topic] += 1

    def count(self, topic: str) -> int:
        """Return how often there was a reason to read a topic."""
        return self._published[topic] + self.others + self.connections

    def ends(self, ident: str, topic: str) -> int:
        """Return how often a subscription has ended."""
        return self._ended[ident, topic]

    def is_new(self, topic: str) -> bool:
        """Return whether there was a reason to read a topic since the last ``take``."""
        return self.count(topic) != self._taken[topic]

    def take(self, topic: str) -> bool:
        """Return ``is_new``, and reset it."""
        count = self.count(topic)
        is_new = count != self._taken[topic]
        self._taken[topic] = count
        return is_new


# Wait lists: the waiters of each queue, and when to look for elements.
#
# No I/O. Only the first waiter tries to take elements, and wakes the next one if it gets some. So
# one push costs a few calls, for any number of waiters.

# A push whose transaction began before our LISTEN sends no notification, so poll with growing
# intervals.
POLL_LEAST: Final = 0.1
POLL_MOST: Final = 10.0
# If a transaction that locked elements rolls back, no notification is sent, so poll every second.
_HELD_SECONDS: Final = 1.0
# If no notification arrives, wait this long, then ask when the next element becomes available.
_ASK_SECONDS = 0.02
# The queue has a new channel because a node lost the right to read it: listen again.
MOVED: Final = "moved"


class QueueState(NamedTuple):
    """State of a queue; times are those of ``monotonic``.

    ``next_at``: when the next element becomes available; None if only a notification can announce
    one. ``again_at``: when to listen again, because pushes send notifications for a limited time.
    ``is_listening``: pushes notify this session. ``is_new``: it has just begun to listen, so it may
    have missed pushes.
    """

    next_at: float | None
    again_at: float
    is_listening: bool = False
    is_new: bool = False

    def is_stale(self, now: float) -> bool:
        """Whether the state must be read again."""
        return (self.next_at is not None and self.next_at <= now) or self.again_at <= now


class PollSchedule:
    """When to look for elements if no notification arrives."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Poll with the shortest interval."""
        self.interval = POLL_LEAST

    def polled(self) -> None:
        """Double the interval."""
        self.interval = min(self.interval * 2, POLL_MOST)

    def seconds(self, state: QueueState, now: float) -> float:
        """Return the seconds until the next poll."""
        seconds = min(self.interval, max(state.again_at - now, POLL_LEAST))
        if state.next_at is None:
            return seconds
        # An element is available but was not returned: another transaction has locked it.
        until_next = state.next_at - now
        return min(seconds, until_next if until_next > 0 else _HELD_SECONDS)


@dataclass(eq=False)
class Waiter:
    """One waiter in a wait list; ``wake`` is called when it may be its turn."""

    wake: Callable[[], None]


class WaitList:
    """Waiters of one queue, first come first served, and the known state of the queue.

    All times are seconds of a monotonic clock that the caller passes in.
    """

    def __init__(self, wakes: WakeupCounters) -> None:
        self._wakes = wakes
        self._waiters: deque[Waiter] = deque()
        self._notified = 0
        self._connection = -1
        self._renew_at = -inf
        self._retry_at = -inf
        self._next_at: float | None = None
        self._is_next_known = False
        self._has_locked_element = False
        # `count` before the last attempt that found nothing; -1: try again.
        self._empty_at_count = -1
        self._schedule = PollSchedule()
        self._due_at = -inf

    # Waiters

    def join(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self._waiters.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter, and wake the first one."""
        self._waiters.remove(waiter)
        self.wake()

    def is_first(self, waiter: Waiter) -> bool:
        """Return whether it is this waiter's turn."""
        waiters = self._waiters
        return bool(waiters) and waiters[0] is waiter

    def wake(self) -> None:
        """Wake the first waiter."""
        # Iterate over a copy: another thread may remove the last waiter.
        for waiter in list(self._waiters)[:1]:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake all waiters."""
        for waiter in list(self._waiters):
            waiter.wake()

    # Reasons to look

    @property
    def connection(self) -> int:
        """Number of the node's current connection."""
        return self._wakes.connections

    @property
    def count(self) -> int:
        """Number of reasons to try so far; a flag would lose those that come during an attempt."""
        return self._notified + self.connection

    def on_notification(self, event: str) -> None:
        """Count a notification, and wake the first waiter."""
        if event == MOVED:
            self._renew_at = -inf
        self._notified += 1
        self._is_next_known = False
        self.wake()

    def is_due(self, now: float) -> bool:
        """Return whether the first waiter should look now."""
        if not self.is_listening(now):
            return now >= self._retry_at
        return self.count != self._empty_at_count or now >= self._due_at

    @property
    def due_at(self) -> float:
        """When to look if no notification comes."""
        return max(min(self._due_at, self._renew_at), self._retry_at)

    # Looking

    def is_listening(self, now: float) -> bool:
        """Return whether pushes notify this session."""
        return self._connection == self.connection and now < self._renew_at

    def must_listen(self, now: float) -> bool:
        """Return whether to listen, or to ask when the next element becomes available."""
        has_news = self.count != self._empty_at_count
        return not (self.is_listening(now) and (has_news or self._is_next_known))

    def record_listen_answer(
        self, answer: ListenResult, connection: int, seen: int, now: float
    ) -> None:
        """Record an answer of queue_listen; ``connection`` and ``seen`` were read before it."""
        self._connection = connection
        self._retry_at = -inf
        self._renew_at = now + answer.seconds / 2
        # An element pushed during the call may become available before the one in the answer.
        self._is_next_known = seen == self.count
        # An available element that could not be taken is locked, or the queue is paused.
        seconds = None if answer.is_paused else answer.next_seconds
        self._has_locked_element = seconds == 0
        self._next_at = now + seconds if seconds else None

    def could_not_listen(self, now: float) -> None:
        """Record that another session has locked the queue: retry later."""
        self._retry_at = now + self._schedule.interval
        self._schedule.polled()

    def record_attempt(self, seen: int, now: float, *, has_found: bool) -> None:
        """Record an attempt to take elements; ``seen`` is the count before it."""
        if has_found or (self._next_at is not None and self._next_at <= now):
            self._next_at, self._is_next_known = None, False
            self._empty_at_count = -1
        if seen != self._empty_at_count:
            self._schedule.reset()
        else:
            self._schedule.polled()
        if not has_found:
            self._empty_at_count = seen
        pause = self._schedule.interval
        pause = min(pause, _HELD_SECONDS) if self._has_locked_element else pause
        self._due_at = now + (pause if self._is_next_known else _ASK_SECONDS)
        if self._next_at is not None:
            self._due_at = min(self._due_at, self._next_at)


class WaitLists:
    """Wait lists of a node, by queue and by channel."""

    def __init__(self, wakes: WakeupCounters) -> None:
        self._wakes = wakes
        self._by_queue: dict[str, WaitList] = {}
        self._by_channel: dict[str, WaitList] = {}

    def of(self, queue: str) -> WaitList:
        """Return the wait list of a queue."""
        return self._by_queue.setdefault(queue, WaitList(self._wakes))

    def set_channel(self, wait_list: WaitList, channel: str) -> None:
        """Record the channel of a queue; it may change."""
        self._by_channel[channel] = wait_list

    def on_notification(self, channel: str, payload: str) -> bool:
        """Process a notification; return False if its channel belongs to no queue."""
        if (wait_list := self._by_channel.get(channel)) is None:
            return False
        try:
            header = wire.parse(payload).header
        except MalformedPayload:
            # A malformed notification is also a reason to look.
            header = {}
        wait_list.on_notification(str(header.get("Evt")))
        return True

    def wake_all(self) -> None:
        """Wake all waiters, because the node has connected or was stopped."""
        for wait_list in list(self._by_queue.values()):
            wait_list.wake_all()
