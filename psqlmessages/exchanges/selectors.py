"""Selectors: expressions or registered functions, and their evaluation for one element."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from psqlmessages.exchanges.compiler import InputFields, compile_expression, get_environment
from psqlmessages.exchanges.conversion import CelEncoder, shorten_error, to_python
from psqlmessages.exchanges.model import UNCHANGED, SelectorError, SelectorFailed
from psqlmessages.exchanges.result import (
    NO,
    YES,
    SelectorResult,
    copy_body,
    copy_headers,
    is_same,
    to_result,
)

if TYPE_CHECKING:
    from cel_expr_python.cel import Activation

    from psqlmessages.exchanges.model import SelectorInput


# Registry of selectors in code: functions by name.

SelectorFunction = Callable[["SelectorContext"], bool | Mapping[str, Any] | None]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_functions: Final[dict[str, SelectorFunction]] = {}


def selector(name: str) -> Callable[[SelectorFunction], SelectorFunction]:
    """Create a decorator that registers a function as the selector ``@name``.

    The function takes a SelectorContext and returns true, false or a map, as an expression does. It
    may change ``msg`` and ``state`` of the context in place. An exception counts as false. Raise
    ValueError if the name is malformed, or if another function has this name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.120} is not a valid selector name: use letters, digits, _ . -")

    def register(function: SelectorFunction) -> SelectorFunction:
        known = _functions.get(name)
        if known is not None and not _is_same_function(known, function):
            raise ValueError(f"a selector named {name} is registered already: {known!r}")
        _functions[name] = function
        return function

    return register


def _is_same_function(known: SelectorFunction, function: SelectorFunction) -> bool:
    """Return whether both are the same function, perhaps after its module was reloaded."""
    if not (isinstance(known, FunctionType) and isinstance(function, FunctionType)):
        return known == function
    known_name = (known.__module__, known.__qualname__)
    return known_name == (function.__module__, function.__qualname__)


# Evaluation of the selectors of an exchange for one element.


@dataclass
class SelectorContext:
    """Input of a selector: the message, the time, and a state that all selectors share.

    A function gets copies of ``msg`` and ``state``. Its changes to them apply when it returns.
    """

    msg: SelectorInput
    state: dict[str, Any] = field(default_factory=dict)
    now: datetime | None = None


class ActivationCache:
    """Caches activations, which hold the message as CEL values, for the expressions of an exchange.

    Expressions share one activation with the fields ``shared``. If these fields are too large, or
    contain a value that CEL cannot represent, each expression gets an activation with only its own
    fields. Then only some expressions fail.
    """

    def __init__(self, context: SelectorContext, shared: InputFields | None = None) -> None:
        self.context = context
        self._shared = shared
        self._activations: dict[InputFields, Activation | SelectorFailed] = {}

    def clear(self) -> None:
        """Remove all activations, because the message or the state has changed."""
        self._activations.clear()

    def get(self, fields: InputFields) -> Activation:
        """Return an activation with these fields; raise SelectorFailed if CEL cannot hold them."""
        activation = self._convert_once(self._shared or fields)
        if isinstance(activation, SelectorFailed):
            activation = self._convert_once(fields)
        if isinstance(activation, SelectorFailed):
            raise activation
        return activation

    def _convert_once(self, fields: InputFields) -> Activation | SelectorFailed:
        if fields not in self._activations:
            self._activations[fields] = self._convert(fields)
        return self._activations[fields]

    def _convert(self, fields: InputFields) -> Activation | SelectorFailed:
        context = self.context
        message = {"msg": vars(context.msg), "state": context.state}
        try:
            values = CelEncoder(fields.max_units).convert_fields(message, fields.tree)
        except SelectorFailed as error:
            return error
        if "now" in fields.tree:
            if context.now is None:
                return SelectorFailed("now is missing: pass it to route")
            values["now"] = context.now
        return get_environment().Activation(values)


class Selector:
    """A CEL expression, or ``@`` and the name of a function that ``@selector`` registered.

    Raise SelectorError if the expression cannot be compiled or may exceed its cost bounds, or if
    the function is unknown. Raise SelectorsUnavailable if the CEL package cannot be imported.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._function: SelectorFunction | None = None
        if text.startswith("@"):
            name = text[1:]
            if name not in _functions:
                raise SelectorError(
                    f"no selector in code is named {name:.100}: import the module that registers it"
                )
            self._function = _functions[name]
            self.fields: InputFields | None = None
            return
        self._compiled = compile_expression(text)
        self.fields = self._compiled.fields

    @classmethod
    def of(cls, text: str) -> Selector | None:
        """Return the selector with this text; None for "", which selects every element."""
        return cls(text) if text else None

    @property
    def needs_body(self) -> bool:
        """Whether it may read the body. This is true for every function in code."""
        if self.fields is None:
            return True
        fields = self.fields.tree.get("msg", {})
        return fields is None or "body" in fields

    @property
    def cacheable_headers(self) -> tuple[str, ...] | None:
        """The headers that determine a cached result; None if results are not cached."""
        cache = self._compiled.cache if self._function is None else None
        return None if cache is None else cache.headers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selector) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"

    def __reduce__(self) -> tuple[type[Selector], tuple[str]]:
        return Selector, (self.text,)

    def evaluate(self, activations: ActivationCache) -> SelectorResult:
        """Evaluate the selector; raise SelectorFailed if it fails or returns an invalid value."""
        if self._function is not None:
            return _call_function(self._function, activations.context)
        cache = self._compiled.cache
        key = None if cache is None else cache.key_of(activations.context.msg.headers)
        if cache is None or key is None:
            return self._run(activations)
        result = cache.get(key)
        if result is None:
            result = self._run(activations)
            cache.put(key, result)
        return result

    def _run(self, activations: ActivationCache) -> SelectorResult:
        activation = activations.get(self._compiled.fields)
        try:
            value = self._compiled.expression.eval(activation)
        except RuntimeError as error:  # the only exception of the package
            raise SelectorFailed(shorten_error(str(error))) from None
        if self._compiled.is_bool:
            # A bool needs no conversion. Any other value is an error, which to_python raises.
            decision = value.value()
            if isinstance(decision, bool):
                return YES if decision else NO
        return to_result(to_python(value))


def _call_function(function: SelectorFunction, context: SelectorContext) -> SelectorResult:
    """Call a function with copies of the message and the state; return its result and changes."""
    msg = context.msg
    try:
        copy = replace(msg, body=deepcopy(msg.body), headers=deepcopy(msg.headers))
        changed = SelectorContext(copy, deepcopy(context.state), context.now)
        result = to_result(function(changed))
        headers = {**copy_headers(copy.headers), **(result.headers or {})}
        body = copy_body(copy.body) if result.body is UNCHANGED else result.body
        state = {**changed.state, **(result.state or {})}
    except SelectorFailed:
        raise
    except Exception as error:  # any exception counts as no
        raise SelectorFailed(shorten_error(f"{type(error).__name__}: {error}")) from error
    return replace(
        result,
        headers=None if is_same(headers, msg.headers) else headers,
        body=UNCHANGED if is_same(body, msg.body) else body,
        state=state,
        # The function may have removed headers. Merging would restore them.
        is_replacement=True,
    )
