"""Transaction: which segments the transaction under way has sent. No I/O."""

from __future__ import annotations

from psqlmessages.pubsub.segments import LAST, cut


class Transaction:
    """Keeps the segments of one transaction apart, which PostgreSQL delivers once if equal.

    Of two messages that begin or end alike one would otherwise lack a part. Only hashes are kept:
    a segment wrongly held for taken is merely cut elsewhere.
    """

    def __init__(self) -> None:
        self._began_at = ""
        self._parts: set[int] = set()
        self._whole: set[int] = set()

    def cut(self, began_at: str, channel: str, characters: str) -> list[str]:
        """Cut a message's base64 for the transaction that began at this time."""
        if began_at != self._began_at:
            self._began_at = began_at
            self._parts.clear()
            self._whole.clear()

        def is_taken(segment: str) -> bool:
            key = hash((channel, segment))
            # Two equal messages of one segment may well collapse into one.
            is_one = segment[0] == LAST and len(segment) == len(characters) + 1
            return key in self._parts or (not is_one and key in self._whole)

        segments = cut(characters, is_taken)
        sent = self._whole if len(segments) == 1 else self._parts
        sent.update(hash((channel, segment)) for segment in segments)
        return segments
