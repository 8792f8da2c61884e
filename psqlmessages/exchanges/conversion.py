"""Conversion between JSON values and CEL values.

The CEL package truncates texts at a NUL and fails on lone surrogates. Its ``plain_value`` releases
one reference to None too many for each null, which eventually crashes Python 3.11. This module
therefore checks and converts every value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.exchanges.cost import VALUE_UNITS
from psqlmessages.exchanges.expression import Look
from psqlmessages.exchanges.model import SelectorFailed

if TYPE_CHECKING:
    from cel_expr_python.cel import Value as CelValue

MAX_NESTING: Final = 100
MAX_REASON: Final = 300
_MAX_INT: Final = 2**64 - 1
_MIN_INT: Final = -(2**63)
_STATUS: Final = re.compile(r"[A-Z_]+: ")
_MISSING_KEY: Final = re.compile(r'Key not found in map : "?(.*?)"?', re.DOTALL)


class CelEncoder:
    """Converts the fields that a look includes, and counts their units."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.units = 0

    def part(self, value: Any, look: Mapping[str, Look]) -> Any:
        """Return only the fields that a look includes; for a value without fields, an empty one."""
        self._charge(VALUE_UNITS)
        if not isinstance(value, dict):
            return self.whole(_emptied(value), 0)
        seen = {}
        for key, below in look.items():
            if key in value:
                inner = value[key]
                seen[key] = self.whole(inner, 0) if below is None else self.part(inner, below)
        return seen

    def whole(self, value: Any, level: int) -> Any:
        """Copy a value; raise SelectorFailed if CEL cannot represent it."""
        convert = _INTO.get(type(value))
        if convert is not None:
            return convert(self, value, level)
        for kind, convert in _INTO.items():
            if isinstance(value, kind):
                return convert(self, kind(value), level)
        raise SelectorFailed(f"a value of type {type(value).__name__} is not JSON")

    def _charge(self, units: int) -> None:
        self.units += units
        if self.units > self._allowed:
            raise SelectorFailed(
                f"limit: the expression may read {self._allowed:,} units of a message,"
                " and this message has more"
            )

    def _small(self, value: Any, _: int) -> Any:
        self._charge(VALUE_UNITS)
        return value

    def _int(self, value: int, _: int) -> int:
        self._charge(VALUE_UNITS)
        if not _MIN_INT <= value <= _MAX_INT:
            raise SelectorFailed("an integer beyond 64 bits")
        return value

    def _text(self, value: str, _: int) -> str:
        if value.isascii():
            self._charge(VALUE_UNITS + len(value))
        else:
            self._charge(VALUE_UNITS + 4 * len(value))
            try:
                value.encode()
            except UnicodeEncodeError:
                raise SelectorFailed("a text with a lone surrogate") from None
        if "\0" in value:
            raise SelectorFailed("a text with a NUL character")
        return value

    def _bytes(self, value: bytes, _: int) -> bytearray:
        self._charge(VALUE_UNITS + len(value))
        return bytearray(value)

    def _list(self, value: list[Any], level: int) -> list[Any]:
        self._charge(VALUE_UNITS)
        _check_level(level)
        return [self.whole(item, level + 1) for item in value]

    def _dict(self, value: dict[Any, Any], level: int) -> dict[str, Any]:
        self._charge(VALUE_UNITS)
        _check_level(level)
        copy = {}
        for key, item in value.items():
            if type(key) is not str:
                raise SelectorFailed("a key that is not text")
            copy[self._text(key, level)] = self.whole(item, level + 1)
        return copy


def _emptied(value: Any) -> Any:
    return next((kind() for kind in _INTO if isinstance(value, kind)), value)


def _check_level(level: int) -> None:
    if level >= MAX_NESTING:
        raise SelectorFailed(f"limit: nested deeper than {MAX_NESTING} levels")


_INTO: Final[dict[type, Callable[[CelEncoder, Any, int], Any]]] = {
    str: CelEncoder._text,
    bool: CelEncoder._small,
    int: CelEncoder._int,
    float: CelEncoder._small,
    type(None): CelEncoder._small,
    dict: CelEncoder._dict,
    list: CelEncoder._list,
    tuple: CelEncoder._list,
    bytes: CelEncoder._bytes,
    bytearray: CelEncoder._bytes,
}


def answered(value: CelValue) -> Any:
    """Convert the result of an expression to a Python value.

    Timestamps become datetime, durations timedelta. Raise SelectorFailed for a CEL error.
    """
    kind, _, _ = value.type().name().partition("<")
    if kind == "NULL":
        return None  # without calling value(): see the module docstring
    if kind == "ERROR":
        raise SelectorFailed(reason(value.value()))
    if kind not in _ANSWERS:
        raise SelectorFailed(f"a result of type {kind} is not supported")
    return _ANSWERS[kind](value.value())


_ANSWERS: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(
        ("BOOL", "INT", "UINT", "DOUBLE", "STRING", "TIMESTAMP", "DURATION"), lambda value: value
    ),
    "TYPE": str,
    "BYTES": bytes,
    "LIST": lambda items: [answered(item) for item in items],
    "MAP": lambda items: {key: answered(item) for key, item in items.items()},
}


def reason(text: str) -> str:
    """Shorten an error message of the CEL package to its useful part."""
    text = _STATUS.sub("", text, count=1)
    if missing := _MISSING_KEY.fullmatch(text):
        text = f"no such key: {missing[1]}"
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"
