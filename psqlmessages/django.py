"""The public functions for Django projects: send, call, publish, push, reserve, handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, transaction

from psqlmessages import rpc_client
from psqlmessages.client import calls, queue_calls, stream_calls
from psqlmessages.client.durations import Duration, as_timedelta
from psqlmessages.client.node import Node
from psqlmessages.client.options import DEFAULT_CALL_TIMEOUT, Options
from psqlmessages.client.queue_calls import DEFAULT_DURATION, Element, Headers
from psqlmessages.client.stream_calls import Published, StreamMessage, message_of
from psqlmessages.client.subscription import DEFAULT_ROWS, DEFAULT_TIMEOUT
from psqlmessages.client.transactions import SqlStatement
from psqlmessages.exceptions import LeaseExpired, MessagesError, NoListeners
from psqlmessages.handler_registry import registry
from psqlmessages.orm import (
    direct_dsn,
    explaining_refused_calls,
    fetch,
    own_ident,
    postgresql_connection,
    raise_messages_error,
    resolve_alias,
    run,
)
from psqlmessages.retry import RateLimitedLogger
from psqlmessages.rules import code as rules
from psqlmessages.wire import encode_many, list_values

__all__ = [
    "acall",
    "apop",
    "apublish",
    "apublish_many",
    "apush",
    "apush_many",
    "aread_stream",
    "areserve",
    "areserve_many",
    "asend",
    "asend_many",
    "call",
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
    "reserve_many",
    "rules",
    "send",
    "send_many",
]

T = TypeVar("T")

on_topic = registry.on_topic
on_rpc = registry.on_rpc

_log = RateLimitedLogger(logging.getLogger("psqlmessages"))

# Functions that psqlmessages.testing adds. Each sent or published message calls them with the
# database alias, ident, topic, body and has_receivers.
sent_callbacks: list[Callable[[str, str, str, Any, bool], None]] = []

# LIMIT ends sending at the first error.
_SEND_MANY = """
    SELECT sent.answer
    FROM (
        SELECT messages.topic_send_as(%s, %s, b.body, NULL, %s) AS answer
        FROM unnest(%s::text[]) AS b (body)
    ) AS sent
    WHERE sent.answer ->> 'Err' <> '0'
    LIMIT 1
