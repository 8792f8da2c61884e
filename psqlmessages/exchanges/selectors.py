"""Selectors: expressions, and functions registered in code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.exchanges.compiler import VisibleFields, compiled, environment
from psqlmessages.exchanges.conversion import CelEncoder, answered, reason
from psqlmessages.exchanges.expression import needs_body
from psqlmessages.exchanges.model import UNCHANGED, SelectorError, SelectorFailed
from psqlmessages.exchanges.result import (
    NO,
    YES,
    SelectorResult,
    answer_of,
    is_same,
    plain_body,
    plain_headers,
)

if TYPE_CHECKING:
    from cel_expr_python.cel import Activation

    from psqlmessages.exchanges.model import SelectorInput


# The registry of selectors in code: functions by name.

Function = Callable[["SelectorContext"], bool | Mapping[str, Any] | None]

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


# The environment of one traversal: what selectors see, converted once as long as it stays.


@dataclass
class SelectorContext:
    """What a selector sees: ``msg``, ``state`` (a map that lives through one traversal), ``now``.

    A selector in code gets copies: what it changes in place counts once it has returned.
    """

    msg: SelectorInput
    state: dict[str, Any] = field(default_factory=dict)
    now: datetime | None = None


class ActivationCache:
    """Gives expressions what they see of an Env.

    Those of an exchange share one conversion, unless it would be too much for one of them or has
    something that CEL cannot hold: then each has its own, and only those fail that look there.
    """

    def __init__(self, env: SelectorContext, shared: VisibleFields | None = None) -> None:
        self.env = env
        self._shared = shared
        self._activations: dict[VisibleFields, Activation | SelectorFailed] = {}

    def forget(self) -> None:
        """Convert anew from here on, because something has changed."""
        self._activations.clear()

    def activation(self, window: VisibleFields) -> Activation:
        """Return what a window shows; raise SelectorFailed where it cannot."""
        if self._shared is not None:
            together = self._converted(self._shared)
            if not isinstance(together, SelectorFailed):
                return together
        alone = self._converted(window)
        if isinstance(alone, SelectorFailed):
            raise alone
        return alone

    def _converted(self, window: VisibleFields) -> Activation | SelectorFailed:
        known = self._activations.get(window)
        if known is None:
            try:
                known = self._convert(window)
            except SelectorFailed as failure:
                known = failure
            self._activations[window] = known
        return known

    def _convert(self, window: VisibleFields) -> Activation:
        env = self.env
        values = CelEncoder(window.units).part(
            {"msg": vars(env.msg), "state": env.state}, window.look
        )
        if "now" in window.look:
            if env.now is None:
                raise SelectorFailed("now is not given")
            values["now"] = env.now
        return environment().Activation(values)


__all__ = ["IN_CODE", "Selector", "SelectorError", "SelectorFailed", "selector"]

IN_CODE: Final = "@"


class Selector:
    """A CEL expression, or ``@`` and the name of a function that ``@selector`` registered.

    Raise SelectorError for one that cannot be compiled, is unknown, or may exceed its bounds;
    SelectorsUnavailable where the package for expressions is not installed.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._function: Function | None = None
        if text.startswith(IN_CODE):
            self._function = function_of(text.removeprefix(IN_CODE))
            self.window: VisibleFields | None = None
            return
        self._compiled = compiled(text)
        self.window = self._compiled.window

    @classmethod
    def of(cls, text: str) -> Selector | None:
        """Make the selector of a destination as it is stored; None for empty text: always."""
        return cls(text) if text else None

    @property
    def needs_body(self) -> bool:
        """Whether it looks at the body; of a function in code nobody knows."""
        return self.window is None or needs_body(self.window.look)

    @property
    def headers_seen(self) -> tuple[str, ...] | None:
        """The few headers that a yes or no hangs on; None where it sees or answers more."""
        memory = self._compiled.memory if self._function is None else None
        return None if memory is None else memory.names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selector) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"

    def __reduce__(self) -> tuple[type[Selector], tuple[str]]:
        return Selector, (self.text,)

    def answer(self, view: ActivationCache) -> SelectorResult:
        """Ask it. Raise SelectorFailed where it fails or answers what has no meaning."""
        if self._function is not None:
            return _called(self._function, view.env)
        memory = self._compiled.memory
        key = memory.key(view.env.msg.headers) if memory is not None else None
        if memory is None or key is None:
            return self._evaluated(view)
        answer = memory.answer(key)
        if answer is None:
            answer = self._evaluated(view)
            memory.keep(key, answer)
        return answer

    def _evaluated(self, view: ActivationCache) -> SelectorResult:
        activation = view.activation(self._compiled.window)
        try:
            value = self._compiled.expression.eval(activation)
        except RuntimeError as error:  # all that the package raises
            raise SelectorFailed(reason(str(error))) from None
        if self._compiled.is_bool:
            decided = value.value()
            if isinstance(decided, bool):
                return YES if decided else NO
        return answer_of(answered(value))


def _called(function: Function, env: SelectorContext) -> SelectorResult:
    """Call a function with copies; what it changed in them becomes part of the answer."""
    try:
        copy = replace(env.msg, body=deepcopy(env.msg.body), headers=deepcopy(env.msg.headers))
        asked = SelectorContext(copy, dict(env.state), env.now)
        said = answer_of(function(asked))
        headers = {**plain_headers(asked.msg.headers), **(said.headers or {})}
        body = plain_body(asked.msg.body) if said.body is UNCHANGED else said.body
        state = {**asked.state, **(said.state or {})}
    except SelectorFailed:
        raise
    except Exception as error:  # whatever it raises counts as no
        raise SelectorFailed(reason(f"{type(error).__name__}: {error}")) from error
    return replace(
        said,
        headers=None if is_same(headers, env.msg.headers) else headers,
        body=UNCHANGED if is_same(body, env.msg.body) else body,
        state=state,
        is_whole=True,
    )
