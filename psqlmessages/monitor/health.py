"""Health: the figures of the server and of the tables; what cannot be read is None, never 0."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Final

import psycopg

from psqlmessages.commands.doctor_queue import (
    COMMIT_LOCK,
    HELD_SECONDS,
    HOLDERS,
    QUEUE_LIMIT,
    SHOWN_HOLDERS,
    USAGE,
)
from psqlmessages.monitor.reading import Reader

_COUNTS: Final = """
    SELECT (SELECT count(*) FROM psqlmessages_session), (SELECT count(*) FROM psqlmessages_client)
"""
# No table is read: how many rows the statistics say there are, and how long the files are.
_BODIES: Final = """
    SELECT coalesce(sum(pg_stat_get_live_tuples(c.oid)), 0)::bigint,
        coalesce(sum(
            pg_relation_size(c.oid)
            + CASE WHEN c.reltoastrelid <> 0 THEN pg_relation_size(c.reltoastrelid) ELSE 0 END
        ), 0)::bigint
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'psqlmessages_body'::regclass
"""


@dataclass(slots=True)
class Health:
    """The figures of one moment. Times are seconds, sizes bytes, the usage is from 0 to 1."""

    at: float
    usage: float | None = None
    holders: list[dict[str, Any]] | None = None
    sessions: int | None = None
    nodes: int | None = None
    waiting: int | None = None
    waiting_seconds: float | None = None
    waiting_for: int | None = None
    bodies: int | None = None
    bodies_size: int | None = None
    round_trip: float | None = None
    echo: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Give the figures as JSON can hold them."""
        return asdict(self)


async def read_health(reader: Reader, at: float) -> Health:
    """Read all figures; raise where the database does not answer at all."""
    health = Health(at)
    begun = perf_counter()
    health.usage = float((await reader.rows(USAGE))[0][0])
    health.round_trip = perf_counter() - begun
    for read in (_read_holders, _read_counts, _read_commit_lock, _read_bodies):
        await _unless_refused(read, reader, health)
    return health


async def _unless_refused(
    read: Callable[[Reader, Health], Awaitable[None]], reader: Reader, health: Health
) -> None:
    try:
        await read(reader, health)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.QueryCanceled):
        # Not for this role to see, or too slow: that figure stays unknown.
        return


async def _read_holders(reader: Reader, health: Health) -> None:
    is_full = (health.usage or 0.0) >= QUEUE_LIMIT
    rows = await reader.rows(HOLDERS, (HELD_SECONDS, is_full, SHOWN_HOLDERS))
    if is_full and not rows:
        # Somebody does, whom this role does not see.
        return
    names = ("has_node", "pid", "role", "program", "state", "wait", "seconds")
    health.holders = [dict(zip(names, row, strict=True)) for row in rows]


async def _read_counts(reader: Reader, health: Health) -> None:
    health.sessions, health.nodes = (await reader.rows(_COUNTS))[0]


async def _read_commit_lock(reader: Reader, health: Health) -> None:
    row = (await reader.rows(COMMIT_LOCK))[0]
    health.waiting, health.waiting_seconds, health.waiting_for = row


async def _read_bodies(reader: Reader, health: Health) -> None:
    health.bodies, health.bodies_size = (await reader.rows(_BODIES))[0]