"""


def _in_transaction(function: Callable[..., T]) -> Callable[..., T]:
    """Make a function run in its own transaction."""

    @wraps(function)
    def wrapped(*arguments: Any, using: str | None = None, **options: Any) -> T:
        with transaction.atomic(using=resolve_alias(using)):
            return function(*arguments, using=using, **options)

    return wrapped


def send(
    topic: str,
    body: Any,
    *,
    ident: str | None = None,
    token: str | None = None,
    require_listener: bool = False,
    using: str | None = None,
) -> bool:
    """Send to a topic within Django's transaction: the message is sent when it commits.

    ``body`` is str, bytes or a JSON value; ``ident`` is by default PSQLMESSAGES["NODE"]. If there
    are no listeners, log a warning and return False; if ``require_listener``, raise NoListeners. If
    the call is refused, raise another MessagesError. You can catch both errors and continue: they
    do not break the transaction. With a ``token``, listeners can answer; the connected node of this
    ident receives the answers.
    """
    ident = own_ident(ident)
    call = calls.topic_send_as(ident, topic, body, token or "")
    has_listeners = True
    try:
        run(call, using)
    except NoListeners:
        if require_listener:
            raise
        _log_lost_message(topic, using)
        has_listeners = False
    _call_sent_callbacks(using, ident, topic, [body], has_receivers=has_listeners)
    return has_listeners


# sync_to_async runs `send` in the thread of the asynchronous ORM, so both use the same connection.
asend = sync_to_async(send)


def send_many(
    topic: str,
    bodies: Iterable[Any],
    *,
    ident: str | None = None,
    require_listener: bool = False,
    using: str | None = None,
) -> int:
    """Send many bodies to a topic in one statement, all or none; return their number.

    Without listeners, return 0. Bytes cannot be mixed with other values. See :func:`send`.
    """
    bodies = list_values(bodies, "bodies")
    ident = own_ident(ident)
    texts, enc = encode_many(bodies)
    names = calls.check_names(ident, topic)
    has_listeners = True
    try:
        # An error rolls back the bodies sent before it, but not the outer transaction.
        with transaction.atomic(using=resolve_alias(using)):
            for (answer,) in fetch(_SEND_MANY, (*names, enc, texts), using):
                with explaining_refused_calls(_SEND_MANY, names, using):
                    calls.raise_for_error(answer)
    except NoListeners:
        if require_listener:
            raise
        _log_lost_message(topic, using)
        has_listeners = False
    except DatabaseError as error:
        # If there is no outer transaction, the error may come from the commit.
        raise_messages_error(error)
        raise
    _call_sent_callbacks(using, ident, topic, bodies, has_receivers=has_listeners)
    return len(bodies) if has_listeners else 0


asend_many = sync_to_async(send_many)


def publish(
    topic: str, body: Any, *, ident: str | None = None, using: str | None = None
) -> Published:
    """Store a body for a topic's subscriptions, within Django's transaction.

    The body is also sent to the nodes that listen to the topic. The result counts subscriptions and
    listeners. For ``ident`` and errors see :func:`send`.
    """
    ident = own_ident(ident)
    call = stream_calls.publish(ident, topic, body)
    return _publish(call, using, ident, topic, [body])


apublish = sync_to_async(publish)


def publish_many(
    topic: str, bodies: Iterable[Any], *, ident: str | None = None, using: str | None = None
) -> Published:
    """Publish many bodies in one call, in order, all or none; see :func:`publish`.

    Bytes cannot be mixed with other values.
    """
    bodies = list_values(bodies, "bodies")
    ident = own_ident(ident)
    return _publish(stream_calls.publish_many(ident, topic, bodies), using, ident, topic, bodies)


apublish_many = sync_to_async(publish_many)


def read_stream(
    client: str,
    topic: str,
    timeout: Duration = DEFAULT_TIMEOUT,
    max_rows: int = DEFAULT_ROWS,
    *,
    using: str | None = None,
) -> list[StreamMessage]:
    """Read new messages of the subscription of node ``client``, within ``transaction.atomic()``.

    The first call creates the subscription, which expires ``timeout`` after the last call. The
    commit acknowledges the messages together with your own writes, so each message takes effect
    exactly once. If you roll back, the messages are delivered again. Other readers of the
    subscription wait until the transaction ends. Raises TransactionManagementError outside of
    ``atomic``. An error from the server breaks the transaction.
    """
    _require_atomic(using, "read_stream acknowledges", "messages")
    subscription = stream_calls.SubscriptionKey.of(client, topic, timeout)
    rows = fetch(*stream_calls.subscribe(subscription, max_rows), using)
    return [message_of(topic, row) for row in rows]


# In its own transaction, because Django has no asynchronous ones. The commit acknowledges.
aread_stream = sync_to_async(_in_transaction(read_stream))


def push(  # noqa: PLR0913 - one option per property of the element
    queue: str,
    body: Any,
    *,
    headers: Headers | None = None,
    mature: datetime | None = None,
    delay: Duration | None = None,
    tries: int = 0,
    key: str | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> int:
    """Add an element to a queue, within Django's transaction; return its id.

    The element becomes available with the commit, or later: at ``mature`` or after ``delay``. A
    second push with the same ``key``, within the queue's key timeout, adds nothing and returns the
    id of the first. ``tries``: failed attempts so far. For ``ident`` and errors see :func:`send`.
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
    delay: Duration | None = None,
    tries: int = 0,
    keys: Iterable[str | None] | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> list[int]:
    """Push many elements in one call, in order, all or none; return their ids.

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


apush = sync_to_async(push)
apush_many = sync_to_async(push_many)


def pop(
    queue: str, count: int = 1, *, ident: str | None = None, using: str | None = None
) -> list[Element]:
    """Take and remove up to ``count`` elements within ``transaction.atomic()``; does not wait.

    The commit removes the elements together with your other writes, so each takes effect exactly
    once. If you roll back, the elements return with the same number of tries. Until the transaction
    ends, other consumers do not get them. Raises TransactionManagementError outside of ``atomic``.
    An error from the server breaks the transaction.
    """
    _require_atomic(using, "pop removes", "elements")
    return _fetch_elements(queue, queue_calls.pop(own_ident(ident), queue, count), using)


# In its own transaction, like aread_stream. The commit removes the elements.
apop = sync_to_async(_in_transaction(pop))


@dataclass(slots=True)
class ReservedElement(Element):
    """A leased element. It returns to the queue when its lease expires, unless you commit it."""

    ident: str = field(default="", repr=False)
    using: str | None = field(default=None, repr=False)

    def commit(self) -> None:
        """Remove the element, within the transaction of your writes.

        Raises LeaseExpired if another consumer may have taken the element. Then roll back.
        """
        self._check(run(queue_calls.commit(self.ident, self), self.using))

    def rollback(self, *, delay: Duration | None = None) -> bool:
        """Give the element back as failed: to the end of the queue, or after ``delay``.

        This counts one more try. Returns True if it was the last one: the element then became a
        dead letter. Raises LeaseExpired if the lease has ended already.
        """
        result = run(queue_calls.rollback(self.ident, self, delay=delay), self.using)
        self._check(result)
        return result.dead_lettered[0]

    def renew(self, duration: Duration = DEFAULT_DURATION) -> None:
        """Extend the lease to ``duration`` from now; raise LeaseExpired if it has ended."""
        statement = queue_calls.renew(self.ident, self.queue, self.lease, duration)
        self._check(fetch(*statement, self.using))

    acommit = sync_to_async(commit)
    arollback = sync_to_async(rollback)
    arenew = sync_to_async(renew)

    def _check(self, is_valid: object) -> None:
        if not is_valid:
            raise LeaseExpired(f"the lease of element {self.id} of {self.queue} has ended")


def reserve_many(
    queue: str,
    count: int,
    duration: Duration = DEFAULT_DURATION,
    *,
    ident: str | None = None,
    using: str | None = None,
) -> list[ReservedElement]:
    """Lease up to ``count`` elements. If not committed, they return after ``duration``.

    Does not wait for elements. Call this function outside of ``atomic``, and ``commit`` of each
    element within the ``atomic`` block of your writes.
    """
    ident = own_ident(ident)
    elements = _fetch_elements(queue, queue_calls.reserve(ident, queue, count, duration), using)
    names = [each.name for each in fields(Element)]
    return [
        ReservedElement(*(getattr(element, name) for name in names), ident, using)
        for element in elements
    ]


areserve_many = sync_to_async(reserve_many)


@contextmanager
def reserve(
    queue: str,
    duration: Duration = DEFAULT_DURATION,
    *,
    delay: Duration | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> Iterator[ReservedElement | None]:
    """Handle one element: ``with reserve("jobs") as job``; ``job`` is None if none is available.

    The block runs in a transaction, which also removes the element, so the block's writes take
    effect exactly once. If another consumer has taken the element after the lease expired,
    LeaseExpired rolls the writes back. After an exception the element is given back: see
    :meth:`ReservedElement.rollback`. Use ``reserve`` outside of ``atomic``.
    """
    if delay is not None:
        as_timedelta(delay, "delay")  # raise an error now, not in place of the block's exception
    job = next(iter(reserve_many(queue, 1, duration, ident=ident, using=using)), None)
    try:
        with transaction.atomic(using=resolve_alias(using)):
            yield job
            if job is not None and not job.is_settled:
                job.commit()
    except BaseException:
        if job is not None:
            with suppress(MessagesError, DatabaseError):
                job.rollback(delay=delay)
        raise


@asynccontextmanager
async def areserve(
    queue: str,
    duration: Duration = DEFAULT_DURATION,
    *,
    delay: Duration | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> AsyncIterator[ReservedElement | None]:
    """Handle one element in asynchronous code; see :func:`reserve`. Opens no transaction."""
    if delay is not None:
        as_timedelta(delay, "delay")
    job = next(iter(await areserve_many(queue, 1, duration, ident=ident, using=using)), None)
    try:
        yield job
        if job is not None and not job.is_settled:
            await sync_to_async(job.commit)()
    except BaseException:
        if job is not None:
            with suppress(MessagesError, DatabaseError):
                await sync_to_async(job.rollback)(delay=delay)
        raise


def _fetch_elements(queue: str, statement: SqlStatement, using: str | None) -> list[Element]:
    return queue_calls.elements(queue, fetch(*statement, using))


def call(
    node: str, body: Any, *, timeout: Duration = DEFAULT_CALL_TIMEOUT, using: str | None = None
) -> Any:
    """Call a node and return the body of its answer; also works within ``atomic``.

    The call is sent immediately, on a separate session of this process, so the other node does not
    see uncommitted changes of your transaction. The calling node is PSQLMESSAGES["NODE"], a dot and
    a unique suffix: the rule must name a pattern such as ``shop.*``. Raises CallTimeout if no
    answer comes in time, CalleeGone if the node disconnected, CallFailed if the node has no handler
    or its handler failed, or another MessagesError.
    """
    as_timedelta(timeout, "timeout")
    if rpc_client.answer_in_tests is not None:
        return rpc_client.answer_in_tests(node, body)
    future = rpc_client.get_client(own_ident(), direct_dsn(using)).submit(node, body, timeout)
    try:
        return future.result()
    finally:
        future.cancel()


async def acall(
    node: str,
    body: Any,
    *,
    timeout: Duration = DEFAULT_CALL_TIMEOUT,  # noqa: ASYNC109 - same signature as `call`
    using: str | None = None,
) -> Any:
    """Call a node, see :func:`call`. Tasks that wait for an answer use no threads."""
    as_timedelta(timeout, "timeout")
    if rpc_client.answer_in_tests is not None:
        return await sync_to_async(rpc_client.answer_in_tests)(node, body)
    future = rpc_client.get_client(own_ident(), direct_dsn(using)).submit(node, body, timeout)
    return await asyncio.wrap_future(future)


def node(ident: str, *, using: str | None = None, options: Options | None = None) -> Node:
    """Create a node with its own connection to a configured database, for use in ``with``."""
    return Node(ident, direct_dsn(using), options=options)


def _require_atomic(using: str | None, effect: str, objects: str) -> None:
    if not postgresql_connection(using).in_atomic_block:
        raise transaction.TransactionManagementError(
            f"{effect} {objects} when the transaction commits: call it within"
            f" transaction.atomic(), and handle the {objects} there."
        )


def _publish(
    call: calls.Call[Published], using: str | None, ident: str, topic: str, bodies: list[Any]
) -> Published:
    published = run(call, using)
    has_receivers = bool(published.listeners or published.subscribers)
    _call_sent_callbacks(using, ident, topic, bodies, has_receivers=has_receivers)
    return published


def _log_lost_message(topic: str, using: str | None) -> None:
    alias = resolve_alias(using)
    _log.warning("topic %s of database %s has no listeners: the message is lost", topic, alias)


def _call_sent_callbacks(
    using: str | None, ident: str, topic: str, bodies: list[Any], *, has_receivers: bool
) -> None:
    for callback in sent_callbacks:
        for body in bodies:
            callback(resolve_alias(using), ident, topic, body, has_receivers)
