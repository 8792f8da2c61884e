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
from psqlmessages.exchanges.expression import FieldTree
from psqlmessages.exchanges.model import SelectorFailed
from psqlmessages.wire import describe_unstorable

if TYPE_CHECKING:
    from cel_expr_python.cel import Value as CelValue

MAX_NESTING: Final = 100
MAX_ERROR_CHARACTERS: Final = 300
_MAX_INT: Final = 2**64 - 1
_MIN_INT: Final = -(2**63)
# The code before an error message, such as "INVALID_ARGUMENT: ".
_ERROR_CODE: Final = re.compile(r"[A-Z_]+: ")
_MISSING_KEY: Final = re.compile(r'Key not found in map : "?(.*?)"?', re.DOTALL)


class CelEncoder:
    """Converts the fields that expressions read, up to ``max_units`` in total (see cost.py)."""

    def __init__(self, max_units: int) -> None:
        self._max_units = max_units
        self._units = 0

    def convert_fields(self, value: Any, tree: Mapping[str, FieldTree] | None) -> Any:
        """Convert those fields of a value that ``tree`` names; raise errors as `convert` does."""
        if tree is None:
            return self.convert(value)
        self._charge(VALUE_UNITS)
        if not isinstance(value, dict):
            # Only a map has fields. An expression that reads a field of another value fails. Its
            # error names only the type of the value, so pass an empty value of that type.
            empty = (type_() for type_ in _ENCODERS if isinstance(value, type_))
            return self.convert(next(empty, value))
        return {
            key: self.convert_fields(value[key], subtree)
            for key, subtree in tree.items()
            if key in value
        }

    def convert(self, value: Any, level: int = 0) -> Any:
        """Convert a value; raise SelectorFailed if it is too large or CEL cannot represent it."""
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            return encode(self, value, level)
        for base, encode in _ENCODERS.items():  # the value may be of a subclass
            if isinstance(value, base):
                return encode(self, base(value), level)
        raise SelectorFailed(f"a value of type {type(value).__name__} is not JSON")

    def _charge(self, units: int) -> None:
        self._units += units
        if self._units > self._max_units:
            raise SelectorFailed(
                f"limit: the expression may read {self._max_units:,} units of an element,"
                " and this element has more"
            )

    def _scalar(self, value: Any, _: int) -> Any:
        self._charge(VALUE_UNITS)
        return value

    def _int(self, value: int, _: int) -> int:
        self._charge(VALUE_UNITS)
        if not _MIN_INT <= value <= _MAX_INT:
            raise SelectorFailed("the input contains an integer beyond 64 bits")
        return value

    def _text(self, value: str, _: int) -> str:
        self._charge(VALUE_UNITS + (1 if value.isascii() else 4) * len(value))
        if character := describe_unstorable(value):
            raise SelectorFailed(f"the input contains a text with {character}")
        return value

    def _bytes(self, value: bytes, _: int) -> bytearray:
        self._charge(VALUE_UNITS + len(value))
        return bytearray(value)

    def _list(self, value: list[Any], level: int) -> list[Any]:
        self._charge(VALUE_UNITS)
        _check_level(level)
        return [self.convert(item, level + 1) for item in value]

    def _dict(self, value: dict[Any, Any], level: int) -> dict[str, Any]:
        self._charge(VALUE_UNITS)
        _check_level(level)
        copy = {}
        for key, item in value.items():
            if type(key) is not str:
                raise SelectorFailed("the input contains a key that is not text")
            copy[self._text(key, level)] = self.convert(item, level + 1)
        return copy


def _check_level(level: int) -> None:
    if level >= MAX_NESTING:
        raise SelectorFailed(f"the input contains more than {MAX_NESTING} levels of nesting")


_ENCODERS: Final[dict[type, Callable[[CelEncoder, Any, int], Any]]] = {
    str: CelEncoder._text,
    bool: CelEncoder._scalar,
    int: CelEncoder._int,
    float: CelEncoder._scalar,
    type(None): CelEncoder._scalar,
    dict: CelEncoder._dict,
    list: CelEncoder._list,
    tuple: CelEncoder._list,
    bytes: CelEncoder._bytes,
    bytearray: CelEncoder._bytes,
}


def to_python(value: CelValue) -> Any:
    """Convert a result to Python; raise SelectorFailed for an error or an unsupported type."""
    kind, _, _ = value.type().name().partition("<")
    if kind == "NULL":
        return None  # value() would also release None once too often
    if kind == "ERROR":
        raise SelectorFailed(shorten_error(value.value()))
    if kind not in _DECODERS:
        raise SelectorFailed(f"a result of type {kind} is not supported")
    return _DECODERS[kind](value.value())


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(
        ("BOOL", "INT", "UINT", "DOUBLE", "STRING", "TIMESTAMP", "DURATION"), lambda value: value
    ),
    "TYPE": str,
    "BYTES": bytes,
    "LIST": lambda items: [to_python(item) for item in items],
    "MAP": lambda items: {key: to_python(item) for key, item in items.items()},
}


def shorten_error(text: str) -> str:
    """Return the useful part of an error message of the CEL package."""
    text = _ERROR_CODE.sub("", text, count=1)
    if missing := _MISSING_KEY.fullmatch(text):
        text = f"no such key: {missing[1]}"
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[: MAX_ERROR_CHARACTERS - 1]}…"
