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


# Registry of selectors in code: functions by name.

Function = Callable[["SelectorContext"], bool | Mapping[str, Any] | None]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_functions: Final[dict[str, Function]] = {}


def selector(name: str) -> Callable[[Function], Function]:
    """Register a function as a selector, which definitions reference as ``@name``.

    The function takes a SelectorContext and returns true, false or a map, as an expression does. It
    may change ``msg`` and ``state`` of the context in place. If it raises an exception, the answer
    is no. Raise ValueError if the name is malformed or taken.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.120} is not a valid selector name: use letters, digits, _ . -")

    def register(function: Function) -> Function:
        known = _functions.get(name)
        if known is not None and not _is_again(known, function):
            raise ValueError(f"a selector named {name} is registered already: {known!r}")
        _functions[name] = function
        return function

    return register


def function_of(name: str) -> Function:
    """Return the function with a name; raise SelectorError if none is registered."""
    try:
        return _functions[name]
    except KeyError:
        raise SelectorError(
            f"no selector in code is named {name:.100}: import the module that registers it"
        ) from None


def names() -> tuple[str, ...]:
    """Return the names of all selectors in code, sorted."""
    return tuple(sorted(_functions))


def _is_again(known: Function, function: Function) -> bool:
    """Tell whether a reloaded module registers the same function again."""
    keys = ("__module__", "__qualname__")
    return all(getattr(known, key, None) == getattr(function, key, "") for key in keys)


# Context of one traversal: the fields that selectors see, converted again only after a change.


@dataclass
class SelectorContext:
    """Input of a selector: ``msg``, ``now``, and ``state``, a map that lasts for one traversal.

    A selector in code gets copies. Its changes to them take effect when it returns.
    """

    msg: SelectorInput
    state: dict[str, Any] = field(default_factory=dict)
    now: datetime | None = None


class ActivationCache:
    """Caches the converted message for the expressions of an exchange.

    The expressions share one conversion. If it exceeds the limit of one of them, or contains a
    value that CEL cannot represent, each expression gets its own conversion. Then only the
    expressions that read this value fail.
    """

    def __init__(self, env: SelectorContext, shared: VisibleFields | None = None) -> None:
        self.env = env
        self._shared = shared
        self._activations: dict[VisibleFields, Activation | SelectorFailed] = {}

    def forget(self) -> None:
        """Drop the conversions, because the message or the state has changed."""
        self._activations.clear()

    def activation(self, window: VisibleFields) -> Activation:
        """Return the fields of a window for CEL; raise SelectorFailed if it cannot hold them."""
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

    Raise SelectorError if the expression cannot be compiled or may exceed its cost bounds, or if
    the function is unknown. Raise SelectorsUnavailable if the CEL package is not installed.
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
        """Return the selector for a stored text; None for an empty text, which means always."""
        return cls(text) if text else None

    @property
    def needs_body(self) -> bool:
        """Whether it reads the body. For a function in code this is unknown, so True."""
        return self.window is None or needs_body(self.window.look)

    @property
    def headers_seen(self) -> tuple[str, ...] | None:
        """The headers that decide its yes or no; None if it reads or returns anything else."""
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
        """Evaluate the selector; raise SelectorFailed if it fails or returns an invalid value."""
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
        except RuntimeError as error:  # the only exception of the package
            raise SelectorFailed(reason(str(error))) from None
        if self._compiled.is_bool:
            decided = value.value()
            if isinstance(decided, bool):
                return YES if decided else NO
        return answer_of(answered(value))


def _called(function: Function, env: SelectorContext) -> SelectorResult:
    """Call a function with copies; the result includes the changes that it made to them."""
    try:
        copy = replace(env.msg, body=deepcopy(env.msg.body), headers=deepcopy(env.msg.headers))
        asked = SelectorContext(copy, dict(env.state), env.now)
        said = answer_of(function(asked))
        headers = {**plain_headers(asked.msg.headers), **(said.headers or {})}
        body = plain_body(asked.msg.body) if said.body is UNCHANGED else said.body
        state = {**asked.state, **(said.state or {})}
    except SelectorFailed:
        raise
    except Exception as error:  # any exception counts as no
        raise SelectorFailed(reason(f"{type(error).__name__}: {error}")) from error
    return replace(
        said,
        headers=None if is_same(headers, env.msg.headers) else headers,
        body=UNCHANGED if is_same(body, env.msg.body) else body,
        state=state,
        is_whole=True,
    )
