"""Elements: the SQL calls of queues as the API makes them, for any node and without a session."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from psqlmessages.client.calls import checked
from psqlmessages.rest.pool import Pool

# Times as text: PostgreSQL's reach further than Python's. The reservation need not outlive a crash
# of the server, so it does not wait for the disk: who takes for good does so as it commits.
_RESERVE: Final = (
    "SELECT id, body, enc, headers::text, to_json(mature) #>> '{}', tries, lease"
    " FROM set_config('synchronous_commit', 'off', true), messages.reserve(%s, %s, %s, %s::float8)"
)
_PUSH: Final = (
    "SELECT messages.push(client_id => %s, queue => %s, body => %s, enc => %s, headers => %s,"
    " mature => %s::timestamptz, delay => %s::float8, tries => %s::int, key => %s)"
)
_STATUS: Final = (
    "SELECT messages.sizes(%s, %s),"
    " (SELECT to_json(q) FROM messages.list_queues(ARRAY[%s::text]) AS q LIMIT 1)"
)
# What the node may not use is passed over within: its names are not to be told.
_LIST: Final = (
    "SELECT l.queue, l.sizes, l.counted FROM ("
    "SELECT q.queue, messages.sizes(%s, q.queue) AS sizes, to_json(q) AS counted"
    ' FROM (SELECT * FROM messages.queues AS q WHERE q.queue COLLATE "C" > %s'
    ' ORDER BY q.queue COLLATE "C" OFFSET 0) AS q OFFSET 0'
    ") AS l WHERE l.sizes ->> 'Err' = '0' LIMIT %s"
)


class Element(NamedTuple):
    """An element that was taken: its body as it travels, its headers as JSON text."""

    id: int
    body: str
    enc: str | None
    headers: str
    mature: str
    tries: int
    lease: str


class Push(NamedTuple):
    """What is pushed, besides the body."""

    headers: str
    mature: datetime | None
    delay: float | None
    tries: int
    key: str | None


async def push(
    pool: Pool, ident: str, queue: str, body: str, enc: str | None, given: Push
) -> dict[str, Any]:
    """Push; the answer has ``Id``, and ``Already`` where the key was there."""
    params = (ident, queue, body, enc, given.headers, given.mature, given.delay)
    return await _answer(pool, _PUSH, (*params, given.tries, given.key))


async def reserve(pool: Pool, ident: str, queue: str, count: int, seconds: float) -> list[Element]:
    """Reserve elements for some seconds."""
    rows = await pool.fetch(_RESERVE, (ident, queue, count, seconds))
    return [Element(*row) for row in rows]


async def commit(pool: Pool, ident: str, lease: str) -> bool:
    """Remove a reserved element for good; False where the lease does not hold any more."""
    return await _is_done(pool, "SELECT messages.commit(%s, %s)", (ident, lease))


async def rollback(pool: Pool, ident: str, delay: float | None, lease: str) -> bool:
    """Give a reserved element back; False where the lease does not hold any more."""
    sql = "SELECT messages.rollback(%s, %s::float8, %s)"
    return await _is_done(pool, sql, (ident, delay, lease))


async def release(pool: Pool, ident: str, leases: Sequence[str]) -> None:
    """Give back reserved elements that nobody has looked at."""
    sql = "SELECT messages.release(%s, VARIADIC %s::text[])"
    await _answer(pool, sql, (ident, list(leases)))


async def remove(pool: Pool, ident: str, queue: str, number: int) -> bool:
    """Remove an element that is not reserved."""
    answer = await _answer(pool, "SELECT messages.remove(%s, %s, %s)", (ident, queue, number))
    return bool(answer["Done"])


async def pause(pool: Pool, ident: str, queue: str) -> None:
    """Have takers wait."""
    await _answer(pool, "SELECT messages.pause(%s, %s)", (ident, queue))


async def resume(pool: Pool, ident: str, queue: str) -> None:
    """Let takers go on."""
    await _answer(pool, "SELECT messages.resume(%s, %s)", (ident, queue))


async def status(pool: Pool, ident: str, queue: str) -> dict[str, Any]:
    """Read the sizes and counters of a queue."""
    ((sizes, counted),) = await pool.fetch(_STATUS, (ident, queue, queue))
    return told(queue, checked(sizes), counted or {})


async def statuses(
    pool: Pool, ident: str, after: str, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Read those of the next queues by name that this node may use; and where to go on."""
    rows = await pool.fetch(_LIST, (ident, after, limit))
    found = [told(queue, sizes, counted) for queue, sizes, counted in rows]
    return found, rows[-1][0] if len(rows) == limit else None


def told(queue: str, sizes: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """Put together what the API tells of a queue."""
    named = {name.lower(): value for name, value in sizes.items() if name != "Err"}
    return {**counted, **named, "queue": queue}


async def _is_done(pool: Pool, sql: str, params: Sequence[Any]) -> bool:
    answer = await _answer(pool, sql, params)
    return bool(answer["Done"][0])


async def _answer(pool: Pool, sql: str, params: Sequence[Any]) -> dict[str, Any]:
    ((answer,),) = await pool.fetch(sql, params)
    return checked(answer)
