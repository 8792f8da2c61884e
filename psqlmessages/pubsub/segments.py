"""Segments: how a payload travels in notifications, to the byte. Pure functions.

!text      a string of characters from space to ~, whole
@json      a JSON value likewise
#base64    a part of a longer or other message, more follow
$base64    the last part, or the only one
(empty)    a signal without payload
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, Final

from psqlmessages import wire
from psqlmessages.wire import Body, MalformedPayload

SEGMENT_BYTES: Final = 7_999
CHANNEL_BYTES: Final = 63
STRING, JSON, PART, LAST = "!", "@", "#", "$"

_LONGEST: Final = SEGMENT_BYTES - 1
# Each further part is a byte shorter, so there can only be so many: about 24 MB of UTF-8.
_MOST_CHARACTERS: Final = _LONGEST * (_LONGEST + 1) // 2
# By how much the first part is shortened where messages of one transaction are too much alike.
_SHORTENINGS: Final = (0, *(2**power for power in range(13)))

IsTaken = Callable[[str], bool]


def channel_name(name: str) -> str:
    """Check the name of a channel; raise TypeError or ValueError where it cannot be one."""
    if not isinstance(name, str):
        raise TypeError(f"a channel is a str, not {type(name).__name__}")
    if not name:
        raise ValueError("a channel needs a name")
    for character, what in (("\0", "a NUL character"), ('"', "a double quote")):
        if character in name:
            raise ValueError(f"a channel's name cannot hold {what}: {name!r:.100}")
    size = len(_utf8(name, "channel's name"))
    if size > CHANNEL_BYTES:
        raise ValueError(
            f"a channel's name has at most {CHANNEL_BYTES} bytes, not {size}: {name!r:.100}"
        )
    return name


def flagged(payload: Any) -> str:
    """Write a payload as flagged text; raise TypeError or ValueError where it cannot be sent."""
    if payload is None:
        return ""
    if isinstance(payload, str):
        _utf8(payload, "payload")
        return STRING + payload
    if not isinstance(payload, bytes | bytearray | memoryview):
        try:
            return JSON + Body.of(payload).text
        except TypeError as error:
            reason = f": {error.__cause__ or error.__context__}"
    else:
        reason = ""
    raise TypeError(
        f"a payload of type {type(payload).__name__} cannot be sent{reason}"
        " (a payload is None, str, or what JSON can hold)"
    ) from None


def payload_of(text: str) -> Any:
    """Read flagged text; the reverse of :func:`flagged`. Raise MalformedPayload otherwise."""
    if not text:
        return None
    if text[0] == STRING:
        return text[1:]
    if text[0] == JSON:
        return wire.decode(text[1:], wire.JSON)
    raise MalformedPayload(f"a segment that begins with {text[0]!r}")


def encoded(text: str) -> str:
    """Encode flagged text as base64, unless it can travel whole as it is: then return ""."""
    if len(text) <= SEGMENT_BYTES and text.isascii() and text.isprintable():
        return ""
    return base64.b64encode(text.encode()).decode("ascii")


def decoded(characters: str) -> str:
    """Decode the joined base64 of a message; raise MalformedPayload where it is not such."""
    try:
        text = base64.b64decode(characters, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise MalformedPayload(f"not base64 of UTF-8: {error}") from None
    if text[:1] not in (STRING, JSON):
        raise MalformedPayload("base64 of a text without a flag")
    return text


def cut(characters: str, is_taken: IsTaken | None = None) -> list[str]:
    """Cut base64 into segments, no two of them equal and none of them taken.

    ``is_taken`` tells whether the transaction has sent a segment before: PostgreSQL delivers equal
    ones once. Raise ValueError where no such cut is found, or the message is too long for any.
    """
    if len(characters) > _MOST_CHARACTERS:
        raise ValueError(
            f"a message has at most {_MOST_CHARACTERS * 3 // 4} bytes,"
            f" not {len(characters) * 3 // 4}"
        )
    for shortening in _SHORTENINGS:
        segments = _cut(characters, _LONGEST - shortening, is_taken or _nothing)
        if segments:
            return segments
    raise ValueError(
        "this transaction holds too many messages like this one to tell their segments apart:"
        " publish it in another transaction"
    )


def _nothing(_: str) -> bool:
    return False


def _cut(characters: str, size: int, is_taken: IsTaken) -> list[str]:
    """Cut into parts of ``size`` characters and less; an empty list where that cannot be."""
    segments, position = [], 0
    while len(characters) - position > size:
        part = _longest_part(characters, position, size, is_taken)
        if not part:
            return []
        segments.append(part)
        position += len(part) - 1
        # A byte less each: so parts differ even in a long run of one character.
        size = len(part) - 2
    last = LAST + characters[position:]
    if not is_taken(last):
        return [*segments, last]
    begin = position - len(segments.pop()) + 1 if segments else 0
    ending = _another_ending(characters, begin, position or len(characters), is_taken)
    return [*segments, *ending] if ending else []


def _longest_part(characters: str, position: int, size: int, is_taken: IsTaken) -> str:
    for length in range(size, 0, -1):
        part = PART + characters[position : position + length]
        if not is_taken(part):
            return part
    return ""


def _another_ending(characters: str, begin: int, end: int, is_taken: IsTaken) -> list[str]:
    """Cut what begins at ``begin`` in two, before ``end``; an empty list where that cannot be."""
    for middle in range(end - 1, begin, -1):
        part, last = PART + characters[begin:middle], LAST + characters[middle:]
        if len(last) > SEGMENT_BYTES:
            break
        if not (is_taken(part) or is_taken(last)):
            return [part, last]
    return []


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the {what} has a lone surrogate at position {error.start}, which UTF-8 cannot hold"
        ) from None
