"""Each SQL function as a value: statement, parameters, how to read the answer. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import psycopg
from psycopg import errors

from psqlmessages.exceptions import (
    ConnectionLost,
    MessagesError,
    NotificationQueueFull,
    NotInstalled,
    error_for,
)
from psqlmessages.wire import (
    EncodedBody,
    MalformedPayload,
    Payload,
    encode_many,
    parse,
)

T = TypeVar("T")

_OPENED: Final = (
    "SELECT pg_backend_pid() || '|' || clock_timestamp()"
    " FROM set_config('synchronous_commit', %s, false)"
)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call: ``read`` turns the first column of its one row into the result, or raises.

    ``registers`` names what a session keeps of it (the function and its ident or topic).
    ``is_send`` marks those that may share a round trip, and so a transaction, with others.
    ``ident`` is the node it acts as, where the call says so itself. ``is_hot`` marks those that
    are worth a prepared statement at once. Parameters of both travel as text, or as lists of text.
    """

    sql: str
    params: tuple[Any, ...]
    read: Callable[[Any], T]
    registers: tuple[str, str] | None = None
    is_send: bool = False
    ident: str = ""
    is_hot: bool = False

    @property
    def weight(self) -> int:
        """Roughly how many characters travel to the server."""
        return sum(len(value) for value in self.params if isinstance(value, str | list))

    @property
    def is_after_events(self) -> bool:
        """Whether what was told before it must be known first, as it undoes that.

        A registration comes first itself: it says on which channel things are told.
        """
        return self.registers is not None and self.registers[0] != "init"


class TopicNodes(NamedTuple):
    """Idents that send to a topic and that listen to it."""

    notifiers: tuple[str, ...]
    listeners: tuple[str, ...]


class BackendInfo(NamedTuple):
    """What a new connection tells about itself: its backend, and the server's clock as text."""

    pid: int
    clock: str


def check_names(*values: str) -> tuple[str, ...]:
    """Check what is to be passed as name or token: only str, and only what PostgreSQL can hold.

    Found here, it concerns this call alone, and not those that share its round trip.
    """
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"a name or token is a str, not {type(value).__name__}")
        if "\0" in value:
            raise ValueError(f"a name or token cannot hold a NUL character: {value!r:.100}")
        if not value.isascii():
            value.encode()
    return values


def _token(token: str) -> str | None:
    return check_names(token)[0] or None


def raise_for_error(answer: Any) -> dict[str, Any]:
    """Return an answer that is a success; raise the error of its number otherwise."""
    if not isinstance(answer, dict) or "Err" not in answer:
        raise MessagesError(f"not an answer of the messages functions: {answer!r:.200}")
    if answer["Err"] != "0":
        raise error_for(int(answer["Err"]), str(answer.get("Errstr", "")))
    return answer


def is_of_full_queue(error: psycopg.Error) -> bool:
    """Whether a commit failed because the notification queue of the server is full."""
    # Other limits have the same SQLSTATE, and the text is of the server's language.
    return isinstance(error, errors.ProgramLimitExceeded) and error.diag.source_file == "async.c"


