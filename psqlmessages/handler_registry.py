"""Registry of a project's message handlers: the decorators on_topic and on_rpc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from psqlmessages.client.handlers import matches
from psqlmessages.client.messages import RPC, TOPIC, Message

F = TypeVar("F", bound=Callable[[Message], Any])

EVERY_NODE = "*"
DEFAULT_TRIES = 5


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function, and the messages that it handles. ``topic`` is "" for RPC."""

    function: Callable[[Message], Any]
    topic: str
    node: str
    atomic: bool
    tries: int
    ordered: bool = False

    @property
    def name(self) -> str:
        """The function's full name."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def run(self, message: Message, using: str) -> Any:
        """Call the function; if ``atomic``, in a transaction, which an exception rolls back."""
        function = self.function
        if iscoroutinefunction(function):
            function = async_to_sync(function)
        if not self.atomic:
            return function(message)
        with transaction.atomic(using=using):
            return function(message)


class HandlerRegistry:
    """The handlers of a process; :data:`registry` holds those of the project."""

    def __init__(self) -> None:
        self._topics: list[Handler] = []
        self._rpcs: dict[str, Handler] = {}

    def on_topic(
        self,
        topic: str,
        *,
        node: str = EVERY_NODE,
        atomic: bool = True,
        tries: int = DEFAULT_TRIES,
        ordered: bool = False,
    ) -> Callable[[F], F]:
        """Call the decorated function for each message of a topic, or of a pattern like ``A*``.

        ``node`` is the node, or a pattern of nodes, that receives the messages (default: all).
        ``atomic`` runs the function in its own transaction, which an exception rolls back. After an
        exception the function is called again, with growing delays, up to ``tries`` calls in total.
        If the last call fails, the message is lost, because topic messages are not stored; the loss
        is logged and counted. A result other than None is sent as the answer if the message asks
        for one. With ``ordered``, the function gets the messages of one topic one after the other,
        in their order. But the messages behind a failed one do not wait for its retry.
        """
        if not isinstance(topic, str) or not topic:
            raise TypeError(
                f'@on_topic needs the name of a topic: @on_topic("ORDERS"), not {topic!r}'
            )
        if tries < 1:
            raise ValueError(f"tries must be at least 1, not {tries}")

        def register(function: F) -> F:
            self._topics.append(Handler(function, topic, node, atomic, tries, ordered))
            return function

        return register

    @overload
    def on_rpc(self, function: F, /) -> F: ...

    @overload
    def on_rpc(self, /, *, node: str = ..., atomic: bool = ...) -> Callable[[F], F]: ...

    def on_rpc(
        self, function: Any = None, /, *, node: str = EVERY_NODE, atomic: bool = True
    ) -> Any:
        """Call the decorated function for each RPC to the node; its result is the answer.

        The answer is sent after the function's transaction has committed. An exception is logged
        and counted, without a retry, and the caller gets CallFailed with the name of the
        exception's class. Raise ``CallFailed("…")`` to choose the text. ``node`` is a node or a
        pattern; if several handlers match, the most specific one is called. Raises
        ImproperlyConfigured if the same ``node`` already has a handler.
        """

        def register(function: F) -> F:
            handler = Handler(function, "", node, atomic, tries=1)
            if (other := self._rpcs.setdefault(node, handler)) is not handler:
                raise ImproperlyConfigured(
                    f"Two handlers would answer the same RPCs: {other.name} and {handler.name}."
                    " Name the node of each: @on_rpc(node=...)."
                )
            return function

        if function is None:
            return register
        if not callable(function):
            raise TypeError(
                f"@on_rpc needs a function; to name the node: @on_rpc(node={function!r})"
            )
        return register(function)

    def match(self, message: Message, node: str | None) -> list[Handler]:
        """List the handlers of a message that ``node`` received, in the order of registration.

        For an RPC, list only the most specific handler. System events have no handlers.
        """
        handlers = self.list_handlers(node)
        if message.type == TOPIC:
            return [h for h in handlers if h.topic and matches(h.topic, message.topic)]
        if message.type == RPC:
            rpc_handlers = [h for h in handlers if not h.topic]
            # A name is more specific than a pattern, and a long pattern than a short one.
            rpc_handlers.sort(key=lambda h: (not h.node.endswith("*"), len(h.node)))
            return rpc_handlers[-1:]
        return []

    def list_handlers(self, node: str | None) -> list[Handler]:
        """List the handlers of a node, or of all nodes if ``node`` is None."""
        handlers = [*self._topics, *self._rpcs.values()]
        return [h for h in handlers if node is None or matches(h.node, node)]


registry = HandlerRegistry()
