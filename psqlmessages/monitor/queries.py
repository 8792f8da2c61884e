"""Queries of the monitor with time limits; health of the server and the tables."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NamedTuple

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.utils.connection import ConnectionDoesNotExist

from psqlmessages.cli.doctor_checks import (
    COMMIT_LOCK_QUERY,
    HOLDERS_QUERY,
    MAX_HOLDERS,
    MAX_QUEUE_USAGE,
    MIN_OPEN_SECONDS,
    QUEUE_USAGE_QUERY,
)
from psqlmessages.client.connect import connect_async
from psqlmessages.client.connection import AsyncConnection, is_broken
from psqlmessages.exchanges.store.stats import WORKER_TIMEOUT_SECONDS
from psqlmessages.models.names import patterns
from psqlmessages.monitor.formats import MAX_COUNTED
from psqlmessages.monitor.history import TopicHistory
from psqlmessages.monitor.topic_list import TopicPage, TopicQuery
from psqlmessages.orm import database_dsn

_QUERY_TIMEOUT_SECONDS: Final = 2
MAX_RULES: Final = 200

_TOPICS_QUERY: Final = """
    SELECT v.topic, v.notifiers, v.listeners FROM messages.list_topics(%s::text[]) AS v
"""
_RULES_QUERY: Final = """
    SELECT a.id, a.ident, a.role, a.dest, a.mode
    FROM psqlmessages_auth AS a
    WHERE a.type = 'Topic' AND a.dest = ANY (%s)
    ORDER BY a.ident, a.role, a.dest
    LIMIT %s
"""
OBSERVING_QUERY: Final = """
    SELECT EXISTS (
        SELECT FROM psqlmessages_observation AS o
        JOIN psqlmessages_client AS c ON c.id = o.client_id
        WHERE c.ident = %s AND o.pattern = '*'
    )
"""
# The role that made a refused call; "" if unknown. Django's role makes the calls of REST and of
# Django's functions. If rules allow only other roles to act as the node, a session with one of
# them may have registered the node.
CALLER_ROLE: Final = """(
    CASE
        WHEN messages._has_rule(session_user, {0}) OR NOT messages._is_known_node({0})
            THEN session_user::text
        ELSE coalesce((SELECT c.role::text FROM psqlmessages_client AS c WHERE c.ident = {0}), '')
    END
)"""

# The time of the oldest message that the subscription ``s`` has not read, in the topic ``t``, and
# the number of its unread messages.
OLDEST_UNREAD: Final = """(
    SELECT m.published_at FROM psqlmessages_streammessage AS m
    WHERE m.topic_id = t.id AND m.id > s.position ORDER BY m.id LIMIT 1
)"""
UNREAD_COUNT: Final = f"""(
    SELECT count(*) FROM (
        SELECT FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = t.id AND m.id > s.position LIMIT {MAX_COUNTED + 1}
    ) AS unread
)"""  # noqa: S608 - built from constants
# Whether ``c``, a row of counts, is the heartbeat of a live worker of the exchange ``x``. The row
# also has the rules that the worker lacks.
IS_HEARTBEAT: Final = f"""(
    c.exchange_id = x.id AND c.outcome = 'ok'
    AND c.seen_at > statement_timestamp() - interval '{WORKER_TIMEOUT_SECONDS} s'
)"""

Rows = list[tuple[Any, ...]]
Query = tuple[str, Sequence[Any] | Mapping[str, Any]]


def disk_size(*tables: str) -> str:
    """Return an SQL expression: the size of tables, with partitions and indexes, in bytes."""
    names = ", ".join(f"'{table}'" for table in tables)
    return f"""(
        SELECT sum(pg_total_relation_size(p.relid))::bigint
        FROM unnest(ARRAY[{names}]::regclass[]) AS t (relid), LATERAL (
            SELECT t.relid UNION SELECT l.relid FROM pg_partition_tree(t.relid) AS l
        ) AS p
    )"""  # noqa: S608 - callers pass constants


QUEUES_DISK_SIZE: Final = disk_size("psqlmessages_element", "psqlmessages_elementkey")
STREAMS_DISK_SIZE: Final = disk_size("psqlmessages_streammessage")
BODIES_DISK_SIZE: Final = disk_size("psqlmessages_body")


class RuleRow(NamedTuple):
    """A rule for a topic, as stored."""

    id: int
    ident: str
    role: str
    dest: str
    mode: str


class MonitorReader:
    """Runs queries on a connection that it opens on first use, and again after a loss."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: AsyncConnection | None = None
        self._lock = asyncio.Lock()

    async def fetch(self, query: str, values: Any = None) -> Rows:
        """Connect if necessary, and run a query for at most two seconds; raise psycopg's errors."""
        async with self._lock:
            if self._connection is None:
                self._connection = await connect(self._dsn, "monitor", _QUERY_TIMEOUT_SECONDS)
            connection = self._connection
            try:
                return await (await connection.execute(query, values)).fetchall()
            except psycopg.Error as error:
                if is_broken(connection, error):
                    self._connection = None
                    await connection.close()
                raise

    async def read_topics(self, names: Iterable[str]) -> list[tuple[str, list[str], list[str]]]:
        """Read senders and listeners of these topics."""
        return await self.fetch(_TOPICS_QUERY, [list(names)])

    async def read_page(
        self, query: TopicQuery, topics: Iterable[TopicHistory], now: int
    ) -> TopicPage:
        """Read a page of the topic list, sorted by the counts of ``topics`` at this Unix time.

        A page after the last has no names, but the number of all topics that match.
        """
        rows = await self.fetch(query.sql, query.parameters(topics, now))
        if not rows and query.page > 1:
            first = await self.read_page(query._replace(page=1), (), now)
            return TopicPage((), first.total)
        return TopicPage(tuple(name for name, _ in rows), rows[0][1] if rows else 0)

    async def count_topics(self) -> int:
        """Count the topics in the database."""
        return (await self.fetch("SELECT count(*) FROM psqlmessages_topic"))[0][0]

    async def read_rules(self, topic: str) -> list[RuleRow]:
        """Read the rules for a topic, including patterns that match it: at most MAX_RULES + 1."""
        rows = await self.fetch(_RULES_QUERY, (patterns(topic), MAX_RULES + 1))
        return [RuleRow._make(row) for row in rows]

    async def is_observing(self, ident: str) -> bool:
        """Return whether a node is registered and observes all topics."""
        return (await self.fetch(OBSERVING_QUERY, (ident,)))[0][0]

    async def read_start_time(self) -> float:
        """Return when PostgreSQL was started, as Unix time."""
        query = "SELECT extract(epoch FROM pg_postmaster_start_time())::float8"
        return float((await self.fetch(query))[0][0])

    async def read_role(self) -> str:
        """Return the PostgreSQL role of this connection."""
        return (await self.fetch("SELECT session_user::text"))[0][0]

    async def close(self) -> None:
        """Close the connection; the next query opens a new one."""
        async with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()


