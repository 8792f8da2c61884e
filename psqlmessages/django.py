"""The public functions for Django projects: send, call, publish, push and handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, transaction

from psqlmessages import rpc_client
from psqlmessages.client import calls, queue_calls, stream_calls
from psqlmessages.client.node import Node
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT, Options
from psqlmessages.client.queue_calls import (
    DEFAULT_DURATION,
    AckResult,
    Element,
    Headers,
)
from psqlmessages.client.stream_calls import Published, StreamMessage, message_of
from psqlmessages.client.subscription import DEFAULT_ROWS, DEFAULT_TIMEOUT
from psqlmessages.exceptions import NoListeners
from psqlmessages.handler_registry import registry
from psqlmessages.orm import (
    alias_of,
    direct_dsn,
    fetch,
    own_ident,
    postgresql,
    raise_messages_error,
    run,
)
from psqlmessages.retry import RateLimitedLogger
from psqlmessages.rules import code as rules
from psqlmessages.wire import encode_many

__all__ = [
    "acall",
    "apublish",
    "apush",
    "asend",
    "call",
    "commit",
    "node",
    "on_rpc",
    "on_topic",
    "pop",
    "publish",
    "publish_many",
    "push",
    "push_many",
    "read_stream",
    "reserve",
    "rollback",
    "rules",
    "send",
    "send_many",
]

on_topic = registry.on_topic
on_rpc = registry.on_rpc

_log = RateLimitedLogger(logging.getLogger("psqlmessages"))

# For tests. Called for each message sent: alias, ident, topic, body, whether anyone listens.
observers: list[Callable[[str, str, str, Any, bool], None]] = []

# The scan stops at the first error.
_SEND_MANY = """
    SELECT sent.answer
    FROM (
        SELECT messages.topic_send_as(%s, %s, b.body, NULL, %s) AS answer
        FROM unnest(%s::text[]) AS b (body)
    ) AS sent
    WHERE sent.answer ->> 'Err' <> '0'
    LIMIT 1
