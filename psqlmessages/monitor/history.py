"""History of topics, messages and events in memory, bounded. No I/O."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

# Per-second counts of messages and bytes

KEPT: Final = 10 * 60


class MessageCount(NamedTuple):
    """A number of messages, and the bytes of their bodies."""

    count: int
    size: int


class PerSecondRing:
    """A ring buffer over the last ``KEPT`` seconds. Seconds are whole numbers of Unix time."""

    __slots__ = ("_counts", "_sizes", "newest")

    def __init__(self, second: int) -> None:
        self._counts = array("Q", bytes(8 * KEPT))
        self._sizes = array("Q", bytes(8 * KEPT))
        self.newest = second

    def add(self, second: int, size: int) -> None:
        """Count a message; if the clock was set back, in the newest second."""
        if second > self.newest:
            self._advance(second)
        place = self.newest % KEPT
        self._counts[place] += 1
        self._sizes[place] += size

    def between(self, first: int, last: int) -> MessageCount:
        """Add up the messages from the first to the last second, both included."""
        return MessageCount(
            sum(sum(part) for part in self._parts(self._counts, first, last)),
            sum(sum(part) for part in self._parts(self._sizes, first, last)),
        )

    def each(self, first: int, last: int) -> list[MessageCount]:
        """Return the messages of each second, both ends included; 0 outside the ring."""
        return [self.between(second, second) for second in range(first, last + 1)]

    def sums(self, first: int, step: int, number: int) -> list[int]:
        """Return message counts of ``number`` intervals of ``step`` seconds from ``first`` on."""
        place = (self.newest + 1) % KEPT
        ordered = self._counts[place:] + self._counts[:place]
        begin = first - (self.newest - KEPT + 1)
        return [
            sum(ordered[max(begin + n * step, 0) : max(begin + (n + 1) * step, 0)])
            for n in range(number)
        ]

    def _parts(self, ring: array[int], first: int, last: int) -> tuple[array[int], ...]:
        first, last = max(first, self.newest - KEPT + 1), min(last, self.newest)
        if first > last:
            return ()
        begin, end = first % KEPT, last % KEPT + 1
        return (ring[begin:end],) if begin < end else (ring[begin:], ring[:end])

    def _advance(self, second: int) -> None:
        for passed in range(max(self.newest + 1, second - KEPT + 1), second + 1):
            self._counts[passed % KEPT] = self._sizes[passed % KEPT] = 0
        self.newest = second


TOPICS: Final = 2000
TAIL: Final = 50
EVENTS: Final = 200
# Limits for stored beginnings of bodies: per message, and in total.
BODY_CHARACTERS: Final = 4096
BODIES_CHARACTERS: Final = 16 * 1024 * 1024
# A rate is the mean of this many whole seconds.
RATE_SECONDS: Final = 5
# Evict this many topics at a time, so that a flood of new topics does not sort all for each one.
_LEAVING: Final = TOPICS // 10

NOTIFIERS: Final = "notifiers"
LISTENERS: Final = "listeners"
_CHANGES: Final = {
    "topic_notify": (NOTIFIERS, True),
    "topic_unnotify": (NOTIFIERS, False),
    "topic_listen": (LISTENERS, True),
    "topic_unlisten": (LISTENERS, False),
}
_NONE_LEFT: Final = {"topic_none_notify": NOTIFIERS, "topic_none_listen": LISTENERS}


@dataclass(slots=True, eq=False)
class MessageRecord:
    """A message: its header without secrets, and the beginning of its body.

    ``body`` is None if the database stores it, or if it was evicted for newer bodies.
    """

    number: int
    at: float
    sender: str
    size: int
    enc: str | None
    wants_answer: bool
    is_kept: bool
    body: str | None
    is_cut: bool


@dataclass(slots=True, eq=False)
class TopicHistory:
    """A topic: its senders and listeners, totals since the monitor started, and last messages."""

    name: str
    made: int
    is_there: bool = False
    notifiers: set[str] = field(default_factory=set)
    listeners: set[str] = field(default_factory=set)
    count: int = 0
    size: int = 0
    last_at: float = 0.0
    seconds: PerSecondRing | None = None
    tail: deque[MessageRecord] = field(default_factory=deque)

    def rate(self, second: int) -> MessageCount:
        """Add up the whole seconds before this one: divide by ``RATE_SECONDS``."""
        if self.seconds is None:
            return MessageCount(0, 0)
        return self.seconds.between(second - RATE_SECONDS, second - 1)

    def recently(self) -> int:
        """Count the messages in the ring."""
        if self.seconds is None:
            return 0
        newest = self.seconds.newest
        return self.seconds.between(newest - KEPT + 1, newest).count


class EventRecord(NamedTuple):
    """A system event, and the time it arrived."""

    number: int
    at: float
    event: str
    ident: str
    topic: str


class History:
    """The topics of a database, and their messages and events since the monitor started.

    ``topics_there`` counts all topics of the database, including those beyond the limit ``TOPICS``.
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicHistory] = {}
        self.topics_there = 0
        self.events: deque[EventRecord] = deque(maxlen=EVENTS)
        self.changed: set[str] = set()
        self.gone: set[str] = set()
        # Topics that a viewer shows: never evicted.
        self.watched: frozenset[str] = frozenset()
        # The number of the newest message or event. Numbers increase.
        self.number = 0
        self._bodies: OrderedDict[int, MessageRecord] = OrderedDict()
        self._characters = 0

    def message(self, header: dict[str, Any], body: str | None, at: float) -> None:
        """Count a message and store it as the newest of its topic."""
        topic = self._topic(str(header.get("To", "")))
        size = int(header.get("Size", 0))
        if topic.seconds is None:
            topic.seconds = PerSecondRing(int(at))
        topic.seconds.add(int(at), size)
        topic.count += 1
        topic.size += size
        topic.last_at = at
        self.changed.add(topic.name)
        message = MessageRecord(
            self._next(),
            at,
            str(header.get("From", "")),
            size,
            header.get("Enc"),
            "Token" in header,
            body is None,
            None if body is None else body[:BODY_CHARACTERS],
            body is not None and len(body) > BODY_CHARACTERS,
        )
        self._keep(topic, message)

    def event(self, event: str, ident: str, topic: str, at: float) -> None:
        """Record an event, and update the topic's senders and listeners."""
        self.events.append(EventRecord(self._next(), at, event, ident, topic))
        self.follow(event, ident, topic)

    def follow(self, event: str, ident: str, topic: str) -> None:
        """Update a topic's senders and listeners from an event; idempotent."""
        if event in _CHANGES:
            kind, joins = _CHANGES[event]
            members = getattr(self._topic(topic), kind)
            (members.add if joins else members.discard)(ident)
        elif event in _NONE_LEFT:
            getattr(self._topic(topic), _NONE_LEFT[event]).clear()
        else:
            return
        self.changed.add(topic)

    def place(self, rows: Iterable[tuple[str, list[str], list[str]]], before: int) -> None:
        """Apply rows from the database: name, senders and listeners of each topic.

        Remove topics without a row, unless they were first seen after number ``before``: the number
        of the newest message when the query started.
        """
        seen = set()
        for name, notifiers, listeners in rows:
            seen.add(name)
            topic = self._topic(name)
            is_known = True, set(notifiers), set(listeners)
            if (topic.is_there, topic.notifiers, topic.listeners) != is_known:
                topic.is_there, topic.notifiers, topic.listeners = is_known
                self.changed.add(name)
            topic.made = 0
        for name in self.topics.keys() - seen:
            if self.topics[name].made <= before:
                self._forget(name)

    def take_changes(self) -> tuple[list[TopicHistory], list[str]]:
        """Return the topics that changed since the last call, and the names of removed topics."""
        changed = [self.topics[name] for name in self.changed if name in self.topics]
        gone = [name for name in self.gone if name not in self.topics]
        self.changed.clear()
        self.gone.clear()
        return changed, gone

    def busy_since(self, at: float) -> Iterator[TopicHistory]:
        """Yield the topics with a message at or after this time."""
        return (topic for topic in self.topics.values() if topic.last_at >= at)

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _topic(self, name: str) -> TopicHistory:
        topic = self.topics.get(name)
        if topic is None:
            if len(self.topics) >= TOPICS:
                self._make_room()
            topic = self.topics[name] = TopicHistory(name, self.number + 1)
            self.changed.add(name)
        return topic

    def _make_room(self) -> None:
        """Evict the topics with the fewest recent messages; among equals, the longest silent."""
        leaving = sorted(self.topics.values(), key=lambda t: (t.recently(), t.last_at))
        for topic in [topic for topic in leaving if topic.name not in self.watched][:_LEAVING]:
            self._forget(topic.name)

    def _forget(self, name: str) -> None:
        for message in self.topics.pop(name).tail:
            self._drop_body(message)
        self.gone.add(name)

    def _keep(self, topic: TopicHistory, message: MessageRecord) -> None:
        topic.tail.append(message)
        if len(topic.tail) > TAIL:
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