def translate_error(error: psycopg.Error, *, is_broken: bool) -> Exception:
    """Translate an error of psycopg; those that are not about messages stay as they are."""
    if is_broken:
        return ConnectionLost(str(error).strip() or type(error).__name__)
    if isinstance(error, errors.InvalidSchemaName | errors.UndefinedFunction):
        return NotInstalled(str(error).partition("\n")[0])
    if is_of_full_queue(error):
        return NotificationQueueFull("PostgreSQL's notification queue is full: nothing was done")
    state = error.sqlstate or ""
    if state.startswith("PM") and state[2:].isdecimal():
        return error_for(int(state[2:]), error.diag.message_primary or str(error))
    return error


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later; it was rolled back, and left nothing.

    A deadlock, a serialization failure, a lock or a time that was too short, no room on the disk.
    """
    if isinstance(error, errors.QueryCanceled | errors.LockNotAvailable):
        return True
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in ("40", "53")


def _nothing(answer: Any) -> None:
    raise_for_error(answer)


def _is_new(answer: Any) -> bool:
    return not raise_for_error(answer).get("Already")


def _channel(answer: Any) -> str:
    return str(raise_for_error(answer)["Channel"])


def _topic_nodes(answer: Any) -> TopicNodes:
    answer = raise_for_error(answer)
    return TopicNodes(tuple(answer["Notifiers"]), tuple(answer["Listeners"]))


def _payload(text: Any) -> Payload:
    try:
        payload = parse(str(text))
    except MalformedPayload as error:
        raise MessagesError(f"not an answer of get_data: {error}") from None
    raise_for_error(payload.header)
    return payload


def backend_info(*, synchronous_commit: bool) -> Call[BackendInfo]:
    """Prepare a new connection for messages only."""
    return Call(_OPENED, (_setting(synchronous_commit),), _opened)


def opened_as(ident: str, *, synchronous_commit: bool) -> Call[tuple[BackendInfo, str]]:
    """Prepare a new connection and register its first node, in one round trip; see init."""
    return Call(
        _OPENED.replace(" FROM", " || '|' || messages.init(%s) FROM"),
        (*check_names(ident), _setting(synchronous_commit)),
        _opened_as,
        ("init", ident),
    )


def _opened(row: Any) -> BackendInfo:
    pid, _, clock = str(row).partition("|")
    return BackendInfo(int(pid), clock)


def _opened_as(row: Any) -> tuple[BackendInfo, str]:
    pid, clock, answer = str(row).split("|", 2)
    return BackendInfo(int(pid), clock), _channel(json.loads(answer))


def _setting(synchronous_commit: bool) -> str:
    # A notification is not durable: waiting for the WAL to be flushed would buy nothing.
    return "on" if synchronous_commit else "off"


def end_backend(earlier: BackendInfo) -> Call[bool]:
    """End an earlier connection of one's own that the server still holds to be alive."""
    # A backend that started after it is another one, which has been given the same pid.
    return Call(
        "SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity"
        " WHERE pid = %s AND usename = session_user AND backend_start <= %s::timestamptz",
        (earlier.pid, earlier.clock),
        bool,
    )


def probe(channel: str, payload: str) -> Call[None]:
    """Notify one's own channel, to see that notifications arrive."""
    return Call("SELECT pg_notify(%s, %s)", (channel, payload), lambda _: None)


def init(ident: str) -> Call[str]:
    """Register a node; the result is the session's channel."""
    return Call("SELECT messages.init(%s)", check_names(ident), _channel, ("init", ident))


def deinit(ident: str) -> Call[bool]:
    return Call("SELECT messages.deinit(%s)", check_names(ident), _is_new, ("deinit", ident))


def crash(ident: str) -> Call[bool]:
    """Deregister a node whose program is lost; the others are told of a crash."""
    return Call("SELECT messages.crash(%s)", check_names(ident), _is_new, ("deinit", ident))


def use(ident: str) -> Call[None]:
    return Call("SELECT messages.use(%s)", check_names(ident), _nothing, ("use", ident))


def topic_auth(topic: str) -> Call[TopicNodes]:
    return Call("SELECT messages.topic_auth(%s)", check_names(topic), _topic_nodes)


def topic_status(topic: str) -> Call[TopicNodes]:
    return Call("SELECT messages.topic_status(%s)", check_names(topic), _topic_nodes)


def topic_notify(topic: str) -> Call[bool]:
    return Call(
        "SELECT messages.topic_notify(%s)", check_names(topic), _is_new, ("topic_notify", topic)
    )


def topic_unnotify(topic: str) -> Call[bool]:
    return Call(
        "SELECT messages.topic_unnotify(%s)", check_names(topic), _is_new, ("topic_unnotify", topic)
    )


def topic_listen(topic: str) -> Call[bool]:
    return Call(
        "SELECT messages.topic_listen(%s)", check_names(topic), _is_new, ("topic_listen", topic)
    )


def topic_unlisten(topic: str) -> Call[bool]:
    return Call(
        "SELECT messages.topic_unlisten(%s)", check_names(topic), _is_new, ("topic_unlisten", topic)
    )


def topic_observe(topic: str) -> Call[bool]:
    return Call(
        "SELECT messages.topic_observe(%s)", check_names(topic), _is_new, ("topic_observe", topic)
    )


