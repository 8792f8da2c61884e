"""Calls of the stream functions, their results, and stream messages. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psqlmessages import wire
from psqlmessages.client.calls import (
    Call,
    Merging,
    check_int,
    check_names,
    raise_for_error,
    read_changed,
    read_channel,
)
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.transactions import Rows, Script, SqlStatement
from psqlmessages.exceptions import MessagesError
from psqlmessages.wire import EncodedBody, MalformedPayload, encode_many


class Published(NamedTuple):
    """Result of ``publish``: the id, and the numbers of listeners and subscriptions reached.

    ``id`` is that of the last message if several were published, and None if none was.
    """

    id: int | None
    listeners: int
    subscribers: int


class SubscriptionState(NamedTuple):
    """Current state of a subscription.

    ``is_recovered`` is False if the subscription has expired and missed messages. After it has
    restarted, the node's next ``connect_stream`` sets ``is_recovered`` to True; the missed messages
    stay lost. ``since``: when the subscription started or restarted. ``backlog``: the number of
    unread messages. The subscription expires at ``expires`` unless it is read before.
    """

    is_recovered: bool
    since: datetime
    backlog: int
    expires: datetime


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message of a subscription; ``id`` increases along the stream of its topic."""

    id: int
    topic: str
    sender: str
    content: Any
    published_at: datetime
    error: MessagesError | None = None

    @property
    def body(self) -> Any:
        """The body as published; raises an error if its text does not match its encoding."""
        if self.error is not None:
            raise self.error
        return self.content


def message_of(topic: str, row: tuple[Any, ...]) -> StreamMessage:
    """Create a message from a row with the columns of COLUMNS."""
    id_, sender, payload, published_at, enc = row
    try:
        return StreamMessage(id_, topic, sender, wire.decode(payload, enc), published_at)
    except MalformedPayload as malformed:
        error = MessagesError(f"message {id_} of {topic} is malformed: {malformed}")
        return StreamMessage(id_, topic, sender, None, published_at, error)


COLUMNS: Final = "id, sender, payload, published_at, enc"

_MAX_SECONDS = 2**31 - 1

# If another reader has locked the subscription, do not block the connection of the node for long.
_BEGIN = SqlStatement("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'")
_COMMIT = SqlStatement("COMMIT")
_ROLLBACK = SqlStatement("ROLLBACK")


class SubscriptionKey(NamedTuple):
    """Node and topic of a subscription; it expires ``timeout_seconds`` after the last read."""

    ident: str
    topic: str
    timeout_seconds: int

    @classmethod
    def of(cls, ident: str, topic: str, timeout: Duration) -> SubscriptionKey:
        """Create a key from valid names and a timeout, which is rounded up to whole seconds."""
        ident, topic = check_names(ident, topic)
        seconds = math.ceil(seconds_of(timeout, "timeout"))
        if seconds > _MAX_SECONDS:
            raise ValueError(f"a timeout can be at most {_MAX_SECONDS} seconds, not {seconds}")
        return cls(ident, topic, seconds)


class ReadPosition(NamedTuple):
    """The last message that a reader has handed to the application.

    ``published_at`` is the latest publication time so far. After a failover that lost the last
    commits, new messages have the ids of lost ones, but later times.
    """

    id: int
    published_at: datetime

    def includes(self, id_: int, published_at: datetime) -> bool:
        """Return whether this message was handed to the application already."""
        return id_ <= self.id and published_at.astimezone(UTC) <= self.published_at

    def advance_to(self, id_: int, published_at: datetime) -> ReadPosition:
        """Return the position after this message was handed to the application."""
        # In UTC, because other zones repeat an hour in autumn, and Python compares local times.
        return ReadPosition(id_, max(published_at.astimezone(UTC), self.published_at))


START: Final = ReadPosition(0, datetime.min.replace(tzinfo=UTC))


class MessageBatch(NamedTuple):
    """Result of a read: rows of messages, or the state of the subscription if there are none.

    ``has_acknowledged``: the read has acknowledged earlier messages.
    """

    rows: Rows
    has_acknowledged: bool
    state: SubscriptionState | None


_PUBLISH_MANY: Final = "SELECT messages.publish_many(%s, %s, %b, %s)"
_MERGE_PUBLISHES: Final = Merging(
    _PUBLISH_MANY, (2,), lambda answer, _: [{**answer, "Id": id_} for id_ in answer["Ids"]]
)


