"""Handlers of a node: which function is called for which message."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import CO_COROUTINE, iscoroutinefunction
from types import FunctionType
from typing import Any, Final, TypeVar, overload

from psqlmessages.client.calls import NOTHING_SENT
from psqlmessages.client.messages import RPC, SYS, TOPIC, Message
from psqlmessages.client.node_state import NodeState
from psqlmessages.exceptions import MessagesError

Handler = Callable[[Message], Any]
# A generator that yields functions to call, and receives their results. An awaitable result is
# awaited first.
Actions = Generator[Callable[[], Any], Any, None]
# Called if an answer to a message could not be sent.
OnReplyFailed = Callable[[Message, Exception], object]
F = TypeVar("F", bound=Handler)

# The order key of all system events, which are handled in order. No topic has an empty name.
_EVENTS_KEY: Final = ""
_UNSENDABLE: Final = "the answer could not be sent"


@dataclass(slots=True, eq=False)
class HandlerAction:
    """An action that calls a handler with a message."""

    function: Handler
    message: Message

    def __call__(self) -> Any:
        """Call the handler."""
        return self.function(self.message)

    @property
    def name(self) -> str:
        """The name of the handler, for the log."""
        return getattr(self.function, "__qualname__", repr(self.function))

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function, or an object with an async ``__call__``."""
        function = self.function
        if type(function) is FunctionType and function.__code__.co_flags & CO_COROUTINE:
            return True
        return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


class NodeHandlers:
    """Handlers of a node: decorators that register them, and selection for a message."""

    def __init__(self) -> None:
        self._topic_handlers: list[tuple[str, Handler]] = []
        self._ordered_topics: list[str] = []
        self._rpc_handlers: list[Handler] = []
        self._event_handlers: list[tuple[frozenset[str], Handler]] = []

    def on_topic(self, topic: str, *, ordered: bool = False) -> Callable[[F], F]:
        """Call the decorated function for each message of a topic, or of a pattern of topics (A*).

        ``run`` listens to the topic, but not to topics that match a pattern: call ``topic_listen``
        for these. If the message asks for an answer and the function returns a value other than
        None, that value is the answer. With ``ordered``, the messages of one topic are handled one
        after the other, in their order.
        """

        def register(handler: F) -> F:
            if ordered:
                self._ordered_topics.append(topic)
            self._topic_handlers.append((topic, handler))
            return handler

        return register

    def on_rpc(self, handler: F) -> F:
        """Call the decorated function for each RPC; its return value is the answer.

        If the function raises an exception, the caller gets CallFailed with the class name of that
        exception. If the function raises CallFailed, the caller gets CallFailed with the same text.
        """
        self._rpc_handlers.append(handler)
        return handler

    @overload
    def on_event(self, handler: F, /) -> F: ...

    @overload
    def on_event(self, /, *events: str) -> Callable[[F], F]: ...

    def on_event(self, *arguments: Any) -> Any:
        """Call the decorated function for each system event, or for the named ones."""
        is_bare = len(arguments) == 1 and callable(arguments[0])
        events = frozenset(() if is_bare else arguments)

        def register(handler: F) -> F:
            self._event_handlers.append((events, handler))
            return handler

        return register(arguments[0]) if is_bare else register

    def topics_to_listen(self) -> list[str]:
        """Return the topics of the handlers, without patterns, sorted by name."""
        # Two sessions that listen to the same topics in different orders could deadlock.
        return sorted({topic for topic, _ in self._topic_handlers if not topic.endswith("*")})

    def matching(self, message: Message) -> Iterator[Handler]:
        """Yield the handlers of a message, in order of registration."""
        if message.type == TOPIC:
            for pattern, handler in self._topic_handlers:
                if matches(pattern, message.topic):
                    yield handler
        elif message.type == RPC:
            yield from self._rpc_handlers
        elif message.type == SYS:
            for events, handler in self._event_handlers:
                if not events or message.event in events:
                    yield handler

    def must_handle(self, message: Message) -> bool:
        """Return whether a message has a handler, or is an RPC, which is always answered."""
        return message.type == RPC or next(self.matching(message), None) is not None

    def order_key(self, message: Message) -> str | None:
        """Return a key: messages with the same key are handled in order. None: in any order."""
        if message.type == SYS:
            return _EVENTS_KEY
        if message.type == TOPIC and any(matches(t, message.topic) for t in self._ordered_topics):
            return message.topic
        return None

    def handle(self, message: Message, state: NodeState) -> Actions:
        """Yield actions that call the handlers of a message, and that answer if necessary."""
        failure = f"{state.ident} has no RPC handler" if message.type == RPC else ""
        for handler in self.matching(message):
            failure = ""
            try:
                answer = yield HandlerAction(handler, message)
            except (Exception, CancelledError) as error:  # noqa: BLE001 - logged and counted
                failure = state.on_handler_failed(message, error)
                continue
            yield from send_answer(message, answer, state.on_reply_failed)
        if failure:
            yield from send_error(message, failure, state.on_reply_failed)


def send_answer(message: Message, answer: Any, on_failed: OnReplyFailed) -> Actions:
    """Yield actions that answer a message, if needed; the answer None is sent for an RPC only."""
    if not message.wants_answer or message.is_answered:
        return
    if answer is None and message.type != RPC:
        return
    try:
        yield partial(message.reply, answer)
    except (MessagesError, *NOTHING_SENT) as error:
        on_failed(message, error)
        # Does nothing after a MessagesError: then the message counts as answered.
        yield from send_error(message, _UNSENDABLE, on_failed)


def send_error(message: Message, reason: str, on_failed: OnReplyFailed) -> Actions:
    """Yield actions that answer with an error, if an answer is wanted and none was sent."""
    if not message.wants_answer or message.is_answered:
        return
    try:
        yield partial(message.reply_error, reason)
    except (MessagesError, *NOTHING_SENT) as error:
        on_failed(message, error)
        if reason != _UNSENDABLE:
            # For example, the text of CallFailed is too long.
            yield from send_error(message, _UNSENDABLE, on_failed)


def matches(pattern: str, name: str) -> bool:
    """Return whether a name equals a pattern, or begins with it if the pattern ends in "*"."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