"""


def send(
    topic: str,
    body: Any,
    *,
    ident: str | None = None,
    token: str | None = None,
    require_listener: bool = False,
    using: str | None = None,
) -> bool:
    """Send to a topic on Django's connection: sent at commit, dropped by a rollback.

    ``body`` is str, bytes or a JSON value; ``ident`` is by default PSQLMESSAGES["NODE"]. Without
    listeners it logs a warning and returns False, or raises NoListeners if ``require_listener``.
    Other errors raise their MessagesError. No error breaks the transaction: you can catch it and
    continue. ``token`` asks the listeners for answers; a node connected under the same ident
    receives them.
    """
    ident = own_ident(ident)
    call = calls.topic_send_as(ident, topic, body, token or "")
    try:
        run(call, using)
    except NoListeners:
        if require_listener:
            raise
        _log_lost_message(topic, using)
        return _notify_observers(using, ident, topic, [body], is_received=False)
    return _notify_observers(using, ident, topic, [body], is_received=True)


# Uses the connection of the asynchronous ORM.
asend = sync_to_async(send)


def send_many(
    topic: str,
    bodies: Iterable[Any],
    *,
    ident: str | None = None,
    require_listener: bool = False,
    using: str | None = None,
) -> int:
    """Send many bodies to a topic in one statement, all or none; return their number, or 0.

    Returns 0 if there is no listener. Bytes cannot be mixed with other values. See :func:`send`.
    """
    bodies = list(bodies)
    ident = own_ident(ident)
    texts, enc = encode_many(bodies)
    names = calls.check_names(ident, topic)
    try:
        # An error rolls back the bodies sent before it, but not the outer transaction.
        with transaction.atomic(using=alias_of(using)):
            for (answer,) in fetch(_SEND_MANY, (*names, enc, texts), using):
                calls.raise_for_error(answer)
    except NoListeners:
        if require_listener:
            raise
        _log_lost_message(topic, using)
        _notify_observers(using, ident, topic, bodies, is_received=False)
        return 0
    except DatabaseError as error:
        # Raised by the commit, if there is no outer transaction.
        raise_messages_error(error)
        raise
    _notify_observers(using, ident, topic, bodies, is_received=True)
    return len(bodies)


def publish(
    topic: str, body: Any, *, ident: str | None = None, using: str | None = None
) -> Published:
    """Store a body for a topic's subscriptions, within the ORM's transaction.

    It also reaches the topic's live listeners; the result counts both. See :func:`send` for
    ``ident``. An error does not break the transaction.
    """
    ident = own_ident(ident)
    call = stream_calls.publish(ident, topic, body)
    return _publish(call, using, ident, topic, [body])


# Uses the connection of the asynchronous ORM.
apublish = sync_to_async(publish)


def publish_many(
    topic: str, bodies: Iterable[Any], *, ident: str | None = None, using: str | None = None
) -> Published:
    """Publish many bodies in one call, in order, all or none; see :func:`publish`.

    Bytes cannot be mixed with other values.
    """
    bodies = list(bodies)
    ident = own_ident(ident)
    return _publish(stream_calls.publish_many(ident, topic, bodies), using, ident, topic, bodies)


def read_stream(
    client: str,
    topic: str,
    timeout: timedelta = DEFAULT_TIMEOUT,
    max_rows: int = DEFAULT_ROWS,
    *,
    using: str | None = None,
) -> list[StreamMessage]:
    """Read the new messages of a subscription, within ``transaction.atomic()``.

    The first call creates the subscription; it expires ``timeout`` after the last call. The commit
    acknowledges the messages together with your own writes, so each message takes effect exactly
    once. If you roll back, they are delivered again. Other readers of the subscription wait until
    the transaction ends. Raises TransactionManagementError outside of ``atomic``. An error from
    the server breaks the transaction.
    """
    _require_atomic(using, "read_stream acknowledges", "messages")
    place = stream_calls.SubscriptionKey.of(client, topic, timeout)
    rows = fetch(*stream_calls.subscribe(place, max_rows), using)
    return [message_of(topic, row) for row in rows]


# Queues.


def push(  # noqa: PLR0913 - one option per property of the element
    queue: str,
    body: Any,
    *,
    headers: Headers | None = None,
    mature: datetime | None = None,
    delay: timedelta | None = None,
    tries: int = 0,
    key: str | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> int:
    """Add an element to a queue, within the ORM's transaction; return its id.

    It is available at ``mature``, else after ``delay``, else after the commit. A second push with
    the same ``key`` adds nothing and returns the id of the first. ``ident`` is by default
    PSQLMESSAGES["NODE"]. An error does not break the transaction.
    """
    call = queue_calls.push(
        own_ident(ident),
        queue,
        body,
        headers=headers,
        mature=mature,
        delay=delay,
        tries=tries,
        key=key,
    )
    return run(call, using)


def push_many(  # noqa: PLR0913
    queue: str,
    bodies: Iterable[Any],
    *,
    headers: Iterable[Headers | None] | None = None,
    mature: datetime | None = None,
    delay: timedelta | None = None,
    tries: int = 0,
    keys: Iterable[str | None] | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> list[int]:
    """Add many elements in one call, in order, all or none; return their ids.

    ``headers`` and ``keys`` have one entry per body; see :func:`push`. Bytes cannot be mixed with
    other values.
    """
    call = queue_calls.push_many(
        own_ident(ident),
        queue,
        bodies,
        headers=headers,
        mature=mature,
        delay=delay,
        tries=tries,
        keys=keys,
    )
    return run(call, using)


# Uses the connection of the asynchronous ORM.
apush = sync_to_async(push)


def pop(
    queue: str, count: int = 1, *, ident: str | None = None, using: str | None = None
) -> list[Element]:
    """Take and remove up to ``count`` elements within ``transaction.atomic()``; does not wait.

    The commit removes them together with your other writes, so each element takes effect exactly
    once. If you roll back, they return with the same number of tries; until then other consumers do
    not get them. Raises TransactionManagementError outside of ``atomic``. An error from the server
    breaks the transaction.
    """
    _require_atomic(using, "pop removes", "elements")
    return _taken(queue, queue_calls.pop(own_ident(ident), queue, count), using)


def reserve(
    queue: str,
    count: int = 1,
    duration: timedelta = DEFAULT_DURATION,
    *,
    ident: str | None = None,
    using: str | None = None,
) -> list[Element]:
    """Lease up to ``count`` elements; they return after ``duration`` unless committed.

    Call it outside of ``atomic``, and :func:`commit` within the transaction of your writes.
    """
    return _taken(queue, queue_calls.reserve(own_ident(ident), queue, count, duration), using)


def commit(
    *elements: Element | str, ident: str | None = None, using: str | None = None
) -> AckResult:
    """Remove reserved elements permanently, within the ORM's transaction.

    The result is False if a lease expired and another consumer has taken its element: roll back the
    writes for it. The result has the state of each element.
    """
    return run(queue_calls.commit(own_ident(ident), *elements), using)


def rollback(
    *elements: Element | str,
    delay: timedelta | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> AckResult:
    """Return reserved elements with one more try: to the end of the queue, or after ``delay``."""
    return run(queue_calls.rollback(own_ident(ident), *elements, delay=delay), using)


def _taken(queue: str, statement: queue_calls.SqlStatement, using: str | None) -> list[Element]:
    return queue_calls.elements(queue, fetch(*statement, using))


# Calls.


def call(
    node: str, body: Any, *, timeout: timedelta = DEFAULT_CALL_TIMEOUT, using: str | None = None
) -> Any:
    """Call a node and return the body of its answer; also works within ``atomic``.

    The call is sent immediately, on a separate session of this process: the other node does not
    see uncommitted changes of your transaction. The session's ident is PSQLMESSAGES["NODE"], a dot
    and a unique suffix, so a rule names it ``shop.*``. Raises CallTimeout, CalleeGone if the node
    disconnected, CallFailed if its handler failed, or the error of the server.
    """
    if rpc_client.stand_in is not None:
        return rpc_client.stand_in(node, body)
    future = rpc_client.caller_for(own_ident(), direct_dsn(using)).ask(node, body, timeout)
    try:
        return future.result()
    finally:
        future.cancel()


async def acall(
    node: str,
    body: Any,
    *,
    timeout: timedelta = DEFAULT_CALL_TIMEOUT,  # noqa: ASYNC109 - same signature as `call`
    using: str | None = None,
) -> Any:
    """See :func:`call`. Any number of tasks can wait at the same time, without threads."""
    if rpc_client.stand_in is not None:
        return await sync_to_async(rpc_client.stand_in)(node, body)
    future = rpc_client.caller_for(own_ident(), direct_dsn(using)).ask(node, body, timeout)
    return await asyncio.wrap_future(future)


def node(ident: str, *, using: str | None = None, options: Options | None = None) -> Node:
    """Create a node with its own connection to a configured database; use it with ``with``."""
    return Node(ident, direct_dsn(using), options=options)


def _require_atomic(using: str | None, effect: str, what: str) -> None:
    if not postgresql(using).in_atomic_block:
        raise transaction.TransactionManagementError(
            f"{effect} {what} when the transaction commits: call it within"
            f" transaction.atomic(), and handle the {what} there."
        )


def _publish(
    call: calls.Call[Published], using: str | None, ident: str, topic: str, bodies: list[Any]
) -> Published:
    published = run(call, using)
    is_received = bool(published.listeners or published.subscribers)
    _notify_observers(using, ident, topic, bodies, is_received=is_received)
    return published


def _log_lost_message(topic: str, using: str | None) -> None:
    alias = alias_of(using)
    _log.warning("topic %s of database %s has no listeners: the message is lost", topic, alias)


def _notify_observers(
    using: str | None, ident: str, topic: str, bodies: list[Any], *, is_received: bool
) -> bool:
    for observer in observers:
        for body in bodies:
            observer(alias_of(using), ident, topic, body, is_received)
    return is_received
