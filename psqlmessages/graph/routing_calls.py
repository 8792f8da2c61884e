"""Routing calls: the statements by which loops take and deliver, as values. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from psqlmessages.graph.batches import Batch, Copy, RemoteCopy, Taken
from psqlmessages.graph.lines import Query, Row

# What nobody commits comes back after so long, and how long a transaction may wait for us: the
# process that had taken it may be gone without a word.
LEASE_SECONDS: Final = 120
_IDLE: Final = "SET LOCAL idle_in_transaction_session_timeout = '120s'"
_TAKE: Final = (
    "SELECT id::text, id, body, enc, headers, tries, hops, pushed_at, delivered,"
    " statement_timestamp() FROM messages.take(%s, %s, %s, %s)"
)
_RESERVE: Final = (
    "SELECT lease, id, body, enc, headers, tries, hops, pushed_at, delivered,"
    " statement_timestamp() FROM messages.reserve(%s, %s, %s, %s)"
)
# psycopg's text arrays were measured ten times slower than binary ones.
_DELIVER: Final = (
    "SELECT messages.deliver(%s, %s, %b::text[], %b::text[], %b::text[], %b::text[], %b::text[],"
    " %b::text[], %b::text[], %b::text[], %b::timestamptz[], %b::int[])"
)
_PUSH: Final = (
    "SELECT messages.push_many(%s, %s, %b::text[], %s, %b::text[], %s::timestamptz,"
    " %s::float8, %s, %b::text[])"
)


def take(ident: str, queue: str, count: int, *, with_body: bool) -> list[Query]:
    """Begin a transaction that takes elements."""
    taking = Query(_TAKE, (ident, queue, count, with_body), is_binary=True)
    return [Query("BEGIN"), Query(_IDLE), taking]


def reserve(ident: str, queue: str, count: int) -> Query:
    """Take elements for a while."""
    return Query(_RESERVE, (ident, queue, count, LEASE_SECONDS), is_binary=True)


def taken(rows: Sequence[Row]) -> list[Taken]:
    """Read the rows of either."""
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
            list(batch.fates),
            list(failed) or None,
            *(_column(copies, place) for place in _COLUMNS),
        ),
    )


_COLUMNS: Final = tuple(
    Copy._fields.index(name)
    for name in ("ref", "mark", "queue", "headers", "body", "enc", "mature", "tries")
)


def _column(copies: Sequence[Copy], place: int) -> list[Any] | None:
    """Return a column; None, which is quicker to send, where it has no value at all."""
    values = [copy[place] for copy in copies]
    return values if any(value is not None for value in values) else None


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
