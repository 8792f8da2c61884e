"""Streams: what publishing answers, what a subscription is, and the messages that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from psqlmessages import wire
from psqlmessages.exceptions import MessagesError
from psqlmessages.wire import MalformedPayload


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
