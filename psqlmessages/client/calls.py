"""Calls of the SQL functions as values: statement, parameters, how to read the answer. No I/O.

A function that returns a Call only creates it. Node and AsyncNode have methods with the docstrings
of these functions, so some docstrings describe what the call does when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Generic, NamedTuple, TypeVar

import psycopg
from psycopg import errors

from psqlmessages.exceptions import (
    ConnectionLost,
    InvalidArgument,
    MessagesError,
    NotificationQueueFull,
    NotInstalled,
    error_for,
)
from psqlmessages.wire import EncodedBody, MalformedPayload, Payload, encode_many, parse

T = TypeVar("T")

# A call that fails with one of these errors has sent no message.
NOTHING_SENT: Final = (InvalidArgument, TypeError, ValueError, psycopg.Error)

_SET_UP: Final = (
    "SELECT pg_backend_pid() || '|' || clock_timestamp()"
    " FROM set_config('synchronous_commit', %s, false)"
)


@dataclass(slots=True)
class Call(Generic[T]):
    """One call of an SQL function: its statement, its parameters, and how to read its answer.

    ``read`` converts the first column of the single row into the result, or raises an error.
    ``registration_change``: for a call that changes a registration, the function ("deinit" also for
    ``crash``), and the node or topic. ``may_share_round_trip``: other calls may run in the same
    round trip and transaction. ``ident`` is the calling node; if empty, the acting node calls.
    ``is_prepared``: the statement is prepared even if the call runs alone; calls that share a round
    trip are always prepared.

    ``merging``: how several calls become one statement; None if they cannot. ``lock_order``: sort
    key of the calls of a transaction, so that transactions take locks in the same order.
    ``element_ids``: elements that the call removes. Calls that remove the same element run in
    different transactions.
    """

    sql: str
    params: tuple[Any, ...]
    read: Callable[[Any], T]
    registration_change: tuple[str, str] | None = None
    may_share_round_trip: bool = False
    ident: str = ""
    is_prepared: bool = False
    merging: Merging | None = None
    lock_order: tuple[str, ...] = ()
    element_ids: frozenset[str] = frozenset()

    @property
    def size(self) -> tuple[int, int]:
        """Number of messages or elements of the call, and of characters in its texts."""
        items, characters = None, 0
        for value in self.params:
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, list):
                items = max(items or 0, len(value))
                characters += sum([len(text) for text in value if isinstance(text, str)])
        return 1 if items is None else items, characters

    @property
    def must_follow_events(self) -> bool:
        """Whether earlier events must be processed before the answer of this call is recorded."""
        # Not for init: only its answer says on which channel the session receives events.
        return self.registration_change is not None and self.registration_change[0] != "init"


@dataclass(frozen=True, slots=True)
class Merging:
    """How calls of a function become one statement.

    ``sql`` is that statement. Its parameters at ``array_positions`` are arrays of the values of all
    calls; the other parameters must be equal in all calls. ``split`` converts the successful answer
    of the statement to a list with an answer for each call.
    """

    sql: str
    array_positions: tuple[int, ...]
    split: Callable[[dict[str, Any], Sequence[Call[Any]]], list[Any]]

    def key(self, call: Call[Any]) -> Hashable:
        """Return a key: calls with equal keys can be merged."""
        if len(self.array_positions) == len(call.params):
            return self.sql
        fixed = [value for n, value in enumerate(call.params) if n not in self.array_positions]
        return (self.sql, *fixed)

    def merge_params(self, merged_calls: Sequence[Call[Any]]) -> tuple[Any, ...]:
        """Return the parameters of the statement that replaces these calls."""
        columns = list(zip(*[call.params for call in merged_calls], strict=True))
        return tuple(
            _flatten(values) if n in self.array_positions else values[0]
            for n, values in enumerate(columns)
        )


def _flatten(values: Sequence[Any]) -> list[Any]:
    if list not in set(map(type, values)):
        return list(values)
    return list(chain.from_iterable(v if isinstance(v, list) else [v] for v in values))


class TopicNodes(NamedTuple):
    """Names of the nodes that send to a topic and that listen to it."""

    notifiers: tuple[str, ...]
    listeners: tuple[str, ...]


class BackendInfo(NamedTuple):
    """The backend of a connection: its process id, and the server's time after connecting."""

    pid: int
    clock: str


