"""Calls of the queue functions, their results, and queue elements. No I/O."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any, Final, NamedTuple, Self

from psqlmessages import wire
from psqlmessages.client.calls import (
    Call,
    Merging,
    check_int,
    check_names,
    raise_for_error,
    read_changed,
    read_nothing,
)
from psqlmessages.client.durations import Duration, seconds_of
from psqlmessages.client.transactions import (
    Rows,
    Script,
    SqlStatement,
    TransactionCall,
    transaction,
)
from psqlmessages.client.wakeups import ListenResult
from psqlmessages.exceptions import MessagesError
from psqlmessages.wire import EncodedBody, MalformedPayload, encode_many, list_values


class AckResult(tuple[bool, ...]):  # noqa: SLOT001 - a tuple has no slots for attributes
    """Result of commit, rollback and release: a bool for each lease; true if all are True.

    ``dead_lettered``: for each lease, whether a rollback made its element a dead letter.
    """

    def __new__(cls, done: Iterable[bool], dead_lettered: Iterable[bool] = ()) -> Self:
        """Create a result. Without ``dead_lettered``, no element became a dead letter."""
        result = super().__new__(cls, done)
        result.dead_lettered = tuple(dead_lettered) or (False,) * len(result)
        return result

    dead_lettered: tuple[bool, ...]

    def __bool__(self) -> bool:
        return all(self)


class QueueSizes(NamedTuple):
    """Numbers of elements in a queue; ``next``: when the next one becomes available, or None."""

    total: int
    available: int
    scheduled: int
    reserved: int
    next: datetime | None
    is_paused: bool


class QueueSettings(NamedTuple):
    """Settings of a queue; ``max_tries`` is None if there is no maximum."""

    max_tries: int | None
    dead_letter_queue: str
    key_timeout: timedelta


@dataclass(slots=True)
class Element:
    """One element of a queue; ``lease`` is needed to commit it or give it back ("" after ``pop``).

    ``mature``: when it became available; ``tries``: number of failed attempts; ``hops``: number of
    exchanges that it has passed; ``is_settled``: the server has answered its commit, rollback or
    release.
    """

    id: int
    queue: str
    content: Any
    headers: dict[str, Any]
    mature: datetime
    tries: int
    hops: int
    pushed_at: datetime
    lease: str = field(default="", repr=False)
    error: MessagesError | None = None
    is_settled: bool = field(default=False, repr=False, compare=False)

    @property
    def body(self) -> Any:
        """The decoded body; raises an error if its text does not match its encoding."""
        if self.error is not None:
            raise self.error
        return self.content


def element_of(queue: str, row: tuple[Any, ...]) -> Element:
    """Create an element from a row with the columns of COLUMNS."""
    id_, body, enc, headers_text, mature, tries, hops, pushed_at, lease = row
    # Most elements have no headers.
    headers = json.loads(headers_text) if headers_text != "{}" else {}
    element = Element(id_, queue, None, headers, mature, tries, hops, pushed_at, lease or "")
    try:
        element.content = wire.decode(body, enc)
    except MalformedPayload as malformed:
        element.error = MessagesError(f"element {id_} of {queue} is malformed: {malformed}")
    return element


def _leases_of(elements: Iterable[Element | str]) -> list[str]:
    leases = []
    for element in elements:
        if not isinstance(element, str | Element):
            raise TypeError(f"a lease must be an Element or a str, not {type(element).__name__}")
        lease = element.lease if isinstance(element, Element) else element
        if not lease:
            raise ValueError("a popped element has no lease: it is already removed")
        leases.append(lease)
    return list(check_names(*leases))


# headers::text, because Django reads jsonb as text, and psycopg as Python objects.
COLUMNS: Final = "id, body, enc, headers::text, mature, tries, hops, pushed_at, lease"
DEFAULT_DURATION: Final = timedelta(seconds=120)

Headers = Mapping[str, Any]

# A JSON string, or (as group 1) a number with an exponent.
_LARGE_FLOAT = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d+(?:\.\d+)?e\+\d+)')
_BEGIN = SqlStatement("BEGIN ISOLATION LEVEL READ COMMITTED")
# Without a timeout, a queue locked by another session would block all calls of the node.
_BEGIN_WITH_TIMEOUT = SqlStatement(f"{_BEGIN.sql}; SET LOCAL lock_timeout = '100ms'")
_COMMIT = SqlStatement("COMMIT")

_MERGE_PUSHES: Final = Merging(
    "SELECT messages.push_many(%s, %s, %b::text[], %s)",
    (2,),
    lambda answer, _: [{"Err": "0", "Id": id_} for id_ in answer["Ids"]],
)


def push(
    ident: str,
    queue: str,
    body: Any,
    *,
    headers: Headers | None = None,
    mature: datetime | None = None,
    delay: Duration | None = None,
    tries: int = 0,
    key: str | None = None,
) -> Call[int]:
    """Add an element to a queue; return its id.

    The element becomes available at ``mature``, or after ``delay``, or immediately. During the
    queue's ``key_timeout``, a push with the same ``key`` adds nothing and returns the first id.
    """
    sql = "SELECT messages.push(%s, %s, %s, %s)"
    params: tuple[Any, ...] = (*check_names(ident, queue), *EncodedBody.of(body))
    merging: Merging | None = _MERGE_PUSHES
    # Without the other five parameters, the client takes a fifth less time per call.
    if not (headers is None and mature is None and delay is None and key is None and tries == 0):
        sql = "SELECT messages.push(%s, %s, %s, %s, %s, %s, %s, %s, %s)"
        params += (
            _encode_headers(headers),
            _check_mature(mature),
            _delay_seconds(delay),
            check_int(tries, "tries"),
            _check_key(key),
        )
        merging = None
    return Call(
        sql,
        params,
        lambda answer: int(raise_for_error(answer)["Id"]),
        may_share_round_trip=True,
        merging=merging,
        lock_order=(queue, key or ""),
    )


def push_many(
    ident: str,
    queue: str,
    bodies: Iterable[Any],
    *,
    headers: Iterable[Headers | None] | None = None,
    mature: datetime | None = None,
    delay: Duration | None = None,
    tries: int = 0,
    keys: Iterable[str | None] | None = None,
) -> Call[list[int]]:
    """Add many elements in one call, in their order, all or none; return their ids.

    ``headers`` and ``keys`` have one entry per body. Bytes cannot be mixed with other values.
    """
    texts, enc = encode_many(bodies)
    return Call(
        "SELECT messages.push_many(%s, %s, %b::text[], %s, %b::text[], %s, %s, %s, %b::text[])",
        (
            *check_names(ident, queue),
            texts,
            enc,
            _one_per_body("headers", headers, _encode_headers, texts),
            _check_mature(mature),
            _delay_seconds(delay),
            check_int(tries, "tries"),
            _one_per_body("keys", keys, _check_key, texts),
        ),
        lambda answer: [int(id_) for id_ in raise_for_error(answer)["Ids"]],
        may_share_round_trip=True,
        lock_order=(queue,),
    )


def pop(ident: str, queue: str, count: int = 1) -> SqlStatement:
    """Create the statement that takes and removes elements; :func:`elements` reads its rows."""
    return SqlStatement(
        f"SELECT {COLUMNS} FROM messages.pop(%s, %s, %s::int)",  # noqa: S608
        (*check_names(ident, queue), check_int(count, "count")),
    )


def reserve(
    ident: str, queue: str, count: int = 1, duration: Duration = DEFAULT_DURATION
) -> SqlStatement:
    """Create the statement that leases elements for some time; :func:`elements` reads its rows."""
    return SqlStatement(
        f"SELECT {COLUMNS} FROM messages.reserve(%s, %s, %s::int, %s::float8)",  # noqa: S608
        (*check_names(ident, queue), check_int(count, "count"), seconds_of(duration, "duration")),
    )


def renew(
    ident: str, queue: str, lease: str, duration: Duration = DEFAULT_DURATION
) -> SqlStatement:
    """Create the statement that extends a lease to ``duration`` from now; no row if it is lost."""
    return SqlStatement(
        "SELECT id FROM messages.renew(%s, %s, %s::float8, %s)",
        (*check_names(ident, queue), seconds_of(duration, "duration"), lease),
    )


def elements(queue: str, rows: Rows) -> list[Element]:
    """Read the rows of :func:`pop` and :func:`reserve`."""
    return [element_of(queue, row) for row in rows]


def take(queue: str, statement: SqlStatement) -> TransactionCall[list[Element]]:
    """Create a call that runs a statement of :func:`pop` or :func:`reserve`, with autocommit."""

    def script() -> Script[list[Element]]:
        rows = yield statement
        return elements(queue, rows)

    return transaction(script)


def take_recorded(
    queue: str, statement: SqlStatement, taken: list[Element]
) -> TransactionCall[list[Element]]:
    """Create a call as :func:`take` does, but with a separate commit.

    If the call is interrupted before the commit, it takes nothing. ``taken`` receives the elements
    just before the commit, so that they can be given back after an interruption.
    """

    def script() -> Script[list[Element]]:
        taken.clear()
        yield _BEGIN
        rows = yield statement
        taken.extend(elements(queue, rows))
        yield _COMMIT
        return list(taken)

    return transaction(script)


def _split_commit(answer: dict[str, Any], merged_calls: Sequence[Call[Any]]) -> list[Any]:
    done = iter(answer["Done"])
    return [{"Err": "0", "Done": list(islice(done, call.size[0]))} for call in merged_calls]


_COMMIT_LEASES: Final = "SELECT messages.commit(%s, VARIADIC %b::text[])"
_MERGE_COMMITS: Final = Merging(_COMMIT_LEASES, (1,), _split_commit)
_LEASE: Final = re.compile(r"[1-9][0-9]{0,17}\.[0-9a-f-]{36}")


def commit(ident: str, *elements: Element | str) -> Call[AckResult]:
    """Remove reserved elements; pass the elements or their leases.

    The result has a bool for each element, and is true if all are True. False: another consumer has
    taken the element after its lease expired, or the element was removed.
    """
    call = _end_leases(_COMMIT_LEASES, ident, elements)
    leases: list[str] = call.params[1]
    ids = [lease.partition(".")[0] for lease in leases if _LEASE.fullmatch(lease)]
    # The function refuses all leases if one is malformed, so do not merge that with other calls.
    merging = _MERGE_COMMITS if len(ids) == len(leases) else None
    return replace(call, merging=merging, element_ids=frozenset(ids))


def rollback(
    ident: str, *elements: Element | str, delay: Duration | None = None
) -> Call[AckResult]:
    """Give back elements as failed: to the end of the queue, or after ``delay``; count a try."""
    sql = "SELECT messages.rollback(%s, %s, VARIADIC %b::text[])"
    return _end_leases(sql, ident, elements, _delay_seconds(delay))


def release(ident: str, *elements: Element | str) -> Call[AckResult]:
    """Give back elements that were not processed; they keep their place and number of tries."""
    return _end_leases("SELECT messages.release(%s, VARIADIC %b::text[])", ident, elements)


def _end_leases(
    sql: str, ident: str, elements: Sequence[Element | str], *options: Any
) -> Call[AckResult]:
    def read(answer: Any) -> AckResult:
        answer = raise_for_error(answer)
        result = AckResult(answer["Done"], answer.get("DeadLettered", ()))
        for element in elements:
            if isinstance(element, Element):
                element.is_settled = True
        return result

    params = (*check_names(ident), *options, _leases_of(elements))
    return Call(sql, params, read, may_share_round_trip=True, ident=ident)


def remove(ident: str, queue: str, id_: int) -> Call[bool]:
    """Remove an element; return False if it is unknown, reserved or locked."""
    return Call(
        "SELECT messages.remove(%s, %s, %s::bigint)",
        (*check_names(ident, queue), id_),
        lambda answer: bool(raise_for_error(answer)["Done"]),
    )


def pause(ident: str, queue: str) -> Call[bool]:
    """Pause a queue for all consumers; return False if it was paused already."""
    return Call("SELECT messages.pause(%s, %s)", check_names(ident, queue), read_changed)


def resume(ident: str, queue: str) -> Call[bool]:
    """End a pause; return False if the queue was not paused."""
    return Call("SELECT messages.resume(%s, %s)", check_names(ident, queue), read_changed)


def configure_queue(
    ident: str,
    queue: str,
    *,
    max_tries: int | None = None,
    dead_letter_queue: str | None = None,
    key_timeout: Duration | None = None,
) -> Call[QueueSettings]:
    """Change settings of a queue, which is created if it does not exist; return all settings.

    None leaves a setting unchanged, and ``max_tries=0`` means no maximum.
    """
    if dead_letter_queue is not None:
        check_names(dead_letter_queue)
    seconds = None if key_timeout is None else math.ceil(seconds_of(key_timeout, "key_timeout"))
    return Call(
        "SELECT messages.configure_queue(%s, %s, %s::int, %s, %s::int)",
        (*check_names(ident, queue), max_tries, dead_letter_queue, seconds),
        _read_settings,
    )


def remove_queue(ident: str, queue: str) -> Call[None]:
    """Remove an empty queue with its settings; raise QueueNotEmpty if it has elements."""
    return Call("SELECT messages.remove_queue(%s, %s)", check_names(ident, queue), read_nothing)


def remove_elements(ident: str, queue: str, ids: Iterable[int]) -> Call[int]:
    """Remove elements that are not reserved, by their ids; return their number."""
    return Call(
        "SELECT messages.remove_elements(%s, %s, %s::bigint[])",
        (*check_names(ident, queue), list(ids)),
        lambda answer: int(raise_for_error(answer)["Removed"]),
    )


def move_elements(ident: str, queue: str, to_queue: str, ids: Iterable[int]) -> Call[int]:
    """Move elements that are not reserved to another queue, by their ids; return their number."""
    return Call(
        "SELECT messages.move_elements(%s, %s, %s, %s::bigint[])",
        (*check_names(ident, queue, to_queue), list(ids)),
        lambda answer: int(raise_for_error(answer)["Moved"]),
    )


def drain(ident: str, queue: str) -> Call[int]:
    """Remove all available elements of a queue; return their number."""
    return Call(
        "SELECT messages.drain(%s, %s)",
        check_names(ident, queue),
        lambda answer: int(raise_for_error(answer)["Removed"]),
    )


def sizes(ident: str, queue: str) -> Call[QueueSizes]:
    """Return the numbers of elements in a queue; raise QueueNotExistent if it does not exist."""
    return Call("SELECT messages.sizes(%s, %s)", check_names(ident, queue), _read_sizes)


def queue_listen(
    ident: str, queue: str, on_answer: Callable[[ListenResult], None]
) -> TransactionCall[ListenResult]:
    """Create a call after which this connection is notified of pushes to a queue, for some time.

    ``on_answer`` receives the answer before the notifications that came with it are processed. The
    call raises LockNotAvailable if a transaction has locked the queue, for instance to create it.
    """

    def script() -> Script[ListenResult]:
        yield _BEGIN_WITH_TIMEOUT
        rows = yield SqlStatement("SELECT messages.queue_listen(%s, %s)", check_names(ident, queue))
        answer = raise_for_error(rows[0][0])
        result = ListenResult(
            str(answer["Channel"]), float(answer["Seconds"]), answer["Next"], answer["Paused"]
        )
        yield _COMMIT
        on_answer(result)
        return result

    return transaction(script)


def _encode_headers(headers: Headers | None) -> str | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise TypeError(f"headers must be a mapping with str keys: {headers!r:.100}")
    text = EncodedBody.of(dict(headers)).text
    # jsonb would turn 1e16 into an integer, so write it as 10000000000000000.0.
    if "e+" not in text:
        return text
    return _LARGE_FLOAT.sub(
        lambda found: f"{Decimal(found[1]):f}.0" if found[1] else found[0], text
    )


def _check_mature(mature: datetime | None) -> datetime | None:
    if mature is not None and not isinstance(mature, datetime):
        raise TypeError(f"mature must be a datetime with a time zone, not {mature!r:.100}")
    if mature is not None and mature.utcoffset() is None:
        raise ValueError(f"mature needs a time zone: {mature}")
    return mature


def _delay_seconds(delay: Duration | None) -> float | None:
    return seconds_of(delay, "delay") if delay is not None else None


def _check_key(key: str | None) -> str | None:
    return check_names(key)[0] if key is not None else None


def _one_per_body(
    name: str, values: Iterable[Any] | None, convert: Callable[[Any], str | None], texts: list[str]
) -> list[str | None] | None:
    if values is None:
        return None
    entries = [convert(value) for value in list_values(values, name)]
    if len(entries) != len(texts):
        raise ValueError(f"{len(entries)} {name} for {len(texts)} bodies: each needs its own")
    return entries


def _read_settings(answer: Any) -> QueueSettings:
    answer = raise_for_error(answer)
    return QueueSettings(
        answer["MaxTries"] or None,
        answer["DeadLetterQueue"],
        timedelta(seconds=answer["KeyTimeout"]),
    )


def _read_sizes(answer: Any) -> QueueSizes:
    answer = raise_for_error(answer)
    next_ = answer["Next"]
    return QueueSizes(
        answer["Total"],
        answer["Available"],
        answer["Scheduled"],
        answer["Reserved"],
        datetime.fromisoformat(next_) if next_ is not None else None,
        answer["Paused"],
    )
