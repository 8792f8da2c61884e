"""What Node and AsyncNode have in common, and methods made from functions that create calls.

A method has the name, the documentation and the parameters of that function. The parameter of an
``acting_method`` that names the acting node is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import Parameter, signature
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

from psqlmessages.client.calls import Call
from psqlmessages.client.handlers import TopicHandlers
from psqlmessages.client.node_state import NodeCounters, NodeState
from psqlmessages.client.options import Options


class NodeBase(TopicHandlers):
    """The state of a node, and what can be read of it without a query."""

    def __init__(self, ident: str, options: Options) -> None:
        super().__init__()
        self.ident = ident
        self._state = NodeState(ident, options)

    @property
    def is_healthy(self) -> bool:
        """Whether the node is connected, according to its last probe and calls."""
        return self._state.is_healthy(monotonic())

    @property
    def counters(self) -> NodeCounters:
        """Counters since the node was created."""
        return self._state.counters

    @property
    def channel(self) -> str:
        """The channel on which PostgreSQL notifies this session."""
        return self._state.channel

    @property
    def _acting(self) -> str:
        return self._state.registration.acting


P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def method(make: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Create a method of Node that runs a call."""

    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._session.run(make(*args, **kwargs))

    return _described(run, make)


def acting_method(
    make: Callable[Concatenate[str, P], Call[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Create a method of Node that runs a call as the acting node."""

    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._session.run(make(self._acting, *args, **kwargs))

    return _described(run, make, omitted=1)


def async_method(
    make: Callable[P, Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Create a method of AsyncNode that runs a call."""

    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await self._session.run(make(*args, **kwargs))

    return _described(run, make)


def async_acting_method(
    make: Callable[Concatenate[str, P], Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Create a method of AsyncNode that runs a call as the acting node."""

    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await self._session.run(make(self._acting, *args, **kwargs))

    return _described(run, make, omitted=1)


def _described(run: F, make: Callable[..., Any], *, omitted: int = 0) -> F:
    run.__name__, run.__doc__ = make.__name__, make.__doc__
    given = signature(make)
    own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *list(given.parameters.values())[omitted:]]
    result = str(given.return_annotation).removeprefix("Call[").removesuffix("]")
    vars(run)["__signature__"] = given.replace(parameters=parameters, return_annotation=result)
    return run
