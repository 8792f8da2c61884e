"""History of topics, messages and events in memory, with limits. No I/O."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

HISTORY_SECONDS: Final = 10 * 60


class MessageCount(NamedTuple):
    """A number of messages, and the total size of their bodies in bytes."""

    messages: int
    size: int


class PerSecondRing:
    """Numbers and sizes of messages in each of the last ``HISTORY_SECONDS``, by Unix time."""

    __slots__ = ("_counts", "_sizes", "newest")

    def __init__(self, second: int) -> None:
        self._counts = array("Q", bytes(8 * HISTORY_SECONDS))
        self._sizes = array("Q", bytes(8 * HISTORY_SECONDS))
        self.newest = second

    def add(self, second: int, size: int) -> None:
        """Count a message in this second. If the clock was set back, use the newest second."""
        if second > self.newest:
            self._advance(second)
        index = self.newest % HISTORY_SECONDS
        self._counts[index] += 1
        self._sizes[index] += size

    def total(self, first: int, last: int) -> MessageCount:
        """Add up the messages from the first to the last second, both included."""
        return MessageCount(
            sum(sum(part) for part in self._parts(self._counts, first, last)),
            sum(sum(part) for part in self._parts(self._sizes, first, last)),
        )

    def intervals(self, first: int, step: int, number: int) -> list[int]:
        """Return message counts of ``number`` intervals of ``step`` seconds, from ``first`` on."""
        # Faster than total() for each interval: a snapshot of the list has 60 intervals per topic.
        oldest = (self.newest + 1) % HISTORY_SECONDS
        ordered = self._counts[oldest:] + self._counts[:oldest]
        first_index = first - (self.newest - HISTORY_SECONDS + 1)
        starts = range(first_index, first_index + number * step, step)
        return [sum(ordered[max(start, 0) : max(start + step, 0)]) for start in starts]

    def _parts(self, ring: array[int], first: int, last: int) -> tuple[array[int], ...]:
        first, last = max(first, self.newest - HISTORY_SECONDS + 1), min(last, self.newest)
        if first > last:
            return ()
        begin, end = first % HISTORY_SECONDS, last % HISTORY_SECONDS + 1
        return (ring[begin:end],) if begin < end else (ring[begin:], ring[:end])

    def _advance(self, second: int) -> None:
        for skipped in range(max(self.newest + 1, second - HISTORY_SECONDS + 1), second + 1):
            self._counts[skipped % HISTORY_SECONDS] = self._sizes[skipped % HISTORY_SECONDS] = 0
        self.newest = second


MAX_TOPICS: Final = 2000
# The maximum number of stored messages per topic. An open page keeps more.
MAX_MESSAGES: Final = 50
MAX_EVENTS: Final = 200
# Only this beginning of each body is stored.
MAX_BODY_CHARACTERS: Final = 4096
# The maximum length of all stored bodies together.
MAX_TOTAL_CHARACTERS: Final = 16 * 1024 * 1024
# A rate is the mean of this many whole seconds.
RATE_SECONDS: Final = 5
# Evict this many topics at a time, so that new topics seldom cause a sort of all topics.
_EVICTED_TOPICS: Final = MAX_TOPICS // 10

# After a restart of PostgreSQL, housekeeping may report the crashes of nodes for this long.
_RESTART_SECONDS: Final = 60.0

# For each event: the set of nodes that it changes, and whether it adds its node to the set.
_MEMBERSHIP_EVENTS: Final = {
    "topic_notify": ("senders", True),
    "topic_unnotify": ("senders", False),
    "topic_listen": ("listeners", True),
    "topic_unlisten": ("listeners", False),
}
# The set of nodes that an event empties.
_EMPTYING_EVENTS: Final = {"topic_none_notify": "senders", "topic_none_listen": "listeners"}


@dataclass(slots=True, eq=False)
class MessageRecord:
    """A message: its header without secrets, and the beginning of its body.

    ``is_large``: the body is stored in the database, because it exceeds the NOTIFY limit. ``body``
    is None if it is large or was evicted. ``is_cut``: ``body`` is only the beginning of the body.
    """

    number: int
    at: float
    sender: str
    size: int
    enc: str | None
    wants_answer: bool
    is_large: bool
    body: str | None
    is_cut: bool


@dataclass(slots=True, eq=False)
class TopicHistory:
    """A topic: its senders and listeners, totals since the monitor started, and last messages.

    ``exists``: a query has found the topic in the database. ``created_number``: the number of the
    first message or event after this record was created, because a query that started earlier may
    not find the topic; 0 after a query has found it.
    """

    name: str
    created_number: int
    exists: bool = False
    senders: set[str] = field(default_factory=set)
    listeners: set[str] = field(default_factory=set)
    count: int = 0
    size: int = 0
    last_at: float = 0.0
    per_second: PerSecondRing | None = None
    tail: deque[MessageRecord] = field(default_factory=deque)

    def total_for_rate(self, second: int) -> MessageCount:
        """Add up the messages of the ``RATE_SECONDS`` before this second."""
        if self.per_second is None:
            return MessageCount(0, 0)
        return self.per_second.total(second - RATE_SECONDS, second - 1)

    def history_count(self, second: int) -> int:
        """Return the number of messages in the last ``HISTORY_SECONDS``; ``second`` is now."""
        if self.per_second is None:
            return 0
        # If the clock was set back, the newest messages are counted in a later second than now.
        newest = max(second, self.per_second.newest)
        return self.per_second.total(second - HISTORY_SECONDS + 1, newest).messages


# This event replaces the crashes that a restart of PostgreSQL causes.
RESTARTED: Final = "restarted"


class EventRecord(NamedTuple):
    """A system event, and the time at which it arrived.

    ``nodes``: the number of crashes that a restart of PostgreSQL caused; 0 for other events.
    """

    number: int
    at: float
    event: str
    ident: str
    topic: str
    nodes: int = 0


class History:
    """The topics of a database, and their messages and events since the monitor started.

    ``topic_count`` is the number of topics in the database, which may exceed ``MAX_TOPICS``.
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicHistory] = {}
        self.topic_count = 0
        self.events: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        # A crash of a node that has not connected since the last restart is part of this restart.
        self._restart: EventRecord | None = None
        self._connected_since_restart: set[str] = set()
        # Names of the topics that changed since the last take_changes().
        self._changed: set[str] = set()
        # Topics that an open page shows, which are not evicted.
        self.viewed: set[str] = set()
        # The number of the newest message or event. They are numbered in order of arrival.
        self.last_number = 0
        # When this message or event arrived.
        self._last_at = 0.0
        # The messages whose bodies are stored, by number: the oldest is evicted first.
        self._bodies: OrderedDict[int, MessageRecord] = OrderedDict()
        self._characters = 0

    def add_message(self, header: dict[str, Any], body: str | None, at: float) -> None:
        """Count a message and store it as the newest of its topic."""
        self._last_at = at
        topic = self._topic(str(header.get("To", "")))
        size = int(header.get("Size", 0))
        if topic.per_second is None:
            topic.per_second = PerSecondRing(int(at))
        topic.per_second.add(int(at), size)
        topic.count += 1
        topic.size += size
        topic.last_at = at
        self._changed.add(topic.name)
        message = MessageRecord(
            self._next_number(),
            at,
            str(header.get("From", "")),
            size,
            header.get("Enc"),
            "Token" in header,
            body is None,
            None if body is None else body[:MAX_BODY_CHARACTERS],
            body is not None and len(body) > MAX_BODY_CHARACTERS,
        )
        self._add_to_tail(topic, message)

    def add_event(self, event: str, ident: str, topic: str, at: float) -> None:
        """Record an event, and update the topic's senders and listeners."""
        self._last_at = at
        if event == "connect" and self._restart is not None:
            self._connected_since_restart.add(ident)
        if not (event == "crash" and self._count_in_restart(ident, at)):
            self.events.append(EventRecord(self._next_number(), at, event, ident, topic))
        self.apply_event(event, ident, topic)

    def on_restart(self, at: float) -> None:
        """Record a restart of PostgreSQL as one event, which replaces the crashes since ``at``."""
        crashed = [event for event in self.events if event.event == "crash" and event.at >= at]
        for event in crashed:
            self.events.remove(event)
        self._restart = EventRecord(self._next_number(), at, RESTARTED, "", "", len(crashed))
        self._connected_since_restart.clear()
        self.events.append(self._restart)

    def _count_in_restart(self, ident: str, at: float) -> bool:
        """If a restart caused this crash, count it in the event of the restart, and return True."""
        restart = self._restart
        if (
            restart is None
            or at - restart.at > _RESTART_SECONDS
            or ident in self._connected_since_restart
            or restart not in self.events
        ):
            return False
        self.events.remove(restart)
        self._restart = restart._replace(number=self._next_number(), nodes=restart.nodes + 1)
        self.events.append(self._restart)
        return True

    def apply_event(self, event: str, ident: str, topic: str) -> None:
        """Update a topic's senders and listeners from an event; idempotent."""
        if event in _MEMBERSHIP_EVENTS:
            field_name, is_added = _MEMBERSHIP_EVENTS[event]
            members = getattr(self._topic(topic), field_name)
            (members.add if is_added else members.discard)(ident)
        elif event in _EMPTYING_EVENTS:
            getattr(self._topic(topic), _EMPTYING_EVENTS[event]).clear()
        else:
            return
        self._changed.add(topic)

    def apply_rows(self, rows: Iterable[tuple[str, list[str], list[str]]], number: int) -> None:
        """Apply the result of a query: name, senders and listeners of each topic.

        Removes topics without a row, unless they are newer than the query. ``number`` is the value
        of ``last_number`` when the query started.
        """
        found_names = set()
        for name, senders, listeners in rows:
            found_names.add(name)
            topic = self._topic(name)
            current = True, set(senders), set(listeners)
            if (topic.exists, topic.senders, topic.listeners) != current:
                topic.exists, topic.senders, topic.listeners = current
                self._changed.add(name)
            topic.created_number = 0
        for name in self.topics.keys() - found_names:
            if self.topics[name].created_number <= number:
                self._remove(name)

    def take_changes(self) -> list[TopicHistory]:
        """Return the topics that changed since the last call."""
        changed = [self.topics[name] for name in self._changed if name in self.topics]
        self._changed.clear()
        return changed

    def _next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def _topic(self, name: str) -> TopicHistory:
        """Return the record of a topic; if it is missing, create it."""
        topic = self.topics.get(name)
        if topic is None:
            if len(self.topics) >= MAX_TOPICS:
                self._evict_topics()
            topic = self.topics[name] = TopicHistory(name, self.last_number + 1)
            self._changed.add(name)
        return topic

    def _evict_topics(self) -> None:
        """Remove topics with the smallest ``history_count``; among equals, those silent longest."""
        second = int(self._last_at)
        topics = [topic for topic in self.topics.values() if topic.name not in self.viewed]
        topics.sort(key=lambda topic: (topic.history_count(second), topic.last_at))
        for topic in topics[:_EVICTED_TOPICS]:
            self._remove(topic.name)

    def _remove(self, name: str) -> None:
        for message in self.topics.pop(name).tail:
            self._evict_body(message)

    def _add_to_tail(self, topic: TopicHistory, message: MessageRecord) -> None:
        topic.tail.append(message)
        if len(topic.tail) > MAX_MESSAGES:
            self._evict_body(topic.tail.popleft())
        if message.body is not None:
            self._bodies[message.number] = message
            self._characters += len(message.body)
            while self._characters > MAX_TOTAL_CHARACTERS:
                self._evict_body(next(iter(self._bodies.values())))

    def _evict_body(self, message: MessageRecord) -> None:
        if self._bodies.pop(message.number, None) is not None and message.body is not None:
            self._characters -= len(message.body)
            message.body = None
