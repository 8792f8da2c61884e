"""Django: send and call from a project, and handle what comes. Import from here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, DatabaseError, transaction

from psqlmessages import rpc_client
from psqlmessages.client import calls, stream_calls
from psqlmessages.client.node import Node
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT, Options
from psqlmessages.client.stream_calls import Published, StreamMessage, message_of
from psqlmessages.client.subscription import DEFAULT_ROWS, DEFAULT_TIMEOUT
from psqlmessages.exceptions import NoListeners
from psqlmessages.handler_registry import registry
from psqlmessages.orm import (
    dsn,
    fetch,
    own_ident,
    postgresql,
    raise_messages_error,
    run,
)
from psqlmessages.orm_queues import apush, commit, pop, push, push_many, reserve, rollback
from psqlmessages.retry import RateLimitedLogger
from psqlmessages.wire import EncodedBody, encode_many

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
    "send",
    "send_many",
]

on_topic = registry.on_topic
on_rpc = registry.on_rpc

_log = RateLimitedLogger(logging.getLogger("psqlmessages"))

# What is told of each message sent, for tests: alias, ident, topic, body, whether anyone listens.
observers: list[Callable[[str, str, str, Any, bool], None]] = []

# The scan ends at the first refusal.
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
    using: str = DEFAULT_DB_ALIAS,
) -> bool:
    """Send to a topic on Django's connection: it leaves with the commit, or not at all.

    ``body`` is str, bytes, or what JSON can hold; ``ident`` is by default PSQLMESSAGES["NODE"].
    False, and a line in the log, where nobody listens; with ``require_listener`` NoListeners is
    raised instead. Other refusals raise their :class:`~psqlmessages.MessagesError`. None of these
    breaks the transaction: who catches them may go on with it. ``token`` asks the listeners for
    answers, which a node connected under the same ident receives.
    """
    ident = ident if ident is not None else own_ident()
    call = calls.topic_send_as(ident, topic, EncodedBody.of(body), token or "")
    try:
        run(call, using)
    except NoListeners:
        if require_listener:
            raise
        _unheard(topic, using)
        return _told(using, ident, topic, [body], is_heard=False)
    return _told(using, ident, topic, [body], is_heard=True)


def send_many(
    topic: str,
    bodies: Iterable[Any],
    *,
    ident: str | None = None,
    require_listener: bool = False,
    using: str = DEFAULT_DB_ALIAS,
) -> int:
    """Send many bodies to a topic in one statement, all or none; return how many: 0 if unheard.

    See :func:`send`. Bytes cannot be mixed with other values.
    """
    bodies = list(bodies)
    ident = ident if ident is not None else own_ident()
    texts, enc = encode_many(bodies)
    call = calls.Call(_SEND_MANY, (*calls.check_names(ident, topic), enc, texts), _first_refusal)
    try:
        # A refusal takes back what was sent before it, and leaves what is around it whole.
        with transaction.atomic(using=using):
            run(call, using)
    except NoListeners:
        if require_listener:
            raise
        _unheard(topic, using)
        _told(using, ident, topic, bodies, is_heard=False)
        return 0
    except DatabaseError as error:
        # Of the commit, where no transaction is around it.
        raise_messages_error(error)
        raise
    _told(using, ident, topic, bodies, is_heard=True)
    return len(bodies)


def publish(
    topic: str, body: Any, *, ident: str | None = None, using: str = DEFAULT_DB_ALIAS
) -> Published:
    """Store a body for a topic's subscriptions, with the transaction of the ORM or not at all.

    It reaches the topic's live listeners too, and what it answers counts both. See :func:`send`
    for ``ident``; a refusal raises its error and breaks no transaction.
    """
    ident = ident if ident is not None else own_ident()
    published = run(stream_calls.publish(ident, topic, EncodedBody.of(body)), using)
    _told(using, ident, topic, [body], is_heard=_is_heard(published))
    return published


def publish_many(
    topic: str, bodies: Iterable[Any], *, ident: str | None = None, using: str = DEFAULT_DB_ALIAS
) -> Published:
    """Publish many bodies in one call, in their order, all or none; see :func:`publish`.

    Bytes cannot be mixed with other values.
    """
    bodies = list(bodies)
    ident = ident if ident is not None else own_ident()
    published = run(stream_calls.publish_many(ident, topic, bodies), using)
    _told(using, ident, topic, bodies, is_heard=_is_heard(published))
    return published


async def apublish(
    topic: str, body: Any, *, ident: str | None = None, using: str = DEFAULT_DB_ALIAS
) -> Published:
    """See :func:`publish`; on the connection that the asynchronous ORM uses here."""
    return await sync_to_async(publish)(topic, body, ident=ident, using=using)


def read_stream(
    client: str,
    topic: str,
    timeout: timedelta = DEFAULT_TIMEOUT,
    max_rows: int = DEFAULT_ROWS,
    *,
    using: str = DEFAULT_DB_ALIAS,
) -> list[StreamMessage]:
    """Read what came to a subscription since the last time, within ``transaction.atomic()``.

    The first time subscribes, from now on, for ``timeout`` after each time. What is read is passed
    with the commit, together with all else that was written: each message has exactly one effect.
    Rolled back, it comes again. Others who read the same subscription wait until then. Outside of
    ``atomic`` it raises TransactionManagementError; a refusal raises its error and breaks the
    transaction.
    """
    connection = postgresql(using)
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError(
            "read_stream passes what it reads at the end of a transaction: call it within"
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
    using: str = DEFAULT_DB_ALIAS,
) -> Any:
    """Ask a node and return the body of its answer, also from within ``atomic``.

    The question leaves at once, on a session of this process's own: it sees nothing that the
    transaction around it has not committed. The session's ident is PSQLMESSAGES["NODE"], a dot
    and something of its own, so rules name it ``shop.*``. Raises CallTimeout (CalleeGone where the
    node left), CallFailed where its handler failed, else the error of the refusal.
    """
    if rpc_client.stand_in is not None:
        return rpc_client.stand_in(node, body)
    future = rpc_client.caller_for(own_ident(), dsn(using)).ask(node, body, timeout)
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
    using: str = DEFAULT_DB_ALIAS,
) -> bool:
    """See :func:`send`; on the connection that the asynchronous ORM uses here."""
    return await sync_to_async(send)(
        topic, body, ident=ident, token=token, require_listener=require_listener, using=using
    )


async def acall(
    node: str,
    body: Any,
    *,
    timeout: timedelta = DEFAULT_CALL_TIMEOUT,  # noqa: ASYNC109 - as `call` has it
    using: str = DEFAULT_DB_ALIAS,
) -> Any:
    """See :func:`call`; any number of tasks may wait at once, and no thread does."""
    if rpc_client.stand_in is not None:
        return await sync_to_async(rpc_client.stand_in)(node, body)
    future = rpc_client.caller_for(own_ident(), dsn(using)).ask(node, body, timeout)
    return await asyncio.wrap_future(future)


def node(ident: str, *, using: str = DEFAULT_DB_ALIAS, options: Options | None = None) -> Node:
    """Make a node with a connection of its own to a configured database; use it with ``with``."""
    return Node(ident, dsn(using), options=options)


def _is_heard(published: Published) -> bool:
    return bool(published.listeners or published.subscribers)


def _first_refusal(answer: Any) -> None:
    if answer is not None:
        calls.raise_for_error(answer)


def _unheard(topic: str, using: str) -> None:
    _log.warning("nobody listens to topic %s of database %s: what was sent is lost", topic, using)


def _told(using: str, ident: str, topic: str, bodies: list[Any], *, is_heard: bool) -> bool:
    for observer in observers:
        for body in bodies:
            observer(using, ident, topic, body, is_heard)
    return is_heard
