"""The registry of selectors in code: functions by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.exchanges.errors import SelectorError

if TYPE_CHECKING:
    from psqlmessages.exchanges.environment import Env

Function = Callable[["Env"], bool | Mapping[str, Any] | None]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_functions: Final[dict[str, Function]] = {}


def selector(name: str) -> Callable[[Function], Function]:
    """Register a function as a selector, which definitions choose as ``@name``.

    It takes an Env and answers true, false or a map, as an expression does; it may change
    ``env.msg`` and ``env.state`` in place. What it raises counts as no. Raise ValueError for a name
    that is malformed or taken.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.120} is no name of a selector: letters, digits, _ . -")

    def register(function: Function) -> Function:
        known = _functions.get(name)
        if known is not None and not _is_again(known, function):
            raise ValueError(f"a selector {name} is registered already: {known!r}")
        _functions[name] = function
        return function

    return register


def function_of(name: str) -> Function:
    """Return the function of a name; raise SelectorError where none is registered."""
    try:
        return _functions[name]
    except KeyError:
        raise SelectorError(
            f"no selector in code is called {name:.100}: is the module imported that has it?"
        ) from None


def names() -> tuple[str, ...]:
    """Return the names of all selectors in code, sorted."""
    return tuple(sorted(_functions))


def _is_again(known: Function, function: Function) -> bool:
    """Tell whether a module registers what it registered before, as it is reloaded."""
    keys = ("__module__", "__qualname__")
    return all(getattr(known, key, None) == getattr(function, key, "") for key in keys)
