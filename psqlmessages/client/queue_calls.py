"""Calls of the queue functions as values. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

from psqlmessages import wire
from psqlmessages.client.calls import Call, check_names, raise_for_error
from psqlmessages.client.transactions import (
    Rows,
    Script,
    SqlStatement,
    TransactionCall,
    transaction,
)
from psqlmessages.exceptions import MessagesError
from psqlmessages.wire import EncodedBody, MalformedPayload, encode_many

# Queue elements: what a reader gets, how large a queue is, and what settling leases answers.


class AckResult(tuple[bool, ...]):
    """What commit, rollback and release answer for each lease; true where it holds for all."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return all(self)


class QueueSizes(NamedTuple):
    """How many elements a queue holds; ``next``: when the next one becomes available."""

    total: int
    available: int
    scheduled: int
    reserved: int
    next: datetime | None
    is_paused: bool


class ListenResult(NamedTuple):
    """What ``queue_listen`` answers: the channel that wakes, and for how many seconds it does.

    ``next_seconds``: in how many the next element becomes available; None where there is none.
    """

    channel: str
    seconds: float
    next_seconds: float | None
    is_paused: bool


@dataclass(slots=True)
class Element:
    """One element of a queue; ``lease`` is "" where it was popped, else the secret to settle it.

    ``mature``: since when it is available; ``hops``: how many exchanges it came through.
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
        """The body as it was pushed; raises where its text is not of its encoding."""
        if self.error is not None:
            raise self.error
        return self.content


def element_of(queue: str, row: tuple[Any, ...]) -> Element:
    """Make an element of a row of ``queue_calls.COLUMNS``."""
    id_, body, enc, headers, mature, tries, hops, pushed_at, lease = row
    # Most have none.
    parsed = json.loads(headers) if headers != "{}" else {}
    element = Element(id_, queue, None, parsed, mature, tries, hops, pushed_at, lease or "")
    try:
        element.content = wire.decode(body, enc)
    except MalformedPayload as malformed:
        element.error = MessagesError(f"element {id_} of {queue} is malformed: {malformed}")
    return element


def leases_of(elements: Iterable[Element | str]) -> list[str]:
    """List the leases; raise ValueError for what was popped, and so has none."""
    leases = []
    for element in elements:
        if not isinstance(element, str | Element):
            raise TypeError(f"a lease is an Element or a str, not {type(element).__name__}")
        lease = element.lease if isinstance(element, Element) else element
        if not lease:
            raise ValueError("there is no lease: what was popped is removed already")
        leases.append(lease)
    return leases


def acknowledge(elements: Iterable[Element | str], answer: AckResult) -> AckResult:
    """Note that the leases of these are used up, and pass on the answer that says so."""
    for element in elements:
        if isinstance(element, Element):
            element.is_settled = True
    return answer


# Django reads jsonb as text, psycopg as Python's objects: as text it is the same for all.
COLUMNS: Final = "id, body, enc, headers::text, mature, tries, hops, pushed_at, lease"
DEFAULT_DURATION: Final = timedelta(seconds=120)

Headers = Mapping[str, Any]

_LARGE_FLOAT = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d+(?:\.\d+)?e\+\d+)')
_BEGIN = SqlStatement("BEGIN ISOLATION LEVEL READ COMMITTED")
# A node's connection must not hang.
_BEGIN_WITHOUT_PATIENCE = SqlStatement(f"{_BEGIN.sql}; SET LOCAL lock_timeout = '100ms'")
_COMMIT = SqlStatement("COMMIT")


def push(
    ident: str,
    queue: str,
    body: EncodedBody,
    *,
    headers: Headers | None = None,
    mature: datetime | None = None,
    delay: timedelta | None = None,
    tries: int = 0,
    key: str | None = None,
) -> Call[int]:
    """Push one body; the result is the id, of the earlier element where the key was there."""
    if headers is None and mature is None and delay is None and key is None and tries == 0:
        # Five parameters less are a fifth less of what a call costs the client.
        return Call(
            "SELECT messages.push(%s, %s, %s, %s)",
            (*check_names(ident, queue), body.text, body.enc),
            _id,
            is_send=True,
        )
    return Call(
        "SELECT messages.push(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            *check_names(ident, queue),
            body.text,
            body.enc,
            _headers(headers),
            _mature(mature),
            _seconds(delay),
            tries,
            _key(key),
        ),
        _id,
        is_send=True,
    )


def push_many(
    ident: str,
    queue: str,
    bodies: Sequence[Any],
    *,
    headers: Iterable[Headers | None] | None = None,
    mature: datetime | None = None,
    delay: timedelta | None = None,
    tries: int = 0,
    keys: Iterable[str | None] | None = None,
) -> Call[list[int]]:
    """Push many values, which have one encoding; the result is their ids, in their order."""
    texts, enc = encode_many(list(bodies))
    return Call(
        "SELECT messages.push_many(%s, %s, %b::text[], %s, %b::text[], %s, %s, %s, %b::text[])",
        (
            *check_names(ident, queue),
            texts,
            enc,
            _each("headers", map(_headers, headers), texts) if headers is not None else None,
            _mature(mature),
            _seconds(delay),
            tries,
            _each("keys", map(_key, keys), texts) if keys is not None else None,
        ),
        lambda answer: [int(id_) for id_ in raise_for_error(answer)["Ids"]],
        is_send=True,
    )


def pop(ident: str, queue: str, count: int = 1) -> SqlStatement:
    """Take and remove, within the transaction around it; :func:`elements` reads the rows."""
    return SqlStatement(
        f"SELECT {COLUMNS} FROM messages.pop(%s, %s, %s::int)",  # noqa: S608
        (*check_names(ident, queue), count),
    )


def reserve(
    ident: str, queue: str, count: int = 1, duration: timedelta = DEFAULT_DURATION
) -> SqlStatement:
    """Take and hide for some time; :func:`elements` reads the rows."""
    return SqlStatement(
        f"SELECT {COLUMNS} FROM messages.reserve(%s, %s, %s::int, %s::float8)",  # noqa: S608
        (*check_names(ident, queue), count, duration.total_seconds()),
    )


def elements(queue: str, rows: Rows) -> list[Element]:
    """Read the rows of :func:`pop` and :func:`reserve`."""
    return [element_of(queue, row) for row in rows]


def taking(queue: str, statement: SqlStatement) -> TransactionCall[list[Element]]:
    """Make a call of :func:`pop` or :func:`reserve`, which is committed with its answer."""

    def script() -> Script[list[Element]]:
        rows = yield statement
        return elements(queue, rows)

    return transaction(script)


def holding(
    queue: str, statement: SqlStatement, held: list[Element]
) -> TransactionCall[list[Element]]:
    """Make a call that takes nothing where it is broken off before its commit.

    ``held`` has what is taken from just before the commit on, for who gives it back.
    """

    def script() -> Script[list[Element]]:
        held.clear()
        yield _BEGIN
        rows = yield statement
        held.extend(elements(queue, rows))
        yield _COMMIT
        return list(held)

    return transaction(script)


def commit(ident: str, leases: Sequence[str]) -> Call[AckResult]:
    """Remove what is reserved for good; False for each lease that somebody else has taken over."""
    return _settling("SELECT messages.commit(%s, VARIADIC %b::text[])", ident, leases)


def rollback(ident: str, leases: Sequence[str], delay: timedelta | None = None) -> Call[AckResult]:
    """Give back with one try more: behind those that wait, or after the delay."""
    return _settling(
        "SELECT messages.rollback(%s, %s, VARIADIC %b::text[])", ident, leases, _seconds(delay)
    )


def release(ident: str, leases: Sequence[str]) -> Call[AckResult]:
    """Give back what nobody has looked at: its place and tries are as before."""
    return _settling("SELECT messages.release(%s, VARIADIC %b::text[])", ident, leases)


def remove(ident: str, queue: str, id_: int) -> Call[bool]:
    """Remove an element; False where it is unknown or reserved."""
    return Call(
        "SELECT messages.remove(%s, %s, %s::bigint)",
        (*check_names(ident, queue), id_),
        lambda answer: bool(raise_for_error(answer)["Done"]),
    )


def pause(ident: str, queue: str) -> Call[bool]:
    """Let nobody take from the queue; False where it was paused."""
    return Call("SELECT messages.pause(%s, %s)", check_names(ident, queue), _is_new)


def resume(ident: str, queue: str) -> Call[bool]:
    """Undo pause; False where it was not paused."""
    return Call("SELECT messages.resume(%s, %s)", check_names(ident, queue), _is_new)


def drain(ident: str, queue: str) -> Call[int]:
    """Remove all that is available; the result is how many."""
    return Call(
        "SELECT messages.drain(%s, %s)",
        check_names(ident, queue),
        lambda answer: int(raise_for_error(answer)["Removed"]),
    )


def sizes(ident: str, queue: str) -> Call[QueueSizes]:
    """Ask how many elements a queue holds."""
    return Call("SELECT messages.sizes(%s, %s)", check_names(ident, queue), _sizes)


def queue_listen(
    ident: str, queue: str, noting: Callable[[ListenResult], None]
) -> TransactionCall[ListenResult]:
    """Be notified on this connection, for some time, of what becomes available.

    ``noting`` hears the answer before any notification that came with it is taken in. Raises
    LockNotAvailable where somebody's open transaction is making the queue.
    """

    def script() -> Script[ListenResult]:
        yield _BEGIN_WITHOUT_PATIENCE
        rows = yield SqlStatement("SELECT messages.queue_listen(%s, %s)", check_names(ident, queue))
        awaiting = _awaiting(rows[0][0])
        yield _COMMIT
        noting(awaiting)
        return awaiting

    return transaction(script)


def _settling(sql: str, ident: str, leases: Sequence[str], *more: Any) -> Call[AckResult]:
    return Call(
        sql,
        (*check_names(ident), *more, list(check_names(*leases))),
        lambda answer: AckResult(raise_for_error(answer)["Done"]),
        is_send=True,
    )


def _headers(headers: Headers | None) -> str | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise TypeError(f"headers are a mapping of names that are str: {headers!r:.100}")
    text = EncodedBody.of(dict(headers)).text
    # jsonb would make an integer of what has no point: 1e16 is a float, and is to come back so.
    return _LARGE_FLOAT.sub(_with_point, text) if "e+" in text else text


def _with_point(found: re.Match[str]) -> str:
    return f"{Decimal(found[1]):f}.0" if found[1] else found[0]


def _mature(mature: datetime | None) -> datetime | None:
    if mature is not None and mature.utcoffset() is None:
        raise ValueError(f"mature needs a time zone: {mature}")
    return mature


def _seconds(delay: timedelta | None) -> float | None:
    return delay.total_seconds() if delay is not None else None


def _key(key: str | None) -> str | None:
    return check_names(key)[0] if key is not None else None


def _each(name: str, values: Iterable[str | None], texts: list[str]) -> list[str | None]:
    found = list(values)
    if len(found) != len(texts):
        raise ValueError(f"{len(found)} {name} for {len(texts)} bodies: each needs its own")
    return found


def _id(answer: Any) -> int:
    return int(raise_for_error(answer)["Id"])


def _is_new(answer: Any) -> bool:
    return not raise_for_error(answer).get("Already")


def _sizes(answer: Any) -> QueueSizes:
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


def _awaiting(answer: Any) -> ListenResult:
    answer = raise_for_error(answer)
    return ListenResult(
        str(answer["Channel"]), float(answer["Seconds"]), answer["Next"], answer["Paused"]
    )
