"""Compiler: from the text of an expression to a bounded, cached selector."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from psqlmessages.exchanges import cost
from psqlmessages.exchanges import expression as expression_module
from psqlmessages.exchanges.conversion import reason
from psqlmessages.exchanges.expression import Look, look_of
from psqlmessages.exchanges.expression import union as union_of_looks
from psqlmessages.exchanges.model import SelectorError, SelectorsUnavailable

if TYPE_CHECKING:
    from cel_expr_python.cel import Env as CelEnv
    from cel_expr_python.cel import Expression

    from psqlmessages.exchanges.result import SelectorResult


# Decision cache: results by header values, because the same values recur.

MAX_NAMES: Final = 4
MAX_KEPT: Final = 256
MAX_CACHED_CHARACTERS: Final = 100

Key = tuple[str, ...]
T = TypeVar("T")


class DecisionCache(Generic[T]):
    """Caches results by the values of the headers that were read.

    Equal values give the same result. Only texts are cached, because 1, 1.0 and true are the same
    dictionary key.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._kept: dict[Key, T] = {}

    @classmethod
    def of(cls, look: Mapping[str, Look]) -> DecisionCache[T] | None:
        """Return a cache for a look; None unless it includes only a few whole headers."""
        msg = look.get("msg")
        if look.keys() != {"msg"} or msg is None or msg.keys() != {"headers"}:
            return None
        headers = msg["headers"]
        if (
            not headers
            or len(headers) > MAX_NAMES
            or any(headers[name] is not None for name in headers)
        ):
            return None
        return cls(tuple(headers))

    def key(self, headers: Mapping[str, Any]) -> Key | None:
        """Return the cache key of a message; None if it cannot be cached."""
        values = []
        for name in self.names:
            value = headers.get(name)
            if type(value) is not str or len(value) > MAX_CACHED_CHARACTERS:
                return None
            values.append(value)
        return tuple(values)

    def answer(self, key: Key) -> T | None:
        """Return the cached result, or None."""
        return self._kept.get(key)

    def keep(self, key: Key, answer: T) -> None:
        """Store a result; clear the cache first if it is full."""
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[key] = answer


MAX_CHARACTERS: Final = 1000

_PLACE: Final = re.compile(r"ERROR: <input>:(?P<line>-?\d+):(?P<column>-?\d+): (?P<text>.*)")
_PATTERN_PROBE: Final = '"".matches(state.pattern)'


@dataclass(frozen=True, eq=False)
class VisibleFields:
    """Fields that are converted together, and the maximum of their units."""

    look: Mapping[str, Look]
    units: int

    def __or__(self, other: VisibleFields) -> VisibleFields:
        """Return a window with the fields of both, and the lower of the two limits."""
        return VisibleFields(union_of_looks((self.look, other.look)), min(self.units, other.units))


@dataclass(frozen=True, eq=False)
class CompiledSelector:
    """A compiled expression.

    ``memory`` is set only if the expression returns a bool and reads only a few headers.
    """

    expression: Expression
    window: VisibleFields
    is_bool: bool
    memory: DecisionCache[SelectorResult] | None


@cache
def environment() -> CelEnv:
    """Return the CEL environment; raise SelectorsUnavailable if the package is not installed."""
    try:
        from cel_expr_python import cel
    except ImportError as error:
        raise SelectorsUnavailable(
            f"expressions need the package cel-expr-python: {error}"
        ) from None
    values = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    return cel.NewEnv(variables={"msg": values, "state": values, "now": cel.Type.TIMESTAMP})


@lru_cache(maxsize=1024)
def compiled(text: str) -> CompiledSelector:
    """Compile an expression; raise SelectorError if it is invalid or may exceed its bounds."""
    if len(text) > MAX_CHARACTERS:
        raise SelectorError(
            f"an expression has at most {MAX_CHARACTERS:,} characters, this one has {len(text):,}"
        )
    checked_expression = _expression(text)
    tree = expression_module.read(checked_expression.serialize())
    window = VisibleFields(look_of(tree), cost.units_allowed(tree))
    for part in tree:
        if part.value == "matches" and part.kind == "call":
            _check_pattern(part.parts[1].literal or "")
    is_bool = checked_expression.return_type().name() == "BOOL"
    return CompiledSelector(
        checked_expression, window, is_bool, DecisionCache.of(window.look) if is_bool else None
    )


def _expression(text: str) -> Expression:
    try:
        text.encode()
        return environment().compile(text)
    except UnicodeEncodeError:
        raise SelectorError("the expression has a lone surrogate") from None
    except RuntimeError as error:  # the only exception of the package
        raise SelectorError(_with_place(str(error))) from None


def _check_pattern(pattern: str) -> None:
    """Reject a pattern that RE2 rejects: otherwise every evaluation would fail."""
    activation = environment().Activation({"state": {"pattern": pattern}})
    value = _expression(_PATTERN_PROBE).eval(activation)
    if value.type().name() == "ERROR":
        raise SelectorError(reason(value.value()))


def _with_place(text: str) -> str:
    """Return the first error of the package's list, with its position."""
    found = _PLACE.search(text)
    if found is None:
        return reason(text)
    said = reason(found["text"].removesuffix(" [INVALID_ARGUMENT]")).replace(
        " (in container '')", ""
    )
    if found["line"].startswith("-"):
        return said
    return f"line {found['line']}, character {found['column']}: {said}"
