"""Test tools for projects: check sent messages, and call handlers.

Everything runs in the test's own process and transaction. A ``TestCase`` never commits, so
PostgreSQL sends no message. Tests check the messages that a commit would send.
``psqlmessages.pytest_plugin`` has the same tools as fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from psqlmessages import django as django_functions
from psqlmessages import rpc_client
from psqlmessages.client.messages import RPC, TOPIC, Message
from psqlmessages.conf import get_settings
from psqlmessages.exceptions import CallFailed, failure_text
from psqlmessages.handler_registry import HandlerRegistry, registry
from psqlmessages.models import Auth
from psqlmessages.orm import fetch, own_ident, resolve_alias
from psqlmessages.wire import EncodedBody, decode

__all__ = [
    "SentMessage",
    "SentMessages",
    "allow_call",
    "allow_queue",
    "allow_topic",
    "answered_calls",
    "ask",
    "deliver",
    "sent_messages",
]


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A sent or published message. ``has_receivers``: there were listeners or subscriptions."""

    topic: str
    body: Any
    ident: str
    using: str
    has_receivers: bool


@dataclass(slots=True, eq=False)
class _Record:
    """A message, and whether its transaction was committed."""

    message: SentMessage
    connection: BaseDatabaseWrapper
    is_committed: bool = False

    def on_commit(self) -> None:
        self.is_committed = True

    @property
    def is_sent(self) -> bool:
        """Whether the transaction has committed, or may still commit."""
        # A rollback removes the callback.
        callbacks = [callback for _, callback, _ in self.connection.run_on_commit]
        return self.is_committed or self.on_commit in callbacks


@dataclass(slots=True)
class SentMessages(Sequence[SentMessage]):
    """The messages sent so far, in order, without messages that a rollback has dropped."""

    _records: list[_Record] = field(default_factory=list)

    @overload
    def __getitem__(self, index: int) -> SentMessage: ...

    @overload
    def __getitem__(self, index: slice) -> list[SentMessage]: ...

    def __getitem__(self, index: Any) -> Any:
        return self._messages()[index]

    def __len__(self) -> int:
        return len(self._messages())

    def __repr__(self) -> str:
        return repr(self._messages())

    def bodies(self, topic: str) -> list[Any]:
        """List the bodies of the messages to a topic."""
        return [message.body for message in self._messages() if message.topic == topic]

    def deliver(self) -> int:
        """Pass all messages to their handlers with :func:`deliver`; return the number of calls."""
        messages = self._messages()
        return sum(len(deliver(m.topic, m.body, sender=m.ident, using=m.using)) for m in messages)

    def _messages(self) -> list[SentMessage]:
        return [record.message for record in self._records if record.is_sent]


@contextmanager
def sent_messages() -> Iterator[SentMessages]:
    """Collect the messages that ``send``, ``publish`` and so on send in the block, from any thread.

    A message is included if its transaction has committed, or may still commit as in a
    ``TestCase``. The functions work as usual: they check the rules (see :func:`allow_topic`), and
    ``send`` returns False if there are no listeners. Messages of nodes with their own connections
    are not collected.
    """
    sent = SentMessages()

    def record(using: str, ident: str, topic: str, body: Any, has_receivers: bool) -> None:
        connection = connections[using]
        message = SentMessage(topic, _round_trip(body), ident, using, has_receivers)
        new_record = _Record(message, connection)
        sent._records.append(new_record)
        connection.on_commit(new_record.on_commit)

    django_functions.sent_callbacks.append(record)
    try:
        yield sent
    finally:
        django_functions.sent_callbacks.remove(record)


def allow_topic(
    topic: str,
    *,
    ident: str | None = None,
    mode: str = Auth.Mode.BOTH,
    role: str | None = None,
    using: str | None = None,
) -> Auth:
    """Add or change a rule, so that a node may send to a topic (or pattern) and listen to it.

    ``ident`` is by default PSQLMESSAGES["NODE"]; ``role`` is by default Django's role.
    """
    return _allow(Auth.Type.TOPIC, ident, topic, mode, role, using)


def allow_queue(
    queue: str,
    *,
    ident: str | None = None,
    mode: str = Auth.Mode.BOTH,
    role: str | None = None,
    using: str | None = None,
) -> Auth:
    """Add or change a rule, so that a node may push to a queue (or pattern) and take from it.

    For the defaults see :func:`allow_topic`. A test can pop the elements that it has pushed.
    """
    return _allow(Auth.Type.QUEUE, ident, queue, mode, role, using)


def allow_call(
    node: str, *, ident: str | None = None, role: str | None = None, using: str | None = None
) -> Auth:
    """Add or change a rule, so that this project may call a node (or pattern).

    ``ident`` is by default the pattern ``NODE.*``, which includes the node names of ``call``.
    """
    if ident is None:
        ident = f"{own_ident()}.*"
    return _allow(Auth.Type.RPC, ident, node, Auth.Mode.WRITE, role, using)


def deliver(
    topic: str,
    body: Any,
    *,
    sender: str | None = None,
    node: str | None = None,
    using: str | None = None,
    handlers: HandlerRegistry = registry,
) -> list[Any]:
    """Pass a topic message to its handlers immediately; return their results.

    Each handler runs as in ``psqlmessages run``, in its own transaction unless ``atomic=False``.
    There are no retries: an exception of a handler is raised. ``node`` is the receiving node
    (default: all); ``sender`` is by default PSQLMESSAGES["NODE"].
    """
    message = Message(
        TOPIC, sender=_default_sender(sender), to=topic, content=_round_trip(body), topic=topic
    )
    return [handler.run(message, resolve_alias(using)) for handler in handlers.match(message, node)]


def ask(
    node: str,
    body: Any,
    *,
    sender: str | None = None,
    using: str | None = None,
    handlers: HandlerRegistry = registry,
) -> Any:
    """Pass a call to the RPC handler of a node immediately; return its answer.

    An exception of the handler is raised. Raises CallFailed if there is no handler.
    """
    message = Message(RPC, sender=_default_sender(sender), to=node, content=_round_trip(body))
    for handler in handlers.match(message, node):
        return _round_trip(handler.run(message, resolve_alias(using)))
    raise CallFailed(f"{node} has no RPC handler")


@contextmanager
def answered_calls(handlers: HandlerRegistry = registry) -> Iterator[None]:
    """Let handlers of this process answer ``call`` and ``acall`` within the block.

    If a handler raises an exception, ``call`` raises CallFailed, as in production.
    """

    def answer(node: str, body: Any) -> Any:
        try:
            return ask(node, body, sender=own_ident(), handlers=handlers)
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed(failure_text(node, error)) from error

    previous, rpc_client.answer_in_tests = rpc_client.answer_in_tests, answer
    try:
        yield
    finally:
        rpc_client.answer_in_tests = previous


def _default_sender(sender: str | None) -> str:
    return sender if sender is not None else get_settings().NODE


def _allow(
    type_: str, ident: str | None, dest: str, mode: str, role: str | None, using: str | None
) -> Auth:
    if role is None:
        ((role,),) = fetch("SELECT session_user", (), using)
    rule, _ = Auth.objects.using(resolve_alias(using)).update_or_create(
        role=role,
        ident=own_ident(ident),
        type=type_,
        dest=dest,
        # ``timeout``: the seconds for which large bodies are stored.
        defaults={"mode": mode, "timeout": 60},
    )
    return rule


def _round_trip(body: Any) -> Any:
    """Encode and decode a body, as sending does.

    A tuple becomes a list, and a body that cannot be sent raises an error.
    """
    return decode(*EncodedBody.of(body))
