"""Messages of a node: notifications, large bodies, headers, and answers of pending calls."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from math import inf
from typing import Any, Final, Protocol

import psycopg

from psqlmessages import wire
from psqlmessages.client import calls
from psqlmessages.client.heartbeat import PROBE
from psqlmessages.client.transactions import Steps
from psqlmessages.exceptions import CalleeGone, ConnectionLost, MessagesError
from psqlmessages.wire import MalformedPayload

RPC = "Rpc"
TOPIC = "Topic"
RETURN = "Return"
SYS = "Sys"
TYPES = frozenset({RPC, TOPIC, RETURN, SYS})

CONNECTION_LOST = "connection_lost"
RECONNECTED = "reconnected"


class Replier(Protocol):
    """The node that received a message and can answer it."""

    def reply(self, message: Message, body: Any) -> Any:
        """Send the answer; an AsyncNode returns a coroutine."""

    def reply_error(self, message: Message, reason: str) -> Any:
        """Send the answer that the request failed; an AsyncNode returns a coroutine."""


@dataclass(slots=True)
class Message:
    """A message or system event. An event has type "Sys"; ``event`` and ``ident`` describe it.

    ``to`` is the receiving node of an "Rpc" or "Return", and the topic of a "Topic". ``size`` is
    the number of bytes of the encoded body. ``away`` is set in the local event "reconnected" only:
    for how long there was no connection.
    """

    type: str
    sender: str = ""
    to: str = ""
    content: Any = None
    topic: str = ""
    event: str = ""
    ident: str = ""
    token: str | None = None
    id: int | None = None
    size: int = 0
    away: timedelta | None = None
    error: MessagesError | None = None
    replier: Replier | None = field(default=None, repr=False, compare=False)
    is_answered: bool = field(default=False, compare=False)

    @property
    def body(self) -> Any:
        """The decoded body; raises an error if a large body could not be fetched."""
        if self.error is not None:
            raise self.error
        return self.content

    @property
    def wants_answer(self) -> bool:
        """Whether the sender asks for an answer, by giving a token."""
        return self.token is not None and self.type in (RPC, TOPIC)

    def reply(self, body: Any) -> Any:
        """Answer the sender; await the result if an AsyncNode has received the message."""
        return self._begin_answer().reply(self, body)

    def reply_error(self, reason: str) -> Any:
        """Answer that the request failed: the caller gets CallFailed. See :meth:`reply`."""
        return self._begin_answer().reply_error(self, reason)

    def _begin_answer(self) -> Replier:
        """Mark the message as answered, and return the node that sends the answer."""
        if self.replier is None or not self.wants_answer:
            raise ValueError("cannot answer this message: its sender does not wait for an answer")
        self.is_answered = True
        return self.replier


@dataclass(slots=True)
class Notification:
    """A notification: its header, the text of its body, and the whole payload.

    ``text`` is None if there is no body, or if the body is too large for a notification
    (``is_large``). A large body is fetched later, and set as ``fetched_text``. For ``away`` see
    :class:`Message`.
    """

    header: dict[str, Any]
    text: str | None
    payload: str
    away: timedelta | None = None
    fetched_text: str | None = None
    is_large: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_large = "Dkey" in self.header


def message_of(notification: Notification, text: str | None, replier: Replier) -> Message:
    """Create a message with the decoded ``text`` as body; raise MalformedPayload."""
    get, kind = notification.header.get, notification.header["Type"]
    to = get("To", "")
    # A dozen keyword arguments would double the time of this function.
    return Message(
        kind,
        get("From", ""),
        to,
        None if text is None else wire.decode(text, get("Enc")),
        get("Topic", to if kind == TOPIC else ""),
        get("Evt", ""),
        get("Ident", ""),
        get("Token"),
        get("Id"),
        get("Size", 0),
        away=notification.away,
        replier=replier,
    )


@contextmanager
def unanswered_if_not_sent(message: Message) -> Iterator[None]:
    """Mark a message as not answered if its answer fails and was not sent."""
    try:
        yield
    except calls.NOTHING_SENT:
        message.is_answered = False
        raise


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that waits for answers: notifications, or the error that ends the wait.

    ``on_answer`` wakes the caller. ``is_sent``: the server has accepted the call. ``seconds`` is
    the timeout. An AsyncNode ends the call at ``deadline``. If the server has not accepted the call
    by then, the AsyncNode adds ``extra_seconds`` to the deadline, once.
    """

    token: str
    callee: str
    on_answer: Callable[[], object] = lambda: None
    deadline: float = inf
    seconds: float = inf
    extra_seconds: float = 0.0
    answers: deque[Notification | MessagesError] = field(default_factory=deque)
    is_sent: bool = False
    _error: MessagesError | None = None

    def add(self, answer: Notification | MessagesError) -> None:
        """Add an answer and wake the caller."""
        self.answers.append(answer)
        self.on_answer()

    def on_event(self, event: str) -> None:
        """Record that the callee has disconnected, crashed or connected again.

        Events that are read before the call is sent may be old, so only the last one counts.
        """
        if event == "connect" and isinstance(self._error, CalleeGone):
            self._error = None
        elif event in ("crash", "disconnect"):
            self.fail(CalleeGone(f"{self.callee} has gone before it answered ({event})"))

    def fail(self, error: MessagesError) -> None:
        """Record an error that ends the wait: now, or when the call is sent."""
        self._error = error
        # Check this after setting the error: another thread may run ``on_sent`` now.
        if self.is_sent:
            self.add(error)

    def on_connected(self) -> None:
        """Forget an error of the old connection if the call is sent only on the new one."""
        if not self.is_sent:
            self._error = None

    def on_sent(self) -> None:
        """Record that the call was sent; from now on, an error ends the wait immediately."""
        self.is_sent = True
        if self._error is not None:
            self.add(self._error)


