"""Stream calls: publishing and subscriptions as values, like those of ``calls``. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from psqlmessages.client.calls import Call, checked, names
from psqlmessages.client.streams import Published, SubscriptionState
from psqlmessages.client.transactions import Rows, Script, Statement
from psqlmessages.wire import Body, encode_many

COLUMNS: Final = "id, sender, payload, published_at, enc"

_MOST_SECONDS = 2**31 - 1

# Whoever reads the same subscription may hold it for long; a node's connection must not hang.
_BEGIN = Statement("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'")
_COMMIT = Statement("COMMIT")
_ROLLBACK = Statement("ROLLBACK")


class Place(NamedTuple):
    """Whose subscription to which topic, and for how many seconds each call keeps it alive."""

    ident: str
    topic: str
    seconds: int

    @classmethod
    def of(cls, ident: str, topic: str, timeout: timedelta) -> Place:
        """Check the names and the timeout; a part of a second counts as a whole one."""
        ident, topic = names(ident, topic)
        seconds = math.ceil(timeout.total_seconds())
        if seconds > _MOST_SECONDS:
            raise ValueError(f"a timeout has at most {_MOST_SECONDS} seconds, not {seconds}")
        return cls(ident, topic, seconds)


class Last(NamedTuple):
    """The last message handed out: its id, and the latest time at which one was published.

    Ids come again where a server has lost its last commits; what has them then is younger.
    """

    id: int
    published_at: datetime

    def includes(self, id_: int, published_at: datetime) -> bool:
        """Whether a message was handed out."""
        return id_ <= self.id and published_at.astimezone(UTC) <= self.published_at

    def then(self, id_: int, published_at: datetime) -> Last:
        """Hand out a message."""
        # In the server's zone an hour comes twice in autumn: Python compares its times as written.
        return Last(id_, max(published_at.astimezone(UTC), self.published_at))

    def up_to(self, id_: int) -> Last:
        """Look no further than an id."""
        return self._replace(id=min(id_, self.id))


NOTHING: Final = Last(0, datetime.min.replace(tzinfo=UTC))


class Batch(NamedTuple):
    """What a reading found. ``state`` is that of a subscription without anything to read.

    ``is_confirmed``: what had been read before is passed.
    """

    rows: Rows
    is_confirmed: bool
    state: SubscriptionState | None


def publish(ident: str, topic: str, body: Body) -> Call[Published]:
    """Publish as a node without a session; works on any connection, as all of these."""
    return Call(
        "SELECT messages.publish(%s, %s, %s, %s)",
        (*names(ident, topic), body.text, body.enc),
        _published,
        is_send=True,
    )


def publish_many(ident: str, topic: str, bodies: Sequence[Any]) -> Call[Published]:
    """Publish many values in one call, which has one encoding for all of them."""
    texts, enc = encode_many(list(bodies))
    return Call(
        "SELECT messages.publish_many(%s, %s, %b, %s)",
        (*names(ident, topic), texts, enc),
        _published,
        is_send=True,
    )


def unsubscribe(ident: str, topic: str) -> Call[bool]:
    """End a subscription; the result is whether there was one."""
    return Call(
        "SELECT messages.unsubscribe(%s, %s)",
        names(ident, topic),
        lambda answer: not checked(answer).get("Already"),
    )


def subscription(ident: str, topic: str) -> Call[SubscriptionState]:
    """Ask for the state of a subscription."""
    return Call("SELECT messages.subscription(%s, %s)", names(ident, topic), _state)


def connect_stream(ident: str) -> Call[str]:
    """Register a node; subscriptions that are alive count as recovered from now on."""
    return Call(
        "SELECT messages.connect_stream(%s)",
        names(ident),
        lambda answer: str(checked(answer)["Channel"]),
        ("init", ident),
    )


def subscribe(place: Place, max_rows: int, columns: str = COLUMNS) -> Statement:
    """Read on, or begin; the position moves with the transaction around it."""
    return Statement(
        f"SELECT {columns} FROM messages.subscribe(%s, %s, %s::int, %s::int)",  # noqa: S608
        (*place, max_rows),
    )


def confirm(place: Place, count: int, last: Last) -> Script[bool]:
    """Pass the next messages, so many, which have been read before.

    False, and nothing is passed, where these are others meanwhile: someone else read here too.
    """
    yield _BEGIN
    rows = yield subscribe(place, count, "id, published_at")
    is_ours = all(last.includes(*row) for row in rows)
    yield _COMMIT if is_ours else _ROLLBACK
    return is_ours


def read(place: Place, max_rows: int, count: int = 0, last: Last = NOTHING) -> Script[Batch]:
    """Confirm what was read before, and read on without passing it."""
    is_confirmed = bool(count) and (yield from confirm(place, count, last))
    yield _BEGIN
    rows = yield subscribe(place, max_rows)
    if rows:
        yield _ROLLBACK
        return Batch(rows, is_confirmed, None)
    call = subscription(place.ident, place.topic)
    ((answer,),) = yield Statement(call.sql, call.params)
    yield _COMMIT
    return Batch([], is_confirmed, call.read(answer))


def _published(answer: Any) -> Published:
    answer = checked(answer)
    return Published(answer["Id"], answer["Listeners"], answer["Subscribers"])


def _state(answer: Any) -> SubscriptionState:
    answer = checked(answer)
    return SubscriptionState(
        answer["Recovered"],
        datetime.fromisoformat(answer["Since"]),
        answer["Backlog"],
        datetime.fromisoformat(answer["Expires"]),
    )
