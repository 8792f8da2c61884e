"""Routing calls: the statements by which loops take and deliver, as values. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from psqlmessages.graph.batches import Batch, Copy, RemoteCopy, Taken
from psqlmessages.graph.lines import Query, Row

# What nobody commits comes back after so long, and how long a transaction may wait for us: the
# process that had taken it may be gone without a word.
LEASE_SECONDS: Final = 120
_IDLE: Final = (
    "SELECT set_config('idle_in_transaction_session_timeout', '120s', true), statement_timestamp()"
)
_TAKE: Final = (
    "SELECT id::text, id, body, enc, headers, tries, hops, pushed_at, delivered"
    " FROM messages.take(%s, %s, %s, %s)"
)
_RESERVE: Final = (
    "SELECT lease, id, body, enc, headers, tries, hops, pushed_at, delivered,"
    " statement_timestamp() FROM messages.reserve(%s, %s, %s, %s)"
)
# psycopg's text arrays were measured ten times slower than binary ones, and these three times
# slower than joining what needs no quotes, or was quoted before.
_DELIVER: Final = (
    "SELECT messages.deliver(%s, %s, %s::text[], %s::text[], %s::text[], %s::text[], %s::text[],"
    " %b::text[], %b::text[], %b::text[], %b::timestamptz[], %b::int[])"
)
_PUSH: Final = (
    "SELECT messages.push_many(%s, %s, %b::text[], %s, %b::text[], %s::timestamptz,"
    " %s::float8, %s, %b::text[])"
)


def take(ident: str, queue: str, count: int, *, with_body: bool) -> list[Query]:
    """Begin a transaction that takes elements; see `taken_at_once` for the answers."""
    taking = Query(_TAKE, (ident, queue, count, with_body), is_binary=True)
    return [Query("BEGIN"), Query(_IDLE, is_binary=True), taking]


def taken_at_once(answers: Sequence[Sequence[Row]]) -> list[Taken]:
    """Read the answers to `take`: the time is asked for once, and not with each element."""
    _, ((_, now),), rows = answers
    return [Taken._make((*row, now)) for row in rows]


def reserve(ident: str, queue: str, count: int) -> Query:
    """Take elements for a while."""
    return Query(_RESERVE, (ident, queue, count, LEASE_SECONDS), is_binary=True)


def taken(rows: Sequence[Row]) -> list[Taken]:
    """Read the rows of `reserve`."""
    return [Taken._make(row) for row in rows]


def release(ident: str, leases: Sequence[str]) -> Query:
    """Give back elements as if they had not been taken."""
    return Query("SELECT messages.release(%s, VARIADIC %b::text[])", (ident, list(leases)))


def deliver(batch: Batch, failed: Sequence[str]) -> Query:
    """Deliver the copies of a batch in the source's database, and end its elements."""
    copies = batch.copies
    return Query(
        _DELIVER,
        (
            batch.plan.ident,
            batch.plan.graphed.source.queue,
            # Ids and leases: nothing to be quoted.
            _literal(batch.fates),
            _literal(failed) if failed else None,
            _literal(copy.ref for copy in copies),
            _literal(_quoted(copy.mark) for copy in copies),
            _literal(_quoted(copy.queue) for copy in copies),
            *_changes(copies),
        ),
    )


_CHANGES: Final = ("headers", "body", "enc", "mature", "tries")
_FIRST_CHANGE: Final = Copy._fields.index(_CHANGES[0])
_NO_CHANGE: Final = (None,) * len(_CHANGES)


def _changes(copies: Sequence[Copy]) -> Sequence[list[Any] | None]:
    """Return what is other than at the source, a column each; None where it has no value at all."""
    changes = [copy[_FIRST_CHANGE:] for copy in copies]
    if changes.count(_NO_CHANGE) == len(changes):
        return _NO_CHANGE
    columns = map(list, zip(*changes, strict=True))
    return [column if any(value is not None for value in column) else None for column in columns]


def _literal(texts: Iterable[str]) -> str:
    """Write an array as PostgreSQL reads it, of texts that need no quotes or have them."""
    return "{" + ",".join(texts) + "}"


@lru_cache(maxsize=4096)
def _quoted(text: str | None) -> str:
    """Write an element of an array; None is null."""
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def push(ident: str, copies: Sequence[RemoteCopy]) -> Query:
    """Push copies that differ in nothing but bodies, headers and keys."""
    first = copies[0]
    return Query(
        _PUSH,
        (
            ident,
            first.queue,
            [copy.body for copy in copies],
            first.enc,
            [copy.headers for copy in copies],
            first.mature,
            first.delay,
            first.tries,
            [copy.key for copy in copies],
        ),
    )
