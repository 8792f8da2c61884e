"""Compiler of expressions, with a check of their cost, and the cache of their results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from psqlmessages.exchanges.conversion import shorten_error
from psqlmessages.exchanges.cost import find_max_units
from psqlmessages.exchanges.expression import FieldTree, find_fields, merge_fields, parse_expression
from psqlmessages.exchanges.model import SelectorError, SelectorsUnavailable

if TYPE_CHECKING:
    from cel_expr_python.cel import Env as CelEnv
    from cel_expr_python.cel import Expression

    from psqlmessages.exchanges.result import SelectorResult


# Limits of a DecisionCache.
MAX_CACHED_HEADERS: Final = 4
_MAX_VALUE_CHARACTERS: Final = 100
_MAX_ENTRIES: Final = 256

Key = tuple[str, ...]
T = TypeVar("T")


class DecisionCache(Generic[T]):
    """Caches results that depend on the values of ``headers`` and on nothing else.

    A result is cached only if all these values are short texts. Other types cannot be keys, because
    1, 1.0 and True are the same key of a dictionary.
    """

    def __init__(self, headers: tuple[str, ...]) -> None:
        self.headers = headers
        self._entries: dict[Key, T] = {}

    @classmethod
    def of(cls, tree: Mapping[str, FieldTree]) -> DecisionCache[T] | None:
        """Return a cache if the expression reads only complete values of few headers, or None."""
        msg = tree.get("msg")
        if tree.keys() != {"msg"} or msg is None or msg.keys() != {"headers"}:
            return None
        headers = msg["headers"]
        if not headers or len(headers) > MAX_CACHED_HEADERS:
            return None
        reads_whole_headers = all(subtree is None for subtree in headers.values())
        return cls(tuple(headers)) if reads_whole_headers else None

    def key_of(self, headers: Mapping[str, Any]) -> Key | None:
        """Return the cache key for headers; None if a value is missing, not text or too long."""
        values = []
        for name in self.headers:
            value = headers.get(name)
            if type(value) is not str or len(value) > _MAX_VALUE_CHARACTERS:
                return None
            values.append(value)
        return tuple(values)

    def get(self, key: Key) -> T | None:
        """Return the cached result, or None."""
        return self._entries.get(key)

    def put(self, key: Key, result: T) -> None:
        """Store a result; clear the cache first if it is full."""
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.clear()
        self._entries[key] = result


MAX_CHARACTERS: Final = 1000

_LOCATION: Final = re.compile(r"ERROR: <input>:(?P<line>-?\d+):(?P<column>-?\d+): (?P<text>.*)")
# Evaluating this expression makes RE2 compile the text in `state.pattern`.
_PATTERN_PROBE: Final = '"".matches(state.pattern)'


@dataclass(frozen=True, eq=False)
class InputFields:
    """The fields that expressions read, and the limit for their total size (see cost.py)."""

    tree: Mapping[str, FieldTree]
    max_units: int

    def __or__(self, other: InputFields) -> InputFields:
        """Return the fields of both, with the lower maximum size."""
        max_units = min(self.max_units, other.max_units)
        return InputFields(merge_fields(self.tree, other.tree), max_units)


@dataclass(frozen=True, eq=False)
class CompiledExpression:
    """A compiled expression. It has a cache if it returns a bool and only reads a few headers."""

    expression: Expression
    fields: InputFields
    is_bool: bool
    cache: DecisionCache[SelectorResult] | None


@cache
def get_environment() -> CelEnv:
    """Return the CEL environment; raise SelectorsUnavailable if its package cannot be imported."""
    try:
        from cel_expr_python import cel
    except ImportError as error:
        raise SelectorsUnavailable(
            f"expressions need the package cel-expr-python: {error}"
        ) from None
    values = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    return cel.NewEnv(variables={"msg": values, "state": values, "now": cel.Type.TIMESTAMP})


@lru_cache(maxsize=1024)
def compile_expression(text: str) -> CompiledExpression:
    """Compile an expression; raise SelectorError if it is invalid or too expensive."""
    if len(text) > MAX_CHARACTERS:
        raise SelectorError(
            f"an expression has at most {MAX_CHARACTERS:,} characters, this one has {len(text):,}"
        )
    expression = _compile(text)
    tree = parse_expression(expression.serialize())
    fields = InputFields(find_fields(tree), find_max_units(tree))
    for part in tree:
        if part.value == "matches" and part.kind == "call":
            _check_pattern(part.parts[1].literal or "")
    is_bool = expression.return_type().name() == "BOOL"
    return CompiledExpression(
        expression, fields, is_bool, cache=DecisionCache.of(fields.tree) if is_bool else None
    )


def _compile(text: str) -> Expression:
    try:
        text.encode()
        return get_environment().compile(text)
    except UnicodeEncodeError:
        raise SelectorError("the expression has a lone surrogate") from None
    except RuntimeError as error:  # the only exception of the package
        raise SelectorError(_describe_error(str(error))) from None


def _check_pattern(pattern: str) -> None:
    """Raise SelectorError if RE2 rejects a pattern, because every evaluation would fail."""
    activation = get_environment().Activation({"state": {"pattern": pattern}})
    value = _compile(_PATTERN_PROBE).eval(activation)
    if value.type().name() == "ERROR":
        raise SelectorError(shorten_error(value.value()))


def _describe_error(text: str) -> str:
    """Return the first error in a text of the CEL package, with its position if it has one."""
    match = _LOCATION.search(text)
    if match is None:
        return shorten_error(text)
    message = shorten_error(match["text"].removesuffix(" [INVALID_ARGUMENT]"))
    message = message.replace(" (in container '')", "")
    if match["line"].startswith("-"):
        return message
    return f"line {match['line']}, character {match['column']}: {message}"
