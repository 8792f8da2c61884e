"""Gauges: what the soak watches, each a number under a name: processes, and the database."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psycopg

MEGABYTE = 1024 * 1024
BACKENDS = """
    SELECT pid, coalesce(nullif(application_name, ''), backend_type), backend_type
    FROM pg_stat_activity WHERE pid <> pg_backend_pid()
"""
# The tables of a rotation count as one: they are filled in turn.
SIZES = """
    SELECT n.nspname || '.' || regexp_replace(c.relname, '_?[0-9]+$', ''),
           sum(pg_total_relation_size(c.oid)), sum(s.n_live_tup), sum(s.n_dead_tup)
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
    WHERE c.relkind IN ('r', 'm') AND n.nspname IN ('public', 'messages', 'pg_catalog')
    GROUP BY 1
"""
LOCKS = "SELECT count(*), count(*) FILTER (WHERE locktype = 'advisory') FROM pg_locks"
QUEUE_USAGE = "SELECT pg_notification_queue_usage()"

Gauges = dict[str, float]


def of_process(name: str, pid: int) -> Gauges:
    """Read one process: its own memory, not what it shares."""
    process = Path("/proc") / str(pid)
    try:
        descriptors = len(list((process / "fd").iterdir()))
        return {
            f"memory of {name}": _status(pid, "RssAnon") / 1024,
            f"descriptors of {name}": descriptors,
            f"threads of {name}": _status(pid, "Threads"),
        }
    except (FileNotFoundError, ProcessLookupError, KeyError):
        # It ended in this moment; who must not is noticed by others.
        return {}


def of_database(connection: psycopg.Connection) -> Gauges:
    """Read PostgreSQL: its backends' memory by who uses them, connections, locks, sizes."""
    gauges: Gauges = {}
    clients, memory = 0, defaultdict[str, float](float)
    for pid, application, kind in connection.execute(BACKENDS).fetchall():
        clients += kind == "client backend"
        # Guests and the many WebSockets of one kind are one kind.
        name = re.sub(r"[.0-9]+$", "", application)
        try:
            memory[name] = max(memory[name], _status(pid, "RssAnon") / 1024)
        except (FileNotFoundError, ProcessLookupError, KeyError):
            continue
    gauges |= {f"memory of the backend of {name}": most for name, most in memory.items()}
    gauges["connections"] = clients
    gauges["locks"], gauges["advisory locks"] = connection.execute(LOCKS).fetchone()
    (gauges["notification queue"],) = connection.execute(QUEUE_USAGE).fetchone()
    for name, size, live, dead in connection.execute(SIZES).fetchall():
        gauges[f"table {name}"] = float(size) / MEGABYTE
        gauges[f"rows of {name}"] = float(live or 0)
        gauges[f"dead rows of {name}"] = float(dead or 0)
    return gauges


def _status(pid: int, field: str) -> int:
    for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)


# The verdict: whether a gauge was at the end where it was when all had warmed up. One whose name
# begins so may grow by a share of what it was, and some besides. The first that fits counts.
BOUNDS = (
    ("memory of the backend", 0.1, 4), ("memory", 0.1, 8),
    ("descriptors", 0, 12),  # connections of callers come and go
    ("threads", 0, 6), ("connections", 0, 10),
    ("locks", 0, 250),  # a transaction of many tables, caught in the act, holds about a hundred
    ("advisory locks", 0, 8), ("notification queue", 0, 0.001), ("table", 0.5, 2),
)  # fmt: skip


class Change(NamedTuple):
    """A gauge's value when all had warmed up, at the end, and what it may be then."""

    name: str
    first: float
    last: float
    most: float

    @property
    def has_grown(self) -> bool:
        return self.last > self.most

    def __str__(self) -> str:
        return f"{self.name}: {self.first:.6g} -> {self.last:.6g}"


def changes(samples: Sequence[tuple[float, Gauges]], warm: float) -> list[Change]:
    """Compare what follows `warm` seconds with the end, each the most of a tenth of the rest.

    What was not there in the beginning was 0, but for the memory of those who come and go, which
    is what it was when they were first seen. What has gone does not grow.
    """
    end = samples[-1][0]
    window = (end - warm) / 10
    first = _most(samples, warm, warm + window)
    last = _most(samples, end - window, end)
    found = []
    for name in sorted(last):
        bounds = [(share, more) for begins, share, more in BOUNDS if name.startswith(begins)]
        if bounds:
            guest = next(seen[name] for at, seen in samples if name in seen and at >= warm)
            was = first.get(name, guest if name.startswith("memory") else 0)
            share, more = bounds[0]
            found.append(Change(name, was, last[name], was * (1 + share) + more))
    return found


def _most(samples: Sequence[tuple[float, Gauges]], since: float, until: float) -> Gauges:
    most: Gauges = {}
    for at, gauges in samples:
        if since <= at <= until:
            most |= {name: max(value, most.get(name, 0)) for name, value in gauges.items()}
    return most
