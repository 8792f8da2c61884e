"""Segments: the format of messages in notifications, in one or several segments. No I/O.

!text      a string of characters from space to ~, in one segment
@json      a JSON value of such characters, in one segment
#base64    a part of any other message; more parts follow
$base64    the last or only part: the parts together are base64 of !text or @json in UTF-8
(empty)    a signal without payload
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from psqlmessages import wire
from psqlmessages.wire import EncodedBody, MalformedPayload

SEGMENT_BYTES: Final = 7_999
CHANNEL_BYTES: Final = 63
STRING, JSON, PART, LAST = "!", "@", "#", "$"

_MAX_PART_CHARACTERS: Final = SEGMENT_BYTES - 1
# Each part is a byte shorter than the previous one, which limits a message to 24 MB of UTF-8.
_MAX_CHARACTERS: Final = _MAX_PART_CHARACTERS * (_MAX_PART_CHARACTERS + 1) // 2
# Shorten the first part by these numbers in turn, until no segment equals one already sent.
_SHORTENINGS: Final = (0, *(2**power for power in range(13)))

IsSent = Callable[[str], bool]


def check_channel_name(name: str) -> str:
    """Return the name of a channel; raise TypeError or ValueError if it is not valid."""
    if not isinstance(name, str):
        raise TypeError(f"a channel must be a str, not {type(name).__name__}")
    if not name:
        raise ValueError("the channel name is empty")
    for character, description in (("\0", "a NUL character"), ('"', "a double quote")):
        if character in name:
            raise ValueError(f"a channel name cannot contain {description}: {name!r:.100}")
    size = len(_encode_utf8(name, "channel name"))
    if size > CHANNEL_BYTES:
        raise ValueError(
            f"a channel name can have at most {CHANNEL_BYTES} bytes, not {size}: {name!r:.100}"
        )
    return name


def encode_payload(payload: Any) -> str:
    """Encode a payload as text with a type flag, None as ""; raise TypeError or ValueError."""
    if payload is None:
        return ""
    if isinstance(payload, str):
        _encode_utf8(payload, "payload")
        return STRING + payload
    reason = ""
    if not isinstance(payload, bytes | bytearray | memoryview):
        try:
            return JSON + EncodedBody.of(payload).text
        except TypeError as error:
            reason = f": {error.__cause__ or error.__context__}"
    raise TypeError(
        f"a payload of type {type(payload).__name__} cannot be sent{reason}"
        " (a payload must be None, str or a JSON value)"
    ) from None


def decode_payload(text: str) -> Any:
    """Decode text with a type flag; raise MalformedPayload if it is not valid."""
    if not text:
        return None
    if text[0] == STRING:
        return text[1:]
    if text[0] == JSON:
        return wire.decode(text[1:], wire.JSON)
    raise MalformedPayload(f"a segment starts with {text[0]!r}")


def encode_base64(text: str) -> str:
    """Encode text as base64; return "" if the text fits one segment without encoding."""
    if len(text) <= SEGMENT_BYTES and text.isascii() and text.isprintable():
        return ""
    return base64.b64encode(text.encode()).decode("ascii")


def decode_base64(encoded: str) -> str:
    """Decode the joined base64 of a message to text with a type flag; raise MalformedPayload."""
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise MalformedPayload(f"not base64 of UTF-8: {error}") from None
    if text[:1] not in (STRING, JSON):
        raise MalformedPayload("the decoded text has no type flag")
    return text


def cut(encoded: str, is_sent: IsSent = lambda _: False) -> list[str]:
    """Cut base64 into segments that differ from each other and from those already sent.

    PostgreSQL delivers equal notifications of a transaction once; ``is_sent`` returns whether the
    transaction has already sent a segment. Raises ValueError if the message is too long or no such
    cut is found.
    """
    if len(encoded) > _MAX_CHARACTERS:
        raise ValueError(
            f"a message can have at most {_MAX_CHARACTERS * 3 // 4} bytes,"
            f" not {len(encoded) * 3 // 4}"
        )
    for shortening in _SHORTENINGS:
        if segments := _cut_to_size(encoded, _MAX_PART_CHARACTERS - shortening, is_sent):
            return segments
    raise ValueError(
        "this transaction has too many similar messages to keep their segments different:"
        " publish this one in another transaction"
    )


def _cut_to_size(encoded: str, size: int, is_sent: IsSent) -> list[str]:
    """Cut into parts of at most ``size`` characters; return an empty list if that is impossible."""
    segments, position = [], 0
    while len(encoded) - position > size:
        parts = (PART + encoded[position : position + n] for n in range(size, 0, -1))
        part = next((part for part in parts if not is_sent(part)), "")
        if not part:
            return []
        segments.append(part)
        position += len(part) - 1
        # The next part is shorter, so parts differ even in a long run of one character.
        size = len(part) - 2
    last = LAST + encoded[position:]
    if not is_sent(last):
        return [*segments, last]
    # Cut the last segment again, together with the part before, if there is one.
    begin, end = 0, len(encoded)
    if segments:
        previous = segments.pop()
        begin, end = position - (len(previous) - 1), position
    ending = _cut_ending(encoded, begin, end, is_sent)
    return [*segments, *ending] if ending else []


def _cut_ending(encoded: str, begin: int, end: int, is_sent: IsSent) -> list[str]:
    """Cut ``encoded[begin:]`` in two, at a position before ``end``; return [] if impossible."""
    for middle in range(end - 1, begin, -1):
        part, last = PART + encoded[begin:middle], LAST + encoded[middle:]
        if len(last) > SEGMENT_BYTES:
            break
        if not (is_sent(part) or is_sent(last)):
            return [part, last]
    return []


def _encode_utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the {name} has a lone surrogate at position {error.start}, which UTF-8 cannot encode"
        ) from None


# Assembly of received segments

# Python's overhead of a string. It is added to the size, so that the limit of bytes also limits the
# number of short segments.
_OVERHEAD_BYTES: Final = 64

_Key = tuple[int, str]


@dataclass(slots=True)
class _UnfinishedMessage:
    parts: list[str] = field(default_factory=list)
    size: int = 0


class SegmentAssembler:
    """Joins the segments of messages: one message at a time per sender (process id) and channel.

    If there are more than ``max_messages`` unfinished messages, the oldest is dropped. If they have
    more than ``max_bytes`` in total, the largest is dropped. Later segments of a dropped message
    are ignored.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._unfinished: dict[_Key, _UnfinishedMessage] = {}
        # Dropped messages whose last segment has not arrived: a dictionary, used as an ordered set.
        self._ignored: dict[_Key, None] = {}
        # Senders that were missing at the last check.
        self._missing: set[int] = set()
        self.size = 0
        self.dropped = 0

    @property
    def senders(self) -> set[int]:
        """The process ids of senders whose last segment has not arrived yet."""
        return {process_id for process_id, _ in (*self._unfinished, *self._ignored)}

    def add(self, process_id: int, channel: str, segment: str) -> str | None:
        """Add a segment; return the message that it completes, or None. Raises MalformedPayload."""
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
        return decode_base64("".join([*parts, segment[1:]]))

    def drop_missing_senders(self, existing: Iterable[int]) -> None:
        """Drop the messages of senders that do not exist at two checks in a row.

        After the first check, segments that a sender sent before it ended may still arrive.
        """
        missing = self.senders.difference(existing)
        missing_twice = missing & self._missing
        self._missing = missing - missing_twice
        for key in [key for key in self._unfinished if key[0] in missing_twice]:
            self._drop(key)
        self._ignored = {key: None for key in self._ignored if key[0] not in missing_twice}

    def forget(self, channel: str) -> None:
        """Drop a channel's messages without counting them: the channel was unsubscribed."""
        for key in [key for key in self._unfinished if key[1] == channel]:
            self._remove(key)
        self._ignored = {key: None for key in self._ignored if key[1] != channel}

    def clear(self) -> None:
        """Drop all messages: their missing segments were sent to a connection that is lost."""
        for key in list(self._unfinished):
            self._drop(key)
        self._ignored.clear()
        self._missing.clear()

    def _extend(self, key: _Key, segment: str) -> None:
        unfinished = self._unfinished.setdefault(key, _UnfinishedMessage())
        size = len(segment) + _OVERHEAD_BYTES
        unfinished.parts.append(segment[1:])
        unfinished.size += size
        self.size += size
        if len(self._unfinished) > self._max_messages:
            self._drop_and_ignore(next(iter(self._unfinished)))
        if self.size > self._max_bytes:
            self._drop_and_ignore(max(self._unfinished, key=lambda key: self._unfinished[key].size))

    def _drop_and_ignore(self, key: _Key) -> None:
        self._drop(key)
        self._ignored[key] = None
        if len(self._ignored) > self._max_messages:
            del self._ignored[next(iter(self._ignored))]

    def _drop(self, key: _Key) -> None:
        self._remove(key)
        self.dropped += 1

    def _remove(self, key: _Key) -> _UnfinishedMessage | None:
        unfinished = self._unfinished.pop(key, None)
        if unfinished is not None:
            self.size -= unfinished.size
        return unfinished


