"""The public functions for Django projects: send, call, publish, push and handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, transaction

from psqlmessages import rpc_client
from psqlmessages.client import calls, stream_calls
from psqlmessages.client.node import Node
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT, Options
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
from psqlmessages.orm_queues import apush, commit, pop, push, push_many, reserve, rollback
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
    ident = ident if ident is not None else own_ident()
    call = calls.topic_send_as(ident, topic, body, token or "")
    try:
        run(call, using)
    except NoListeners:
        if require_listener:
            raise
        _log_lost_message(topic, using)
        return _notify_observers(using, ident, topic, [body], is_received=False)
    return _notify_observers(using, ident, topic, [body], is_received=True)


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
    ident = ident if ident is not None else own_ident()
    texts, enc = encode_many(bodies)
    call = calls.Call(_SEND_MANY, (*calls.check_names(ident, topic), enc, texts), _first_refusal)
    try:
        # An error rolls back the bodies sent before it, but not the outer transaction.
        with transaction.atomic(using=alias_of(using)):
            run(call, using)
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
    ident = ident if ident is not None else own_ident()
    published = run(stream_calls.publish(ident, topic, body), using)
    _notify_observers(using, ident, topic, [body], is_received=_is_received(published))
    return published


def publish_many(
    topic: str, bodies: Iterable[Any], *, ident: str | None = None, using: str | None = None
) -> Published:
    """Publish many bodies in one call, in order, all or none; see :func:`publish`.

    Bytes cannot be mixed with other values.
    """
    bodies = list(bodies)
    ident = ident if ident is not None else own_ident()
    published = run(stream_calls.publish_many(ident, topic, bodies), using)
    _notify_observers(using, ident, topic, bodies, is_received=_is_received(published))
    return published


async def apublish(
    topic: str, body: Any, *, ident: str | None = None, using: str | None = None
) -> Published:
    """See :func:`publish`; uses the connection of the asynchronous ORM."""
    return await sync_to_async(publish)(topic, body, ident=ident, using=using)


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
    connection = postgresql(using)
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError(
            "read_stream acknowledges messages when the transaction commits: call it within"
            " transaction.atomic(), and handle the messages there."
        )
    place = stream_calls.SubscriptionKey.of(client, topic, timeout)
    rows = fetch(*stream_calls.subscribe(place, max_rows), using)
    return [message_of(topic, row) for row in rows]


def call(
    node: str,
    body: Any,
    *,
    timeout: timedelta = DEFAULT_CALL_TIMEOUT,
    using: str | None = None,
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


async def asend(
    topic: str,
    body: Any,
    *,
    ident: str | None = None,
    token: str | None = None,
    require_listener: bool = False,
    using: str | None = None,
) -> bool:
    """See :func:`send`; uses the connection of the asynchronous ORM."""
    return await sync_to_async(send)(
        topic, body, ident=ident, token=token, require_listener=require_listener, using=using
    )


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


def _is_received(published: Published) -> bool:
    return bool(published.listeners or published.subscribers)


def _first_refusal(answer: Any) -> None:
    if answer is not None:
        calls.raise_for_error(answer)


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