def check_int(value: int, name: str) -> int:
    """Return a number unchanged, or raise TypeError; ``name`` is the argument's name."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}: {value!r:.100}")
    return value


def check_names(*values: str) -> tuple[str, ...]:
    """Return names and tokens unchanged; raise TypeError or ValueError for an invalid one.

    Without this check, PostgreSQL's error would also fail the calls that share the round trip.
    """
    for value in values:
        if not isinstance(value, str):
            raise TypeError(
                f"a name or token must be a str, not {type(value).__name__}: {value!r:.100}"
            )
        if "\0" in value:
            raise ValueError(f"a name or token cannot contain a NUL character: {value!r:.100}")
        if not value.isascii():
            value.encode()
    return values


def _token_or_none(token: str) -> str | None:
    return check_names(token)[0] or None


def raise_for_error(answer: Any) -> dict[str, Any]:
    """Return the answer of a successful call; raise its error, or MessagesError if malformed."""
    if not isinstance(answer, dict) or "Err" not in answer:
        raise MessagesError(f"unexpected answer of a messages function: {answer!r:.200}")
    if answer["Err"] != "0":
        raise error_for(int(answer["Err"]), str(answer.get("Errstr", "")))
    return answer


# The errors of PostgreSQL if functions or tables are missing.
NOT_INSTALLED: Final = (errors.InvalidSchemaName, errors.UndefinedFunction, errors.UndefinedTable)


def translate_error(error: psycopg.Error, *, is_broken: bool) -> Exception:
    """Translate an error of psycopg to a MessagesError; return it unchanged if none fits."""
    if is_broken:
        return ConnectionLost(str(error).strip() or type(error).__name__)
    if isinstance(error, NOT_INSTALLED):
        return NotInstalled(str(error).partition("\n")[0])
    # async.c implements NOTIFY. Neither the SQLSTATE nor the text identifies the error: other
    # errors have the same SQLSTATE, and the text depends on the server's language.
    if isinstance(error, errors.ProgramLimitExceeded) and error.diag.source_file == "async.c":
        return NotificationQueueFull("PostgreSQL's notification queue is full: nothing was done")
    state = error.sqlstate or ""
    if state.startswith("PM") and state[2:].isdecimal():
        return error_for(int(state[2:]), error.diag.message_primary or str(error))
    return error


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed, as after a conflict, timeout or lack of resources."""
    if isinstance(error, errors.QueryCanceled | errors.LockNotAvailable):
        return True
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in ("40", "53")


def read_nothing(answer: Any) -> None:
    """Read the answer of a call without a result: raise the error in the answer."""
    raise_for_error(answer)


def read_changed(answer: Any) -> bool:
    """Return whether a call has changed something, according to its answer."""
    return not raise_for_error(answer).get("Already")


def read_channel(answer: Any) -> str:
    """Return the channel in an answer of ``init`` or ``connect_stream``."""
    return str(raise_for_error(answer)["Channel"])


def _read_topic_nodes(answer: Any) -> TopicNodes:
    answer = raise_for_error(answer)
    return TopicNodes(tuple(answer["Notifiers"]), tuple(answer["Listeners"]))


def read_payload(text: Any) -> Payload:
    """Parse an answer of ``get_data``."""
    try:
        payload = parse(str(text))
    except MalformedPayload as error:
        raise MessagesError(f"unexpected answer of get_data: {error}") from None
    raise_for_error(payload.header)
    return payload


def set_up_session(ident: str | None, *, synchronous_commit: bool) -> Call[tuple[BackendInfo, str]]:
    """Create a call that sets up a new connection, and registers a node unless ``ident`` is None.

    Its result is the backend, and the channel ("" without a node).
    """
    # Notifications are not durable, so there is no benefit in waiting for the WAL flush.
    setting = "on" if synchronous_commit else "off"
    if ident is None:
        return Call(_SET_UP, (setting,), _read_set_up)
    sql = _SET_UP.replace(" FROM", " || '|' || messages.init(%s) FROM")
    return Call(sql, (*check_names(ident), setting), _read_set_up, ("init", ident))


def _read_set_up(row: Any) -> tuple[BackendInfo, str]:
    pid, clock, *init_answer = str(row).split("|", 2)
    channel = read_channel(json.loads(init_answer[0])) if init_answer else ""
    return BackendInfo(int(pid), clock), channel