def publish(ident: str, topic: str, body: Any) -> Call[Published]:
    """Store a body for a topic's subscriptions, and send it to its listeners."""
    return Call(
        "SELECT messages.publish(%s, %s, %s, %s)",
        (*check_names(ident, topic), *EncodedBody.of(body)),
        _read_published,
        may_share_round_trip=True,
        merging=_MERGE_PUBLISHES,
        lock_order=(topic,),
    )


def publish_many(ident: str, topic: str, bodies: Iterable[Any]) -> Call[Published]:
    """Publish many bodies in one call and one transaction, in their order."""
    texts, enc = encode_many(bodies)
    return Call(
        _PUBLISH_MANY,
        (*check_names(ident, topic), texts, enc),
        _read_published,
        may_share_round_trip=True,
        lock_order=(topic,),
    )


def unsubscribe(ident: str, topic: str) -> Call[bool]:
    """End a subscription; return False if there was none."""
    return Call("SELECT messages.unsubscribe(%s, %s)", check_names(ident, topic), read_changed)


def subscribe_from(
    ident: str, positions: Mapping[str, int], timeout_seconds: int
) -> Call[dict[str, int]]:
    """Create a call that starts or moves the subscriptions of a node: topic → position.

    Its result has the topics with removed messages after the position: topic → last removed id.
    """
    topics, ids = list(check_names(*positions)), list(positions.values())
    return Call(
        "SELECT messages.subscribe_from(%s, %s::text[], %s::bigint[], %s)",
        (*check_names(ident), topics, ids, timeout_seconds),
        lambda answer: {m["Topic"]: m["Removed"] for m in raise_for_error(answer)["Missed"]},
    )


def subscription(ident: str, topic: str) -> Call[SubscriptionState]:
    """Return the state of the subscription; raise NotSubscribed if there is none."""
    return Call("SELECT messages.subscription(%s, %s)", check_names(ident, topic), _read_state)


def connect_stream(ident: str) -> Call[str]:
    """Create a call that registers a node, and sets ``is_recovered`` of its live subscriptions."""
    sql = "SELECT messages.connect_stream(%s)"
    # The SQL function also registers the node, as init does.
    return Call(sql, check_names(ident), read_channel, registration_change=("init", ident))


def subscribe(key: SubscriptionKey, max_rows: int, columns: str = COLUMNS) -> SqlStatement:
    """Create the statement that subscribes or reads; its commit moves the position."""
    return SqlStatement(
        f"SELECT {columns} FROM messages.subscribe(%s, %s, %s::int, %s::int)",  # noqa: S608
        (*key, check_int(max_rows, "max_rows")),
    )


def acknowledge(key: SubscriptionKey, count: int, last: ReadPosition) -> Script[bool]:
    """Acknowledge the next ``count`` messages: read them again in a transaction that commits.

    If another reader has moved the position, these messages may include later ones than ``last``.
    Then acknowledges nothing, and returns False.
    """
    yield _BEGIN
    rows = yield subscribe(key, count, "id, published_at")
    is_unmoved = all(last.includes(*row) for row in rows)
    yield _COMMIT if is_unmoved else _ROLLBACK
    return is_unmoved


def read(
    key: SubscriptionKey, max_rows: int, count: int = 0, last: ReadPosition = START
) -> Script[MessageBatch]:
    """Acknowledge ``count`` messages of earlier reads; then read the next ones.

    The returned messages are not acknowledged.
    """
    has_acknowledged = count > 0 and (yield from acknowledge(key, count, last))
    yield _BEGIN
    rows = yield subscribe(key, max_rows)
    if rows:
        # A commit would acknowledge these messages.
        yield _ROLLBACK
        return MessageBatch(rows, has_acknowledged, None)
    call = subscription(key.ident, key.topic)
    ((answer,),) = yield SqlStatement(call.sql, call.params)
    yield _COMMIT
    return MessageBatch([], has_acknowledged, call.read(answer))


def _read_published(answer: Any) -> Published:
    answer = raise_for_error(answer)
    return Published(answer["Id"], answer["Listeners"], answer["Subscribers"])


def _read_state(answer: Any) -> SubscriptionState:
    answer = raise_for_error(answer)
    return SubscriptionState(
        answer["Recovered"],
        datetime.fromisoformat(answer["Since"]),
        answer["Backlog"],
        datetime.fromisoformat(answer["Expires"]),
    )
