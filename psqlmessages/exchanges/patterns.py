"""Patterns: how large RE2's program for a regular expression may become, from above."""

from __future__ import annotations

import re
from typing import Final

from psqlmessages.exchanges.errors import SelectorError

MAX_PROGRAM: Final = 10_000

# Instructions of RE2, measured: \pL takes 1,200; a range beyond ASCII up to 9 in each direction.
_ANY: Final = 12
_CLASS: Final = 15
_CLASS_ITEM: Final = 12
_UNICODE_PROPERTY: Final = 1300
_FOLDED: Final = 8

_PIECE: Final = re.compile(
    r"""(?P<property>\\[pP](?:\{[^}]*\}|.))
    |   (?P<quote>\\Q)
    |   (?P<escape>\\(?:x\{[^}]*\}|.))
    |   (?P<class>\[\^?\]?(?:\[:\^?[a-z]*:\]|\\.|[^\]\\])*\])
    |   (?P<times>\{(?P<least>\d+)(?:,(?P<most>\d*))?\})
    |   (?P<flags>\(\?[a-zA-Z-]*\))
    |   (?P<open>\((?:\?(?:P?<\w*>|[a-zA-Z-]*:))?)
    |   (?P<close>\))
    |   (?P<repeat>[*+?])
    |   (?P<any>\.)
    |   (?P<character>.)""",
    re.VERBOSE | re.DOTALL,
)


def program_size(pattern: str) -> int:
    """Return a bound of the instructions that RE2 makes of a pattern.

    Of a pattern that RE2 refuses, any number. Raise SelectorError where it is above MAX_PROGRAM.
    """
    is_folded = re.search(r"\(\?[a-zA-Z]*i", pattern) is not None
    finished, lasts = [8], [0]  # per open group: what is complete, and what may yet be repeated
    for piece in _PIECE.finditer(pattern):
        match piece.lastgroup:
            case "quote":
                raise SelectorError(r"a pattern must not quote with \Q: escape each character")
            case "flags":
                finished[-1] += 2  # what stands before them may still be repeated
            case "open":
                finished.append(2)
                lasts.append(0)
            case "close" if len(lasts) > 1:
                group = finished.pop() + lasts.pop()
                finished[-1] += lasts[-1]
                lasts[-1] = group
            case "repeat":
                lasts[-1] += 2
            case "times":
                lasts[-1] = (lasts[-1] + 2) * _times(piece)
            case _:
                finished[-1] += lasts[-1]
                lasts[-1] = _atom(piece, is_folded=is_folded)
        if sum(finished) + sum(lasts) > MAX_PROGRAM:
            raise SelectorError("a pattern is too large: repeat less, or fewer classes")
    return sum(finished) + sum(lasts)


def _times(piece: re.Match[str]) -> int:
    return max(int(piece["least"]) + 1, int(piece["most"] or 0), 1)


def _atom(piece: re.Match[str], *, is_folded: bool) -> int:
    text = piece[0]
    folded = _FOLDED if is_folded else 1
    if piece.lastgroup == "property":
        return _UNICODE_PROPERTY
    if piece.lastgroup == "any":
        return _ANY
    if piece.lastgroup == "class":
        return _class(text, folded)
    if piece.lastgroup == "escape":
        return _CLASS * folded
    return len(text.encode()) * folded


def _class(text: str, folded: int) -> int:
    inner = text[1:-1]
    if inner.isascii() and not inner.startswith("^") and not set("\\:") & set(inner):
        return (2 + 2 * len(inner)) * folded
    properties = len(re.findall(r"\\[pP]", inner))
    characters = sum(2 if character.isascii() else _CLASS_ITEM for character in inner)
    return _CLASS + characters * folded + _UNICODE_PROPERTY * properties
