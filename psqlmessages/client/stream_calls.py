"""Calls of the stream functions as values. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from psqlmessages import wire
from psqlmessages.client.calls import Call, check_names, raise_for_error
from psqlmessages.client.transactions import Rows, Script, SqlStatement
from psqlmessages.exceptions import MessagesError
from psqlmessages.wire import EncodedBody, MalformedPayload, encode_many

# Streams: what publishing answers, what a subscription is, and the messages that it gives.


class Published(NamedTuple):
    """What ``publish`` answers: the id of the (last) message, and how many it is for now.

    ``id`` is None where nothing was published: no bodies.
    """

    id: int | None
    listeners: int
    subscribers: int


class SubscriptionState(NamedTuple):
    """A subscription as it is now.

    ``is_recovered`` is False where it had timed out before ``since``, and messages were missed.
    ``backlog`` counts messages that wait; it dies at ``expires`` if nobody reads from it.
    """

    is_recovered: bool
    since: datetime
    backlog: int
    expires: datetime


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message of a subscription; ``id`` grows along the stream of its topic."""

    id: int
    topic: str
    sender: str
    content: Any
    published_at: datetime
    error: MessagesError | None = None

    @property
    def body(self) -> Any:
        """The body as it was published; raises where its text is not of its encoding."""
        if self.error is not None:
            raise self.error
        return self.content


def message_of(topic: str, row: tuple[Any, ...]) -> StreamMessage:
    """Make a message of a row of ``stream_calls.COLUMNS``."""
    id_, sender, payload, published_at, enc = row
    try:
        return StreamMessage(id_, topic, sender, wire.decode(payload, enc), published_at)
    except MalformedPayload as malformed:
        error = MessagesError(f"message {id_} of {topic} is malformed: {malformed}")
        return StreamMessage(id_, topic, sender, None, published_at, error)


COLUMNS: Final = "id, sender, payload, published_at, enc"

_MOST_SECONDS = 2**31 - 1

# Whoever reads the same subscription may hold it for long; a node's connection must not hang.
_BEGIN = SqlStatement("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'")
_COMMIT = SqlStatement("COMMIT")
_ROLLBACK = SqlStatement("ROLLBACK")


class SubscriptionKey(NamedTuple):
    """Whose subscription to which topic, and for how many seconds each call keeps it alive."""

    ident: str
    topic: str
    seconds: int

    @classmethod
    def of(cls, ident: str, topic: str, timeout: timedelta) -> SubscriptionKey:
        """Check the names and the timeout; a part of a second counts as a whole one."""
        ident, topic = check_names(ident, topic)
        seconds = math.ceil(timeout.total_seconds())
        if seconds > _MOST_SECONDS:
            raise ValueError(f"a timeout has at most {_MOST_SECONDS} seconds, not {seconds}")
        return cls(ident, topic, seconds)


class Watermark(NamedTuple):
    """The last message handed out: its id, and the latest time at which one was published.

    Ids come again where a server has lost its last commits; what has them then is younger.
    """

    id: int
    published_at: datetime

    def includes(self, id_: int, published_at: datetime) -> bool:
        """Whether a message was handed out."""
        return id_ <= self.id and published_at.astimezone(UTC) <= self.published_at

    def then(self, id_: int, published_at: datetime) -> Watermark:
        """Hand out a message."""
        # In the server's zone an hour comes twice in autumn: Python compares its times as written.
        return Watermark(id_, max(published_at.astimezone(UTC), self.published_at))

    def up_to(self, id_: int) -> Watermark:
        """Look no further than an id."""
        return self._replace(id=min(id_, self.id))


NOTHING: Final = Watermark(0, datetime.min.replace(tzinfo=UTC))


class MessageBatch(NamedTuple):
    """What a reading found. ``state`` is that of a subscription without anything to read.

    ``is_confirmed``: what had been read before is passed.
    """

    rows: Rows
    is_confirmed: bool
    state: SubscriptionState | None


def publish(ident: str, topic: str, body: EncodedBody) -> Call[Published]:
    """Publish as a node without a session; works on any connection, as all of these."""
    return Call(
        "SELECT messages.publish(%s, %s, %s, %s)",
        (*check_names(ident, topic), body.text, body.enc),
        _published,
        is_send=True,
    )


def publish_many(ident: str, topic: str, bodies: Sequence[Any]) -> Call[Published]:
    """Publish many values in one call, which has one encoding for all of them."""
    texts, enc = encode_many(list(bodies))
    return Call(
        "SELECT messages.publish_many(%s, %s, %b, %s)",
        (*check_names(ident, topic), texts, enc),
        _published,
        is_send=True,
    )


def unsubscribe(ident: str, topic: str) -> Call[bool]:
    """End a subscription; the result is whether there was one."""
    return Call(
        "SELECT messages.unsubscribe(%s, %s)",
        check_names(ident, topic),
        lambda answer: not raise_for_error(answer).get("Already"),
    )


def subscription(ident: str, topic: str) -> Call[SubscriptionState]:
    """Ask for the state of a subscription."""
    return Call("SELECT messages.subscription(%s, %s)", check_names(ident, topic), _state)


def connect_stream(ident: str) -> Call[str]:
    """Register a node; subscriptions that are alive count as recovered from now on."""
    return Call(
        "SELECT messages.connect_stream(%s)",
        check_names(ident),
        lambda answer: str(raise_for_error(answer)["Channel"]),
        ("init", ident),
    )


def subscribe(place: SubscriptionKey, max_rows: int, columns: str = COLUMNS) -> SqlStatement:
    """Read on, or begin; the position moves with the transaction around it."""
    return SqlStatement(
        f"SELECT {columns} FROM messages.subscribe(%s, %s, %s::int, %s::int)",  # noqa: S608
        (*place, max_rows),
    )


def confirm(place: SubscriptionKey, count: int, last: Watermark) -> Script[bool]:
    """Pass the next messages, so many, which have been read before.

    False, and nothing is passed, where these are others meanwhile: someone else read here too.
    """
    yield _BEGIN
    rows = yield subscribe(place, count, "id, published_at")
    is_ours = all(last.includes(*row) for row in rows)
    yield _COMMIT if is_ours else _ROLLBACK
    return is_ours


def read(
    place: SubscriptionKey, max_rows: int, count: int = 0, last: Watermark = NOTHING
) -> Script[MessageBatch]:
    """Confirm what was read before, and read on without passing it."""
    is_confirmed = bool(count) and (yield from confirm(place, count, last))
    yield _BEGIN
    rows = yield subscribe(place, max_rows)
    if rows:
        yield _ROLLBACK
        return MessageBatch(rows, is_confirmed, None)
    call = subscription(place.ident, place.topic)
    ((answer,),) = yield SqlStatement(call.sql, call.params)
    yield _COMMIT
    return MessageBatch([], is_confirmed, call.read(answer))


def _published(answer: Any) -> Published:
    answer = raise_for_error(answer)
    return Published(answer["Id"], answer["Listeners"], answer["Subscribers"])


def _state(answer: Any) -> SubscriptionState:
    answer = raise_for_error(answer)
    return SubscriptionState(
        answer["Recovered"],
        datetime.fromisoformat(answer["Since"]),
        answer["Backlog"],
        datetime.fromisoformat(answer["Expires"]),
    )