def end_backend(backend: BackendInfo) -> Call[bool]:
    """Create a call that ends an earlier connection of ours; it returns whether there was one."""
    # A backend that started later is another connection: the server has reused the pid.
    return Call(
        "SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity"
        " WHERE pid = %s AND usename = session_user AND backend_start <= %s::timestamptz",
        (backend.pid, backend.clock),
        bool,
    )


def probe_by_notify(channel: str, payload: str) -> Call[None]:
    """Create a call that notifies the session's own channel, to check that this arrives."""
    return Call("SELECT pg_notify(%s, %s)", (channel, payload), lambda _: None)


def probe(channel: str, on_answer: Callable[[bool], None]) -> Call[None]:
    """Create a call that asks the backend whether it listens on the session's own channel."""
    sql = "SELECT %s::text IN (SELECT pg_catalog.pg_listening_channels())"
    return Call(sql, (channel,), on_answer)


def init(ident: str) -> Call[str]:
    """Register a node; return the session's channel."""
    return Call("SELECT messages.init(%s)", check_names(ident), read_channel, ("init", ident))


def deinit(ident: str) -> Call[bool]:
    """Deregister a node; return False if it was not registered."""
    return Call("SELECT messages.deinit(%s)", check_names(ident), read_changed, ("deinit", ident))


def crash(ident: str) -> Call[bool]:
    """Deregister a node whose program has crashed; other nodes receive a crash event."""
    return Call("SELECT messages.crash(%s)", check_names(ident), read_changed, ("deinit", ident))


def use(ident: str) -> Call[None]:
    """Make a node the acting node of all following calls, in all threads and tasks."""
    return Call("SELECT messages.use(%s)", check_names(ident), read_nothing, ("use", ident))


def topic_auth(topic: str) -> Call[TopicNodes]:
    """Return the nodes that may send to a topic and that may listen to it."""
    return Call("SELECT messages.topic_auth(%s)", check_names(topic), _read_topic_nodes)


def topic_status(topic: str) -> Call[TopicNodes]:
    """Return the nodes that send to a topic and that listen to it now."""
    return Call("SELECT messages.topic_status(%s)", check_names(topic), _read_topic_nodes)


def topic_notify(topic: str) -> Call[bool]:
    """Register as a sender of a topic; return False if the node was one already."""
    return _topic_call("topic_notify", topic)


def topic_unnotify(topic: str) -> Call[bool]:
    """Undo topic_notify; return False if the node was no sender."""
    return _topic_call("topic_unnotify", topic)


def topic_listen(topic: str) -> Call[bool]:
    """Receive the messages of a topic from now on; return False if the node already listened."""
    return _topic_call("topic_listen", topic)


def topic_unlisten(topic: str) -> Call[bool]:
    """Undo topic_listen; return False if the node did not listen."""
    return _topic_call("topic_unlisten", topic)


def topic_observe(topic: str) -> Call[bool]:
    """Observe a topic or pattern without being a listener; return False if already observing."""
    return _topic_call("topic_observe", topic)


def topic_unobserve(topic: str) -> Call[bool]:
    """Undo topic_observe; return False if the node did not observe."""
    return _topic_call("topic_unobserve", topic)


def _topic_call(function: str, topic: str) -> Call[bool]:
    sql = f"SELECT messages.{function}(%s)"
    return Call(sql, check_names(topic), read_changed, (function, topic))


def _split_answers(answer: dict[str, Any], _: Sequence[Call[Any]]) -> list[Any]:
    # The function returns null for each call that succeeded.
    return [each or {"Err": "0"} for each in answer["Answers"]]


_MERGE_REQUESTS: Final = Merging(
    "SELECT messages.rpc_many(%b, %b, %b, %b)", (0, 1, 2, 3), _split_answers
)
_MERGE_REPLIES: Final = Merging(
    "SELECT messages.return_many(%b, %b, %b, %b)", (0, 1, 2, 3), _split_answers
)


def _sending_call(
    sql: str,
    params: tuple[Any, ...],
    read: Callable[[Any], Any] = read_nothing,
    merging: Merging | None = None,
) -> Call[Any]:
    return Call(sql, params, read, may_share_round_trip=True, is_prepared=True, merging=merging)


