"""Gauges: numbers that must not grow during the soak test, of processes and of the database."""

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
# Tables that are rotated count as one table.
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


def read_process(name: str, pid: int) -> Gauges:
    """Read the private memory, descriptors and threads of a process."""
    process = Path("/proc") / str(pid)
    try:
        descriptors = len(list((process / "fd").iterdir()))
        return {
            f"memory of {name}": _status(pid, "RssAnon") / 1024,
            f"descriptors of {name}": descriptors,
            f"threads of {name}": _status(pid, "Threads"),
        }
    except (FileNotFoundError, ProcessLookupError, KeyError):
        # The process has ended. If it should not have, another check fails.
        return {}


def read_database(connection: psycopg.Connection) -> Gauges:
    """Read connections, locks, sizes of tables, and the largest memory of each kind of backend."""
    gauges: Gauges = {}
    clients, memory = 0, defaultdict[str, float](float)
    for pid, application, kind in connection.execute(BACKENDS).fetchall():
        clients += kind == "client backend"
        # Names that differ only in a number are of one kind.
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


# A gauge whose name begins with the text may grow, after the warm-up, by this part of its value and
# by this number. The first text that matches applies.
BOUNDS = (
    ("memory of the backend", 0.1, 4), ("memory", 0.1, 8),
    ("descriptors", 0, 12),  # connections of callers come and go
    ("threads", 0, 6), ("connections", 0, 10),
    ("locks", 0, 250),  # a transaction of many tables, caught in the act, holds about a hundred
    ("advisory locks", 0, 8), ("notification queue", 0, 0.001), ("table", 0.5, 2),
)  # fmt: skip


class Change(NamedTuple):
    """The value of a gauge after the warm-up and at the end, and the maximum at the end."""

    name: str
    first: float
    last: float
    limit: float

    @property
    def has_grown(self) -> bool:
        return self.last > self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.first:.6g} -> {self.last:.6g}"


def compare_samples(samples: Sequence[tuple[float, Gauges]], warm_up: float) -> list[Change]:
    """Compare the first tenth of the time after the warm-up with the last: their maximum values.

    If a gauge is missing in the first tenth, its first value is 0, but the memory of a process
    that started later is its first sample. A gauge that is missing at the end has not grown.
    """
    end = samples[-1][0]
    window = (end - warm_up) / 10
    first = _maximum(samples, warm_up, warm_up + window)
    last = _maximum(samples, end - window, end)
    changes = []
    for name in sorted(last):
        bounds = [(share, more) for begins, share, more in BOUNDS if name.startswith(begins)]
        if bounds:
            initial = next(seen[name] for at, seen in samples if name in seen and at >= warm_up)
            before = first.get(name, initial if name.startswith("memory") else 0)
            share, more = bounds[0]
            changes.append(Change(name, before, last[name], before * (1 + share) + more))
    return changes


def _maximum(samples: Sequence[tuple[float, Gauges]], since: float, until: float) -> Gauges:
    maximum: Gauges = {}
    for at, gauges in samples:
        if since <= at <= until:
            maximum |= {name: max(value, maximum.get(name, 0)) for name, value in gauges.items()}
    return maximum
