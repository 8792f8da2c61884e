"""Gauges: what the soak watches, each a number under a name: processes, and the database."""

import re
from collections import Counter, defaultdict
from pathlib import Path

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
    gauges["locks"], gauges["advisory locks"] = connection.execute(LOCKS).fetchone() or (0, 0)
    gauges["notification queue"] = (connection.execute(QUEUE_USAGE).fetchone() or (0,))[0]
    for name, size, live, dead in connection.execute(SIZES).fetchall():
        gauges[f"table {name}"] = float(size) / MEGABYTE
        gauges[f"rows of {name}"] = float(live or 0)
        gauges[f"dead rows of {name}"] = float(dead or 0)
    return gauges


def of_counts(counts: dict[str, Counter[str]]) -> Gauges:
    """Read what the actors counted of themselves."""
    return {
        f"LISTENs of {name}": float(told["LISTENs"])
        for name, told in counts.items()
        if "LISTENs" in told
    }


def _status(pid: int, field: str) -> int:
    for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)