def topic_unobserve(topic: str) -> Call[bool]:
    return Call(
        "SELECT messages.topic_unobserve(%s)",
        check_names(topic),
        _is_new,
        ("topic_unobserve", topic),
    )


def topic_send(topic: str, body: EncodedBody, token: str = "") -> Call[None]:
    return Call(
        "SELECT messages.topic_send(%s, %s, %s, %s)",
        (*check_names(topic), body.text, _token(token), body.enc),
        _nothing,
        is_send=True,
        is_hot=True,
    )


def topic_send_many(topic: str, bodies: Sequence[Any], token: str = "") -> Call[int]:
    """Send many values in one call; the result is how many were sent."""
    texts, enc = encode_many(list(bodies))
    # psycopg's text arrays were measured ten times slower than binary ones.
    return Call(
        "SELECT messages.topic_send_many(%s, %b, %s, %s)",
        (*check_names(topic), texts, _token(token), enc),
        lambda answer: int(raise_for_error(answer)["Count"]),
        is_send=True,
        is_hot=True,
    )


def topic_send_as(ident: str, topic: str, body: EncodedBody, token: str = "") -> Call[None]:
    """Send as a node without a session; works on any connection."""
    return Call(
        "SELECT messages.topic_send_as(%s, %s, %s, %s, %s)",
        (*check_names(ident, topic), body.text, _token(token), body.enc),
        _nothing,
        is_send=True,
        is_hot=True,
    )


def get_data(message: str) -> Call[Payload]:
    """Fetch a kept body; ``message`` is the payload as it was received."""
    return Call("SELECT messages.get_data(%s)", check_names(message), _payload, is_hot=True)


def get_data_many(messages: list[str]) -> Call[list[str | None]]:
    """Fetch some kept bodies in one round trip; None for each that get_data refuses."""
    # In one transaction PostgreSQL prepares once what get_data does: a third of the time for each.
    return Call(
        "SELECT string_agg(length(d.answer) || E'\\n' || d.answer, '' ORDER BY d.place) FROM ("
        "SELECT messages.get_data(m.message) AS answer, m.place"
        " FROM unnest(%b::text[]) WITH ORDINALITY AS m (message, place)) AS d",
        ([check_names(message)[0] for message in messages],),
        _texts,
        is_hot=True,
    )


def _texts(answers: Any) -> list[str | None]:
    texts: list[str | None] = []
    place = 0
    while place < len(answers):
        begin = answers.index("\n", place) + 1
        place = begin + int(answers[place : begin - 1])
        try:
            texts.append(_payload(answers[begin:place]).text)
        except MessagesError:
            texts.append(None)
    return texts


def rpc(node: str, token: str, body: EncodedBody) -> Call[None]:
    return Call(
        "SELECT messages.rpc(%s, %s, %s, %s)",
        (*check_names(node, token), body.text, body.enc),
        _nothing,
        is_send=True,
        is_hot=True,
    )


def return_(node: str, token: str, body: EncodedBody) -> Call[None]:
    """Answer ``node``; the token is the one received."""
    return Call(
        "SELECT messages.return(%s, %s, %s, %s)",
        (*check_names(node, token), body.text, body.enc),
        _nothing,
        is_send=True,
        is_hot=True,
    )


def return_error(node: str, token: str, reason: str) -> Call[None]:
    """Answer ``node`` that its request failed."""
    return Call(
        "SELECT messages.return_error(%s, %s, %s)",
        (*check_names(node, token), EncodedBody.of(reason).text),
        _nothing,
        is_send=True,
        is_hot=True,
    )


def audience(event: str) -> Call[list[str]]:
    """Ask which of this session's nodes may hear of an event; ``event`` is its payload."""
    return Call(
        "SELECT messages.audience(%s)",
        check_names(event),
        lambda answer: list(raise_for_error(answer)["Nodes"]),
    )


def evaluate() -> Call[int]:
    """Evaluate changes of state at the commit; the result is how many events it will send."""
    return Call(
        "SELECT messages.evaluate()",
        (),
        lambda answer: int(raise_for_error(answer).get("Events", 0)),
    )
