"""Queue calls: pushing, taking and settling as values, like those of ``calls``. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from psqlmessages.client.calls import Call, checked, names
from psqlmessages.client.queue_elements import (
    Awaiting,
    Element,
    QueueSizes,
    Settled,
    element_of,
)
from psqlmessages.client.transactions import Rows, Script, Statement, Transaction, transaction
from psqlmessages.wire import Body, encode_many

# Django reads jsonb as text, psycopg as Python's objects: as text it is the same for all.
COLUMNS: Final = "id, body, enc, headers::text, mature, tries, hops, pushed_at, lease"
DEFAULT_DURATION: Final = timedelta(seconds=120)

Headers = Mapping[str, Any]

_LARGE_FLOAT = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d+(?:\.\d+)?e\+\d+)')
_BEGIN = Statement("BEGIN ISOLATION LEVEL READ COMMITTED")
# A node's connection must not hang.
_BEGIN_WITHOUT_PATIENCE = Statement(f"{_BEGIN.sql}; SET LOCAL lock_timeout = '100ms'")
_COMMIT = Statement("COMMIT")


def push(
    ident: str,
    queue: str,
    body: Body,
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
            (*names(ident, queue), body.text, body.enc),
            _id,
            is_send=True,
        )
    return Call(
        "SELECT messages.push(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            *names(ident, queue),
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
            *names(ident, queue),
            texts,
            enc,
            _each("headers", map(_headers, headers), texts) if headers is not None else None,
            _mature(mature),
            _seconds(delay),
            tries,
            _each("keys", map(_key, keys), texts) if keys is not None else None,
        ),
        lambda answer: [int(id_) for id_ in checked(answer)["Ids"]],
        is_send=True,
    )


def pop(ident: str, queue: str, count: int = 1) -> Statement:
    """Take and remove, within the transaction around it; :func:`elements` reads the rows."""
    return Statement(
        f"SELECT {COLUMNS} FROM messages.pop(%s, %s, %s::int)",  # noqa: S608
        (*names(ident, queue), count),
    )


def reserve(
    ident: str, queue: str, count: int = 1, duration: timedelta = DEFAULT_DURATION
) -> Statement:
    """Take and hide for some time; :func:`elements` reads the rows."""
    return Statement(
        f"SELECT {COLUMNS} FROM messages.reserve(%s, %s, %s::int, %s::float8)",  # noqa: S608
        (*names(ident, queue), count, duration.total_seconds()),
    )


def elements(queue: str, rows: Rows) -> list[Element]:
    """Read the rows of :func:`pop` and :func:`reserve`."""
    return [element_of(queue, row) for row in rows]


def taking(queue: str, statement: Statement) -> Transaction[list[Element]]:
    """Make a call of :func:`pop` or :func:`reserve`, which is committed with its answer."""

    def script() -> Script[list[Element]]:
        rows = yield statement
        return elements(queue, rows)

    return transaction(script)


def holding(queue: str, statement: Statement, held: list[Element]) -> Transaction[list[Element]]:
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


def commit(ident: str, leases: Sequence[str]) -> Call[Settled]:
    """Remove what is reserved for good; False for each lease that somebody else has taken over."""
    return _settling("SELECT messages.commit(%s, VARIADIC %b::text[])", ident, leases)


def rollback(ident: str, leases: Sequence[str], delay: timedelta | None = None) -> Call[Settled]:
    """Give back with one try more: behind those that wait, or after the delay."""
    return _settling(
        "SELECT messages.rollback(%s, %s, VARIADIC %b::text[])", ident, leases, _seconds(delay)
    )


def release(ident: str, leases: Sequence[str]) -> Call[Settled]:
    """Give back what nobody has looked at: its place and tries are as before."""
    return _settling("SELECT messages.release(%s, VARIADIC %b::text[])", ident, leases)


def remove(ident: str, queue: str, id_: int) -> Call[bool]:
    """Remove an element; False where it is unknown or reserved."""
    return Call(
        "SELECT messages.remove(%s, %s, %s::bigint)",
        (*names(ident, queue), id_),
        lambda answer: bool(checked(answer)["Done"]),
    )


def pause(ident: str, queue: str) -> Call[bool]:
    """Let nobody take from the queue; False where it was paused."""
    return Call("SELECT messages.pause(%s, %s)", names(ident, queue), _is_new)


def resume(ident: str, queue: str) -> Call[bool]:
    """Undo pause; False where it was not paused."""
    return Call("SELECT messages.resume(%s, %s)", names(ident, queue), _is_new)


def drain(ident: str, queue: str) -> Call[int]:
    """Remove all that is available; the result is how many."""
    return Call(
        "SELECT messages.drain(%s, %s)",
        names(ident, queue),
        lambda answer: int(checked(answer)["Removed"]),
    )


def sizes(ident: str, queue: str) -> Call[QueueSizes]:
    """Ask how many elements a queue holds."""
    return Call("SELECT messages.sizes(%s, %s)", names(ident, queue), _sizes)


def queue_listen(
    ident: str, queue: str, noting: Callable[[Awaiting], None]
) -> Transaction[Awaiting]:
    """Be notified on this connection, for some time, of what becomes available.

    ``noting`` hears the answer before any notification that came with it is taken in. Raises
    LockNotAvailable where somebody's open transaction is making the queue.
    """

    def script() -> Script[Awaiting]:
        yield _BEGIN_WITHOUT_PATIENCE
        rows = yield Statement("SELECT messages.queue_listen(%s, %s)", names(ident, queue))
        awaiting = _awaiting(rows[0][0])
        yield _COMMIT
        noting(awaiting)
        return awaiting

    return transaction(script)


def _settling(sql: str, ident: str, leases: Sequence[str], *more: Any) -> Call[Settled]:
    return Call(
        sql,
        (*names(ident), *more, list(names(*leases))),
        lambda answer: Settled(checked(answer)["Done"]),
        is_send=True,
    )


def _headers(headers: Headers | None) -> str | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise TypeError(f"headers are a mapping of names that are str: {headers!r:.100}")
    text = Body.of(dict(headers)).text
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
    return names(key)[0] if key is not None else None


def _each(name: str, values: Iterable[str | None], texts: list[str]) -> list[str | None]:
    found = list(values)
    if len(found) != len(texts):
        raise ValueError(f"{len(found)} {name} for {len(texts)} bodies: each needs its own")
    return found


def _id(answer: Any) -> int:
    return int(checked(answer)["Id"])


def _is_new(answer: Any) -> bool:
    return not checked(answer).get("Already")


def _sizes(answer: Any) -> QueueSizes:
    answer = checked(answer)
    next_ = answer["Next"]
    return QueueSizes(
        answer["Total"],
        answer["Available"],
        answer["Scheduled"],
        answer["Reserved"],
        datetime.fromisoformat(next_) if next_ is not None else None,
        answer["Paused"],
    )


def _awaiting(answer: Any) -> Awaiting:
    answer = checked(answer)
    return Awaiting(
        str(answer["Channel"]), float(answer["Seconds"]), answer["Next"], answer["Paused"]
    )