async def connect(dsn: str, name: str, query_seconds: float) -> AsyncConnection:
    """Connect, and limit each query to this time; wait for an answer at most twice as long."""
    return await connect_async(
        dsn, name, answer_seconds=2 * query_seconds, statement_seconds=query_seconds
    )


async def read_once(
    name: str, alias: str | None, queries: Sequence[Query], seconds: float, *, query_seconds: float
) -> list[Rows | None] | None:
    """Return the result of :func:`run_queries`; None also if it takes more than ``seconds``."""
    task = asyncio.create_task(run_queries(name, alias, queries, query_seconds))
    # Not `await task`: if the connection hangs, closing it may hang too.
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        return None
    return task.result()


async def fetch_rows(alias: str, query: Query, seconds: float) -> Rows | None:
    """Run a query on a new connection; return None if it fails or takes more than ``seconds``."""
    results = await read_once("monitor", alias, [query], seconds, query_seconds=seconds)
    return results[0] if results else None


async def run_queries(
    name: str, alias: str | None, queries: Sequence[Query], query_seconds: float
) -> list[Rows | None] | None:
    """Run queries on a new connection; return None if the database fails or is not configured.

    The result of a query is None if it takes more than ``query_seconds``, if it is not allowed, or
    if a schema, table or function is missing.
    """
    try:
        async with await connect(database_dsn(alias), name, query_seconds) as connection:
            return [await _fetch_or_none(connection, query) for query in queries]
    except (psycopg.Error, OSError, ImproperlyConfigured, ConnectionDoesNotExist):
        return None


async def _fetch_or_none(connection: AsyncConnection, query: Query) -> Rows | None:
    try:
        return await (await connection.execute(*query)).fetchall()
    except (
        psycopg.errors.QueryCanceled,
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.InvalidSchemaName,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.UndefinedTable,
    ):
        return None


# Health of the server and the tables. A value that cannot be read is None, never 0.

_COUNTS_QUERY: Final = """
    SELECT (SELECT count(*) FROM psqlmessages_session), (SELECT count(*) FROM psqlmessages_client)
"""
# This query reads no tables: it estimates rows from statistics, and adds up sizes of files.
_BODIES_QUERY: Final = """
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
    """Health at a time. Durations are in seconds, sizes in bytes.

    ``usage``: how full the notification queue is, 0 to 1. ``holders``: sessions that prevent its
    clean-up. ``waiting``: the number of transactions that wait for the lock of commits with
    notifications. The longest has waited for ``waiting_seconds``, and the process with the pid
    ``waiting_for`` has the lock. ``bodies``: the estimated number of large bodies. ``round_trip``:
    duration of a query. ``echo``: duration of the hub's last probe.
    """

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


async def read_health(reader: MonitorReader, at: float) -> Health:
    """Read all values but ``echo``; raise psycopg's errors if the database fails."""
    health = Health(at)
    began = perf_counter()
    health.usage = float((await reader.fetch(QUEUE_USAGE_QUERY))[0][0])
    health.round_trip = perf_counter() - began
    # If reading a value raises one of these errors, the value stays None.
    ignored_errors = (psycopg.errors.InsufficientPrivilege, psycopg.errors.QueryCanceled)
    with suppress(*ignored_errors):
        health.holders = await _read_holders(reader, is_full=health.usage >= MAX_QUEUE_USAGE)
    with suppress(*ignored_errors):
        health.sessions, health.nodes = (await reader.fetch(_COUNTS_QUERY))[0]
    with suppress(*ignored_errors):
        row = (await reader.fetch(COMMIT_LOCK_QUERY))[0]
        health.waiting, health.waiting_seconds, health.waiting_for = row
    with suppress(*ignored_errors):
        health.bodies, health.bodies_size = (await reader.fetch(_BODIES_QUERY))[0]
    return health


async def _read_holders(reader: MonitorReader, *, is_full: bool) -> list[dict[str, Any]] | None:
    rows = await reader.fetch(HOLDERS_QUERY, (MIN_OPEN_SECONDS, MAX_QUEUE_USAGE, MAX_HOLDERS))
    holders = [holder for _, *holder in rows if holder[0] is not None]
    if is_full and not holders:
        # A session prevents the clean-up, but this role may not see the session.
        return None
    names = ("has_node", "pid", "role", "program", "state", "wait", "seconds")
    return [dict(zip(names, holder, strict=True)) for holder in holders]
