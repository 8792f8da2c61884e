"""History of topics, messages and events in memory, bounded. No I/O."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

HISTORY_SECONDS: Final = 10 * 60


class MessageCount(NamedTuple):
    """A number of messages, and the total size of their bodies in bytes."""

    count: int
    size: int


class PerSecondRing:
    """Message counts of the last ``HISTORY_SECONDS``, each second a whole number of Unix time."""

    __slots__ = ("_counts", "_sizes", "newest")

    def __init__(self, second: int) -> None:
        self._counts = array("Q", bytes(8 * HISTORY_SECONDS))
        self._sizes = array("Q", bytes(8 * HISTORY_SECONDS))
        self.newest = second

    def add(self, second: int, size: int) -> None:
        """Count a message; if the clock was set back, in the newest second."""
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
        """Return message counts of ``number`` intervals of ``step`` seconds from ``first`` on."""
        # Faster than total() for each: a snapshot of the list needs 60 intervals of each topic.
        oldest = (self.newest + 1) % HISTORY_SECONDS
        ordered = self._counts[oldest:] + self._counts[:oldest]
        begin = first - (self.newest - HISTORY_SECONDS + 1)
        starts = range(begin, begin + number * step, step)
        return [sum(ordered[max(start, 0) : max(start + step, 0)]) for start in starts]

    def _parts(self, ring: array[int], first: int, last: int) -> tuple[array[int], ...]:
        first, last = max(first, self.newest - HISTORY_SECONDS + 1), min(last, self.newest)
        if first > last:
            return ()
        begin, end = first % HISTORY_SECONDS, last % HISTORY_SECONDS + 1
        return (ring[begin:end],) if begin < end else (ring[begin:], ring[:end])

    def _advance(self, second: int) -> None:
        for each in range(max(self.newest + 1, second - HISTORY_SECONDS + 1), second + 1):
            self._counts[each % HISTORY_SECONDS] = self._sizes[each % HISTORY_SECONDS] = 0
        self.newest = second


MAX_TOPICS: Final = 2000
# The page has the same maximum: tail.js.
MAX_MESSAGES: Final = 50
MAX_EVENTS: Final = 200
# Limits for stored beginnings of bodies: per message, and in total.
BODY_CHARACTERS: Final = 4096
BODIES_CHARACTERS: Final = 16 * 1024 * 1024
# A rate is the mean of this many whole seconds.
RATE_SECONDS: Final = 5
# Evict this many topics at a time, so that a flood of new topics does not sort all for each one.
_EVICTED_TOPICS: Final = MAX_TOPICS // 10

# The set of nodes that an event changes, and whether the node joins it.
_MEMBERSHIP_EVENTS: Final = {
    "topic_notify": ("senders", True),
    "topic_unnotify": ("senders", False),
    "topic_listen": ("listeners", True),
    "topic_unlisten": ("listeners", False),
}
_EMPTYING_EVENTS: Final = {"topic_none_notify": "senders", "topic_none_listen": "listeners"}


@dataclass(slots=True, eq=False)
class MessageRecord:
    """A message: its header without secrets, and the beginning of its body.

    ``body`` is None if it is large, which means stored in the database, or was evicted.
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

    ``created_number``: the number of the message or event that created this record; 0 if a query
    has found the topic in the database.
    """

    name: str
    created_number: int
    exists: bool = False
    senders: set[str] = field(default_factory=set)
    listeners: set[str] = field(default_factory=set)
    count: int = 0
    size: int = 0
    last_at: float = 0.0
    seconds: PerSecondRing | None = None
    tail: deque[MessageRecord] = field(default_factory=deque)

    def rate(self, second: int) -> MessageCount:
        """Count the messages of the ``RATE_SECONDS`` before this second."""
        if self.seconds is None:
            return MessageCount(0, 0)
        return self.seconds.total(second - RATE_SECONDS, second - 1)

    def recent_count(self) -> int:
        """Count the messages of the last ``HISTORY_SECONDS`` before the newest one."""
        if self.seconds is None:
            return 0
        return self.seconds.total(0, self.seconds.newest).count


class EventRecord(NamedTuple):
    """A system event, and the time it arrived."""

    number: int
    at: float
    event: str
    ident: str
    topic: str


class History:
    """The topics of a database, and their messages and events since the monitor started.

    ``topic_count`` is the number of topics in the database, which may exceed ``MAX_TOPICS``.
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicHistory] = {}
        self.topic_count = 0
        self.events: deque[EventRecord] = deque(maxlen=MAX_EVENTS)
        # The names of topics that changed or were removed since take_changes().
        self._changed: set[str] = set()
        self._removed: set[str] = set()
        # Topics whose page is open: never evicted.
        self.viewed: frozenset[str] = frozenset()
        # The number of the newest message or event. Numbers increase.
        self.number = 0
        self._bodies: OrderedDict[int, MessageRecord] = OrderedDict()
        self._characters = 0

    def add_message(self, header: dict[str, Any], body: str | None, at: float) -> None:
        """Count a message and store it as the newest of its topic."""
        topic = self._topic(str(header.get("To", "")))
        size = int(header.get("Size", 0))
        if topic.seconds is None:
            topic.seconds = PerSecondRing(int(at))
        topic.seconds.add(int(at), size)
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
            None if body is None else body[:BODY_CHARACTERS],
            body is not None and len(body) > BODY_CHARACTERS,
        )
        self._add_to_tail(topic, message)

    def add_event(self, event: str, ident: str, topic: str, at: float) -> None:
        """Record an event, and update the topic's senders and listeners."""
        self.events.append(EventRecord(self._next_number(), at, event, ident, topic))
        self.apply_event(event, ident, topic)

    def apply_event(self, event: str, ident: str, topic: str) -> None:
        """Update a topic's senders and listeners from an event; idempotent."""
        if event in _MEMBERSHIP_EVENTS:
            field_name, joins = _MEMBERSHIP_EVENTS[event]
            members = getattr(self._topic(topic), field_name)
            (members.add if joins else members.discard)(ident)
        elif event in _EMPTYING_EVENTS:
            getattr(self._topic(topic), _EMPTYING_EVENTS[event]).clear()
        else:
            return
        self._changed.add(topic)

    def apply_rows(self, rows: Iterable[tuple[str, list[str], list[str]]], before: int) -> None:
        """Apply rows from the database: name, senders and listeners of each topic.

        Remove topics without a row, unless they are newer than the query. ``before`` is the number
        of the newest message when the query started.
        """
        found = set()
        for name, senders, listeners in rows:
            found.add(name)
            topic = self._topic(name)
            current = True, set(senders), set(listeners)
            if (topic.exists, topic.senders, topic.listeners) != current:
                topic.exists, topic.senders, topic.listeners = current
                self._changed.add(name)
            topic.created_number = 0
        for name in self.topics.keys() - found:
            if self.topics[name].created_number <= before:
                self._remove(name)

    def take_changes(self) -> tuple[list[TopicHistory], list[str]]:
        """Return the topics that changed since the last call, and the names of removed topics."""
        changed = [self.topics[name] for name in self._changed if name in self.topics]
        removed = [name for name in self._removed if name not in self.topics]
        self._changed.clear()
        self._removed.clear()
        return changed, removed

    def topics_since(self, at: float) -> Iterator[TopicHistory]:
        """Yield the topics with a message at or after this time."""
        return (topic for topic in self.topics.values() if topic.last_at >= at)

    def _next_number(self) -> int:
        self.number += 1
        return self.number

    def _topic(self, name: str) -> TopicHistory:
        """Return the record of a topic; create it if it is missing."""
        topic = self.topics.get(name)
        if topic is None:
            if len(self.topics) >= MAX_TOPICS:
                self._make_room()
            topic = self.topics[name] = TopicHistory(name, self.number + 1)
            self._changed.add(name)
        return topic

    def _make_room(self) -> None:
        """Evict the topics with the fewest recent messages; among equals, the longest silent."""
        topics = [topic for topic in self.topics.values() if topic.name not in self.viewed]
        topics.sort(key=lambda topic: (topic.recent_count(), topic.last_at))
        for topic in topics[:_EVICTED_TOPICS]:
            self._remove(topic.name)

    def _remove(self, name: str) -> None:
        for message in self.topics.pop(name).tail:
            self._drop_body(message)
        self._removed.add(name)

    def _add_to_tail(self, topic: TopicHistory, message: MessageRecord) -> None:
        topic.tail.append(message)
        if len(topic.tail) > MAX_MESSAGES:
            self._drop_body(topic.tail.popleft())
        if message.body is not None:
            self._bodies[message.number] = message
            self._characters += len(message.body)
            while self._characters > BODIES_CHARACTERS:
                self._drop_body(next(iter(self._bodies.values())))

    def _drop_body(self, message: MessageRecord) -> None:
        if self._bodies.pop(message.number, None) is not None and message.body is not None:
            self._characters -= len(message.body)
            message.body = None
