"""Assembly: joins the segments of long messages, within bounds. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from psqlmessages.pubsub.segments import LAST, PART, decoded

# What Python needs for a string beside its characters, so that tiny segments are bounded too.
_OVERHEAD_BYTES: Final = 64

_Key = tuple[int, str]


@dataclass(slots=True)
class _Unfinished:
    parts: list[str] = field(default_factory=list)
    size: int = 0


class Assembly:
    """The messages of which not all segments came, by their sender's process id and channel.

    Holds at most ``most`` of them and ``most_bytes`` in all. Where one more would pass the count,
    the oldest is dropped; where it would pass the bytes, the largest. What still comes of a
    dropped message is ignored.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._unfinished: dict[_Key, _Unfinished] = {}
        # A dictionary as a set that keeps its order.
        self._ignored: dict[_Key, None] = {}
        self._missing: set[int] = set()
        self.size = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._unfinished)

    @property
    def senders(self) -> set[int]:
        """The process ids of those from whom more is to come."""
        return {process_id for process_id, _ in (*self._unfinished, *self._ignored)}

    def add(self, process_id: int, channel: str, segment: str) -> str | None:
        """Take in a segment; return the flagged text that it completes, None where more follows.

        Raise MalformedPayload where the parts do not make up a message.
        """
        key = (process_id, channel)
        if segment[:1] == PART:
            self._missing.discard(process_id)
            if key not in self._ignored:
                self._extend(key, segment)
            return None
        if segment[:1] != LAST:
            return segment
        if key in self._ignored:
            del self._ignored[key]
            return None
        unfinished = self._remove(key)
        parts = unfinished.parts if unfinished is not None else []
        return decoded("".join([*parts, segment[1:]]))

    def saw(self, living: Iterable[int]) -> None:
        """Take note of which senders live; drop the messages of those missing a second time.

        The first time, what they sent before they ended may still be on its way.
        """
        missing = self.senders.difference(living)
        gone = missing & self._missing
        self._missing = missing - gone
        for key in [key for key in self._unfinished if key[0] in gone]:
            self._drop(key)
        for key in [key for key in self._ignored if key[0] in gone]:
            del self._ignored[key]

    def forget(self, channel: str) -> None:
        """Let go of a channel's messages, which nobody wants any more."""
        for key in [key for key in self._unfinished if key[1] == channel]:
            self._remove(key)
        for key in [key for key in self._ignored if key[1] == channel]:
            del self._ignored[key]

    def clear(self) -> None:
        """Drop all: what belongs to them went to a connection that is lost."""
        for key in list(self._unfinished):
            self._drop(key)
        self._ignored.clear()
        self._missing.clear()

    def _extend(self, key: _Key, segment: str) -> None:
        unfinished = self._unfinished.setdefault(key, _Unfinished())
        size = len(segment) + _OVERHEAD_BYTES
        unfinished.parts.append(segment[1:])
        unfinished.size += size
        self.size += size
        if len(self._unfinished) > self._most:
            self._ignore(next(iter(self._unfinished)))
        if self.size > self._most_bytes:
            self._ignore(max(self._unfinished, key=lambda each: self._unfinished[each].size))

    def _ignore(self, key: _Key) -> None:
        self._drop(key)
        self._ignored[key] = None
        if len(self._ignored) > self._most:
            del self._ignored[next(iter(self._ignored))]

    def _drop(self, key: _Key) -> None:
        self._remove(key)
        self.dropped += 1

    def _remove(self, key: _Key) -> _Unfinished | None:
        unfinished = self._unfinished.pop(key, None)
        if unfinished is not None:
            self.size -= unfinished.size
        return unfinished