# Binary arrays: psycopg's text arrays are ten times slower (measured).
_TOPIC_SEND_MANY: Final = "SELECT messages.topic_send_many(%s, %b, %s, %s)"
_MERGE_SENDS: Final = Merging(
    _TOPIC_SEND_MANY, (1,), lambda answer, merged_calls: [answer] * len(merged_calls)
)


def topic_send(topic: str, body: Any, token: str = "") -> Call[None]:
    """Send a body to all listeners of a topic; with a token, they may answer."""
    encoded = EncodedBody.of(body)
    return _sending_call(
        "SELECT messages.topic_send(%s, %s, %s, %s)",
        (*check_names(topic), encoded.text, _token_or_none(token), encoded.enc),
        merging=_MERGE_SENDS,
    )


def topic_send_many(topic: str, bodies: Iterable[Any], token: str = "") -> Call[int]:
    """Send many bodies in one call and one transaction; return their number."""
    texts, enc = encode_many(bodies)
    return _sending_call(
        _TOPIC_SEND_MANY,
        (*check_names(topic), texts, _token_or_none(token), enc),
        lambda answer: int(raise_for_error(answer)["Count"]),
    )


def topic_send_as(ident: str, topic: str, body: Any, token: str = "") -> Call[None]:
    """Send as a node that does not need to be registered."""
    encoded = EncodedBody.of(body)
    return _sending_call(
        "SELECT messages.topic_send_as(%s, %s, %s, %s, %s)",
        (*check_names(ident, topic), encoded.text, _token_or_none(token), encoded.enc),
    )


def get_data(message: str) -> Call[Payload]:
    """Create a call that fetches a large body; ``message`` is the payload of its notification."""
    return Call(
        "SELECT messages.get_data(%s)", check_names(message), read_payload, is_prepared=True
    )


def get_data_many(messages: list[str]) -> Call[list[str | None]]:
    """Create a call that fetches large bodies; its result has None for each failed get_data."""
    # Takes a third of the time of separate calls: PostgreSQL plans get_data's statements once.
    return Call(
        "SELECT string_agg(length(d.answer) || E'\\n' || d.answer, '' ORDER BY d.place) FROM ("
        "SELECT messages.get_data(m.message) AS answer, m.place"
        " FROM unnest(%b::text[]) WITH ORDINALITY AS m (message, place)) AS d",
        ([check_names(message)[0] for message in messages],),
        _read_texts,
        is_prepared=True,
    )


def _read_texts(answers: Any) -> list[str | None]:
    # Each answer follows its length and a line feed.
    texts: list[str | None] = []
    end = 0
    while end < len(answers):
        begin = answers.index("\n", end) + 1
        end = begin + int(answers[end : begin - 1])
        try:
            texts.append(read_payload(answers[begin:end]).text)
        except MessagesError:
            texts.append(None)
    return texts


def rpc(node: str, token: str, body: Any) -> Call[None]:
    """Send a request to a node; its answer arrives later, as a message with this token."""
    return _sending_call(
        "SELECT messages.rpc(%s, %s, %s, %s)",
        (*check_names(node, token), *EncodedBody.of(body)),
        merging=_MERGE_REQUESTS,
    )


def return_(node: str, token: str, body: Any) -> Call[None]:
    """Send the answer of a request to the node that made it, with the token of the request."""
    return _sending_call(
        "SELECT messages.return(%s, %s, %s, %s)",
        (*check_names(node, token), *EncodedBody.of(body)),
        merging=_MERGE_REPLIES,
    )


def return_error(node: str, token: str, reason: str) -> Call[None]:
    """Answer a request with an error: the node that made it gets CallFailed."""
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a str, not {type(reason).__name__}: {reason!r:.100}")
    return _sending_call(
        "SELECT messages.return_error(%s, %s, %s)",
        (*check_names(node, token), EncodedBody.of(reason).text),
    )


def audience(event: str) -> Call[list[str]]:
    """Return the nodes of this connection that may receive an event, given its payload."""
    return Call(
        "SELECT messages.audience(%s)",
        check_names(event),
        lambda answer: list(raise_for_error(answer)["Nodes"]),
    )


def evaluate() -> Call[int]:
    """Run housekeeping at the commit of this call; return the number of events that it sends."""
    return Call(
        "SELECT messages.evaluate()",
        (),
        lambda answer: int(raise_for_error(answer).get("Events", 0)),
    )