# Segments that a transaction has sent


class SegmentDeduplicator:
    """Cuts the messages of a transaction into segments that differ from each other.

    PostgreSQL delivers equal notifications of a transaction once. So if two messages had an equal
    part, one message would lack this part. Stores only hashes of segments: a collision of hashes
    only leads to another cut.
    """

    def __init__(self) -> None:
        self._began_at = ""
        # Hashes of the segments that the transaction has sent for messages of several segments.
        self._parts: set[int] = set()
        # Hashes of the segments that the transaction has sent for messages of a single segment.
        self._singles: set[int] = set()

    def cut(self, began_at: str, channel: str, encoded: str) -> list[str]:
        """Cut a message's base64 for the transaction that began at this time."""
        if began_at != self._began_at:
            self._began_at = began_at
            self._parts.clear()
            self._singles.clear()

        def is_sent(segment: str) -> bool:
            key = hash((channel, segment))
            if key in self._parts:
                return True
            # Equal messages of a single segment may be delivered once: do not cut them differently.
            is_single = segment[0] == LAST and len(segment) == len(encoded) + 1
            return key in self._singles and not is_single

        segments = cut(encoded, is_sent)
        hashes = self._singles if len(segments) == 1 else self._parts
        hashes.update(hash((channel, segment)) for segment in segments)
        return segments