# Large bodies: each is fetched together with those behind it in the inbox. No I/O.

_MAX_BODIES: Final = 32
# A larger batch would delay its first body and occupy memory.
_MAX_BYTES: Final = 64 * 1024


def fetch_text(notification: Notification, inbox: Iterable[Notification]) -> Steps[str | None]:
    """Return the text of a body, fetched if large; raise MessagesError if it no longer exists."""
    if not notification.is_large:
        return notification.text
    if notification.fetched_text is None:
        batch = _large_bodies_from(notification, inbox)
        if len(batch) > 1:
            # A single body may cause an error, so then each is fetched separately.
            with suppress(MessagesError, psycopg.Error):
                texts = yield calls.get_data_many([each.payload for each in batch])
                for fetched, text in zip(batch, texts, strict=True):
                    fetched.fetched_text = text
    if notification.fetched_text is None:
        call = calls.get_data(notification.payload)
        try:
            payload = yield call
        except ConnectionLost:
            # Fetching changes nothing, so retry it on the next connection.
            payload = yield call
        notification.fetched_text = payload.text
    return notification.fetched_text


def _large_bodies_from(
    notification: Notification, inbox: Iterable[Notification]
) -> list[Notification]:
    batch, size = [notification], notification.header.get("Size", 0)
    for following in list(islice(inbox, _MAX_BODIES - 1)):
        if following.is_large and following.fetched_text is None:
            size += following.header.get("Size", 0)
            if size > _MAX_BYTES:
                break
            batch.append(following)
    return batch


# Header cache: headers of one sender and topic differ in size and id only, so parse one of them.

# Groups: size, the text between size and id, id. The text is cached only after the JSON parser has
# confirmed size and id: a string in the header may contain the same characters.
_TOPIC_HEADER: Final = re.compile(
    r'\{"Type":"Topic","Size":([0-9]{1,18}),(.{0,4000}),"Id":([0-9]{1,18})\}\n'
)
_FIELD_TYPES: Final[dict[str, type]] = {
    "Id": int,
    "Size": int,
    **dict.fromkeys(
        ("From", "To", "Token", "Evt", "Ident", "Topic", "Dkey", "Enc", "Err", "Errstr"), str
    ),
}
# Events that a node or gateway creates locally. PostgreSQL does not send them.
_LOCAL_EVENTS = frozenset({CONNECTION_LOST, RECONNECTED})
# At this number of headers the cache is cleared.
_MAX_CACHED: Final = 1_000


class HeaderCache:
    """Cache of valid headers; the key is the text between size and id."""

    def __init__(self) -> None:
        self._headers: dict[str, dict[str, Any]] = {}

    def split(self, payload: str) -> tuple[dict[str, Any], str] | None:
        """Return header and body of a payload; None if the cache has no such header."""
        match = _TOPIC_HEADER.match(payload)
        if match is None or (cached := self._headers.get(match[2])) is None:
            return None
        header = cached.copy()
        header["Size"] = int(match[1])
        header["Id"] = int(match[3])
        return header, payload[match.end() :]

    def add(self, payload: str, header: dict[str, Any]) -> None:
        """Cache a parsed and checked header, unless it has a token or an unusual form."""
        match = _TOPIC_HEADER.match(payload)
        if match is None or "Token" in header:
            return
        # JSON may repeat a name. The parser uses the last value, but the match may have another.
        matched = {"Type": TOPIC, "Size": int(match[1]), "Id": int(match[3])}
        if header | matched == header:
            if len(self._headers) >= _MAX_CACHED:
                self._headers.clear()
            self._headers[match[2]] = header.copy()


# A header of a request or answer as the server writes it, if no string in it needs an escape.
_STRING: Final = r'"([^"\\\x00-\x1f]+)"'
_NUMBER: Final = "(0|[1-9][0-9]{0,17})"
_CALL_HEADER: Final = re.compile(
    rf'\{{"Type":"(Rpc|Return)","Size":{_NUMBER},"To":{_STRING},"Token":{_STRING},'
    rf'"From":{_STRING}(?:,"Enc":"(json|b64)")?,"Id":{_NUMBER}\}}\n'
)


def split_call(payload: str) -> tuple[dict[str, Any], str] | None:
    """Return header and body of a request or answer; None if the header needs the JSON parser."""
    # Takes a third of the time of the parser and the checks.
    if (match := _CALL_HEADER.match(payload)) is None:
        return None
    kind, size, to, token, sender, enc, id_ = match.groups()
    header = {"Type": kind, "Size": int(size), "To": to, "Token": token, "From": sender}
    if enc is not None:
        header["Enc"] = enc
    header["Id"] = int(id_)
    return header, payload[match.end() :]


def check_header(header: dict[str, Any]) -> None:
    """Raise MalformedPayload if a header does not have the form that the server writes."""
    kind = header.get("Type")
    if kind == PROBE:
        return
    if not isinstance(kind, str) or kind not in TYPES:
        raise MalformedPayload(f"unknown type {kind!r:.100}")
    for name, value in header.items():
        # Compare types exactly: bool is a subclass of int, but JSON's true is no number.
        if type(value) is not _FIELD_TYPES.get(name, type(value)):
            raise MalformedPayload(f"{name} has the wrong type")
    if "Err" in header and not header["Err"].isdecimal():
        raise MalformedPayload("Err is not a number")
    if kind == SYS and (not header.get("Evt") or header["Evt"] in _LOCAL_EVENTS):
        raise MalformedPayload("not an event of the server")
    if kind != SYS and not (header.get("From") and header.get("To")):
        raise MalformedPayload("a message without sender or destination")
