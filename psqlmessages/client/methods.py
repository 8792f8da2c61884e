"""Base class of Node and AsyncNode, and the functions that make their methods.

Each method has the name, docstring and parameters of a function that creates the call. A method
made by ``acting_method`` has no parameter for the node, and passes the acting node.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import Parameter, signature
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

from psqlmessages.client.calls import Call
from psqlmessages.client.handlers import NodeHandlers
from psqlmessages.client.node_state import NodeCounters, NodeState
from psqlmessages.client.options import Options


class NodeBase(NodeHandlers):
    """Base class of Node and AsyncNode: handlers, and properties that need no query."""

    def __init__(self, ident: str, options: Options) -> None:
        super().__init__()
        self.ident = ident
        self._state = NodeState(ident, options)

    @property
    def is_healthy(self) -> bool:
        """Whether the node is connected, and no probe is overdue."""
        heartbeat = self._state.heartbeat
        return heartbeat.is_connected and not heartbeat.is_overdue(monotonic())

    @property
    def counters(self) -> NodeCounters:
        """Counters since the node was created; see :class:`NodeCounters`."""
        return self._state.counters

    @property
    def channel(self) -> str:
        """The channel on which PostgreSQL notifies this session."""
        return self._state.channel

    @property
    def _acting_node(self) -> str:
        return self._state.registration.acting_node


P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def method(create_call: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Create a method of Node that runs a call."""

    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._session.run(create_call(*args, **kwargs))

    return _with_signature_of(run, create_call)


def acting_method(
    create_call: Callable[Concatenate[str, P], Call[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Create a method of Node that runs a call as the acting node."""

    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._session.run(create_call(self._acting_node, *args, **kwargs))

    return _with_signature_of(run, create_call, is_acting=True)


def async_method(
    create_call: Callable[P, Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Create a method of AsyncNode that runs a call."""

    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await self._session.run(create_call(*args, **kwargs))

    return _with_signature_of(run, create_call)


def async_acting_method(
    create_call: Callable[Concatenate[str, P], Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Create a method of AsyncNode that runs a call as the acting node."""

    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await self._session.run(create_call(self._acting_node, *args, **kwargs))

    return _with_signature_of(run, create_call, is_acting=True)


def _with_signature_of(run: F, create_call: Callable[..., Any], *, is_acting: bool = False) -> F:
    run.__name__, run.__doc__ = create_call.__name__, create_call.__doc__
    original = signature(create_call)
    self_parameter = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(original.parameters.values())
    if is_acting:
        del parameters[0]
    # "Call[T]" becomes "T": the method returns the result of the call.
    result = str(original.return_annotation).removeprefix("Call[").removesuffix("]")
    vars(run)["__signature__"] = original.replace(
        parameters=[self_parameter, *parameters], return_annotation=result
    )
    return run
