"""Compiling: from the text of an expression to what can be evaluated, within bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from psqlmessages.exchanges import bounds, syntax
from psqlmessages.exchanges.conversion import reason
from psqlmessages.exchanges.errors import SelectorError, SelectorsUnavailable
from psqlmessages.exchanges.looks import Look, look_of
from psqlmessages.exchanges.looks import union as union_of_looks
from psqlmessages.exchanges.memory import Memory

if TYPE_CHECKING:
    from cel_expr_python.cel import Env as CelEnv
    from cel_expr_python.cel import Expression

    from psqlmessages.exchanges.answers import Answer

MAX_CHARACTERS: Final = 1000

_PLACE: Final = re.compile(r"ERROR: <input>:(?P<line>-?\d+):(?P<column>-?\d+): (?P<text>.*)")
_PATTERN_PROBE: Final = '"".matches(state.pattern)'


@dataclass(frozen=True, eq=False)
class Window:
    """What is converted together: the parts looked at, and how many units these may have."""

    look: Mapping[str, Look]
    units: int

    def __or__(self, other: Window) -> Window:
        """Return a window that shows what both show, to the stricter of the two."""
        return Window(union_of_looks((self.look, other.look)), min(self.units, other.units))


@dataclass(frozen=True, eq=False)
class Compiled:
    """An expression that can be evaluated.

    ``memory`` is there where it gives true, false or an error, and sees but a few headers.
    """

    expression: Expression
    window: Window
    is_bool: bool
    memory: Memory[Answer] | None


@cache
def environment() -> CelEnv:
    """Return the environment of all expressions; raise SelectorsUnavailable without the package."""
    try:
        from cel_expr_python import cel
    except ImportError as error:
        raise SelectorsUnavailable(
            f"expressions need the package cel-expr-python: {error}"
        ) from None
    values = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    return cel.NewEnv(variables={"msg": values, "state": values, "now": cel.Type.TIMESTAMP})


@lru_cache(maxsize=1024)
def compiled(text: str) -> Compiled:
    """Compile an expression; raise SelectorError where it is wrong or may exceed its bounds."""
    if len(text) > MAX_CHARACTERS:
        raise SelectorError(
            f"an expression has at most {MAX_CHARACTERS:,} characters, this one {len(text):,}"
        )
    expression = _expression(text)
    tree = syntax.read(expression.serialize())
    window = Window(look_of(tree), bounds.units_allowed(tree))
    for part in tree:
        if part.value == "matches" and part.kind == "call":
            _check_pattern(part.parts[1].literal or "")
    is_bool = expression.return_type().name() == "BOOL"
    return Compiled(expression, window, is_bool, Memory.of(window.look) if is_bool else None)


def _expression(text: str) -> Expression:
    try:
        text.encode()
        return environment().compile(text)
    except UnicodeEncodeError:
        raise SelectorError("the expression has a lone surrogate") from None
    except RuntimeError as error:  # all that the package raises
        raise SelectorError(_with_place(str(error))) from None


def _check_pattern(pattern: str) -> None:
    """Refuse what RE2 refuses: at run time each evaluation would fail."""
    activation = environment().Activation({"state": {"pattern": pattern}})
    value = _expression(_PATTERN_PROBE).eval(activation)
    if value.type().name() == "ERROR":
        raise SelectorError(reason(value.value()))


def _with_place(text: str) -> str:
    """Say the first error of the package's list, with its place."""
    found = _PLACE.search(text)
    if found is None:
        return reason(text)
    said = reason(found["text"].removesuffix(" [INVALID_ARGUMENT]")).replace(
        " (in container '')", ""
    )
    if found["line"].startswith("-"):
        return said
    return f"line {found['line']}, character {found['column']}: {said}"
