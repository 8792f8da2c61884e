"""Wakes: which topics something was published to, as a node's session hears. No I/O."""

from __future__ import annotations

from collections import Counter
from typing import Final

# Whoever knows a channel can forge events of topics that there are not.
_MOST_TOPICS: Final = 10_000
_MOST_CHARACTERS: Final = 100
# The event that wakes who reads a stream; it is no message of a node.
PUBLISHED: Final = "published"


class Wakes:
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
