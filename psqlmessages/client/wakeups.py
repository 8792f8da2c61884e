"""Wake-up counters of streams, and the waiters of queues. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from math import inf
from typing import Final

from psqlmessages import wire
from psqlmessages.client.queue_calls import ListenResult
from psqlmessages.wire import MalformedPayload

# Whoever knows a channel can forge events of topics that there are not.
_MOST_TOPICS: Final = 10_000
_MOST_CHARACTERS: Final = 100
# The event that wakes who reads a stream; it is no message of a node.
PUBLISHED: Final = "published"


class WakeupCounters:
    """Counts, and no flags: whoever compares two of them misses nothing that came in between."""

    def __init__(self) -> None:
        self._published: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self.others = 0
        self.are_wanted = False

    def published(self, topic: str) -> None:
        """Note that something was published to a topic."""
        if topic in self._published or self._has_room_for(topic):
            self._published[topic] += 1
        else:
            # Whom it concerns is not known any more: it wakes everybody.
            self.others += 1

    def connected(self) -> None:
        """Note a new connection: what was published before it woke nobody."""
        self.connections += 1

    def _has_room_for(self, topic: str) -> bool:
        return len(topic) <= _MOST_CHARACTERS and len(self._published) < _MOST_TOPICS

    def end(self, ident: str, topic: str) -> None:
        """Note that a subscription is being ended: those who read it have to stop."""
        self._ended[ident, topic] += 1
        self._published[topic] += 1

    def count(self, topic: str) -> int:
        """How often there has been reason to read a topic."""
        return self._published[topic] + self.others + self.connections

    def ends(self, ident: str, topic: str) -> int:
        """How often a subscription has been ended."""
        return self._ended[ident, topic]

    def is_new(self, topic: str) -> bool:
        """Whether there has been reason to read a topic since the last ``take``."""
        return self.count(topic) != self._taken[topic]

    def take(self, topic: str) -> bool:
        """Tell what ``is_new`` does, and begin anew."""
        count = self.count(topic)
        is_new = count != self._taken[topic]
        self._taken[topic] = count
        return is_new


# Queue lines: which readers of a node wait for which queue, and when there is reason to look.
#
# No I/O. Only the first waiter looks and wakes the next if it found something, so one push costs a
# few calls, however many wait.

# Whose transaction was open before we listened notifies nobody: look again, later and later.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# What is there and in a transaction's hands is free without a word where that is rolled back.
_HELD_PAUSE_SECONDS = 1.0
# When the next element becomes available is asked unless something comes meanwhile.
_ASK_SECONDS = 0.02
# The event that says that a queue has a new channel: a right to read it was taken away.
MOVED: Final = "moved"


class Waiter:
    """The place of one reader in a line; ``wake`` is called when it may be its turn."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake


class WaitList:
    """The readers of one queue, first come first, and what is known of the queue.

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
        self._is_held = False
        # What `count` was when the last look found nothing; -1: there may be more.
        self._looked = -1
        self._pause = _FIRST_PAUSE_SECONDS
        self._due_at = -inf

    # Who waits

    def join(self, waiter: Waiter) -> None:
        """Wait behind all others."""
        self._waiters.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Wait no more; the next one has its turn."""
        self._waiters.remove(waiter)
        self.wake()

    def is_first(self, waiter: Waiter) -> bool:
        """Whether it is this reader's turn."""
        waiters = self._waiters
        return bool(waiters) and waiters[0] is waiter

    def wake(self) -> None:
        """Wake the first in line."""
        # Another thread may take the last one away meanwhile.
        for waiter in list(self._waiters)[:1]:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake everyone in line."""
        for waiter in list(self._waiters):
            waiter.wake()

    # Reasons to look

    @property
    def connection(self) -> int:
        """Which of the node's connections it is now."""
        return self._wakes.connections

    @property
    def count(self) -> int:
        """How often there has been reason to look: a count, as a flag would lose what follows."""
        return self._notified + self.connection

    def on_notification(self, event: str) -> None:
        """Note a notification, and wake who is first."""
        if event == MOVED:
            self._renew_at = -inf
        self._notified += 1
        self._is_next_known = False
        self.wake()

    def has_news(self) -> bool:
        """Whether there has been reason to look since the last look that found nothing."""
        return self.count != self._looked

    def is_due(self, now: float) -> bool:
        """Whether the first in line should look now."""
        if not self.is_listening(now):
            return now >= self._retry_at
        return self.has_news() or now >= self._due_at

    @property
    def due_at(self) -> float:
        """When to look, should nothing be heard until then."""
        return max(min(self._due_at, self._renew_at), self._retry_at)

    # Looking

    def is_listening(self, now: float) -> bool:
        """Whether whoever pushes tells us."""
        return self._connection == self.connection and now < self._renew_at

    def wants_listening(self, now: float) -> bool:
        """Whether to listen, or to ask when the next element becomes available."""
        return not self.is_listening(now) or not (self.has_news() or self._is_next_known)

    def listened(self, answer: ListenResult, connection: int, seen: int, now: float) -> None:
        """Take note of an answer to queue_listen; connection and count are those before it."""
        self._connection = connection
        self._retry_at = -inf
        self._renew_at = now + answer.seconds / 2
        # What was pushed meanwhile may become available before what the answer tells.
        self._is_next_known = seen == self.count
        # What is there now and could not be had is locked, or the queue is paused.
        seconds = None if answer.is_paused else answer.next_seconds
        self._is_held = seconds == 0
        self._next_at = now + seconds if seconds else None

    def could_not_listen(self, now: float) -> None:
        """Take note that somebody holds the queue: try again later."""
        self._retry_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def looked(self, seen: int, now: float, *, has_found: bool) -> None:
        """Take note of a look; ``seen``: the count before it."""
        if has_found or (self._next_at is not None and self._next_at <= now):
            self._next_at, self._is_next_known = None, False
            self._looked = -1
        if seen != self._looked:
            self._pause = _FIRST_PAUSE_SECONDS
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        if not has_found:
            self._looked = seen
        pause = min(self._pause, _HELD_PAUSE_SECONDS) if self._is_held else self._pause
        self._due_at = now + (pause if self._is_next_known else _ASK_SECONDS)
        if self._next_at is not None:
            self._due_at = min(self._due_at, self._next_at)


class WaitLists:
    """The lines of a node, by queue and by channel."""

    def __init__(self, wakes: WakeupCounters) -> None:
        self._wakes = wakes
        self._by_queue: dict[str, WaitList] = {}
        self._by_channel: dict[str, WaitList] = {}

    def of(self, queue: str) -> WaitList:
        """Give the line of a queue."""
        if (waiters_of_queue := self._by_queue.get(queue)) is None:
            waiters_of_queue = self._by_queue.setdefault(queue, WaitList(self._wakes))
        return waiters_of_queue

    def listens(self, waiters_of_queue: WaitList, channel: str) -> None:
        """Note which channel tells of a queue; it may change."""
        self._by_channel[channel] = waiters_of_queue

    def on_notification(self, channel: str, payload: str) -> bool:
        """Take in a notification; False where the channel is of no queue."""
        if (waiters_of_queue := self._by_channel.get(channel)) is None:
            return False
        try:
            header = wire.parse(payload).header
        except MalformedPayload:
            # Whatever it is, it is reason to look.
            header = {}
        waiters_of_queue.on_notification(str(header.get("Evt")))
        return True

    def wake_all(self) -> None:
        """Wake all that wait: the node has a connection, or is stopped."""
        for waiters_of_queue in list(self._by_queue.values()):
            waiters_of_queue.wake_all()
