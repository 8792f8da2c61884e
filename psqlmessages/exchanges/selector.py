"""Selectors: whether a destination takes a message, by an expression or by a function in code."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Final

from psqlmessages.exchanges.answers import (
    NO,
    YES,
    Answer,
    answer_of,
    is_same,
    plain_body,
    plain_headers,
)
from psqlmessages.exchanges.compiling import Window, compiled
from psqlmessages.exchanges.conversion import answered, reason
from psqlmessages.exchanges.environment import Env, View
from psqlmessages.exchanges.errors import SelectorError, SelectorFailed
from psqlmessages.exchanges.looks import needs_body
from psqlmessages.exchanges.messages import UNCHANGED
from psqlmessages.exchanges.registry import Function, function_of, selector

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
            self.window: Window | None = None
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

    def answer(self, view: View) -> Answer:
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

    def _evaluated(self, view: View) -> Answer:
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


def _called(function: Function, env: Env) -> Answer:
    """Call a function with copies; what it changed in them becomes part of the answer."""
    try:
        copy = replace(env.msg, body=deepcopy(env.msg.body), headers=deepcopy(env.msg.headers))
        asked = Env(copy, dict(env.state), env.now)
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
