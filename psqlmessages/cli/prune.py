"""Command prune: remove expired data, dead nodes and unused queues now."""

from __future__ import annotations

import json
from argparse import Namespace

import psycopg

from psqlmessages.cli.direct_calls import connect_as
from psqlmessages.cli.output import CliCommand, add_json

_COUNT_DEAD_SESSIONS = """
    SELECT count(*)::int FROM psqlmessages_session
    WHERE id NOT IN (SELECT messages._live_sessions())
"""


def run(arguments: Namespace) -> int:
    """Prune, and print how much was removed."""
    counts = prune(arguments.dsn)
    print(json.dumps(counts) if arguments.json else format_counts(counts))
    return 0


def prune(dsn: str) -> dict[str, int]:
    """Run housekeeping, and empty the tables whose rows are all expired or unneeded.

    Also removes queues on which nodes only waited. Returns the numbers of emptied tables, ended
    sessions and removed queues.
    """
    with connect_as(dsn, "prune", owner_task="prune") as connection:
        # Pruning fails at a stricter isolation level, which may be the default of the role.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        dead_before = connection.execute(_COUNT_DEAD_SESSIONS).fetchall()[0][0]
        with connection.transaction():
            # Housekeeping ends the dead sessions at the commit.
            emptied, queues, _ = connection.execute(
                "SELECT messages._truncate_expired_bodies() + messages._prune_streams(),"
                " messages._remove_unused_queues('-infinity'), messages._request_housekeeping()"
            ).fetchall()[0]
        dead_after = connection.execute(_COUNT_DEAD_SESSIONS).fetchall()[0][0]
    return {
        "emptied_tables": emptied,
        "ended_sessions": max(dead_before - dead_after, 0),
        "removed_queues": queues,
    }


def format_counts(counts: dict[str, int]) -> str:
    """Format the result of `prune` for people."""
    return (
        f"emptied tables of expired data: {counts['emptied_tables']}; ended dead sessions:"
        f" {counts['ended_sessions']}; removed unused queues: {counts['removed_queues']}"
    )


COMMAND = CliCommand(
    "prune",
    "as the owner of the tables: remove expired bodies, unneeded stream messages, dead nodes and"
    " unused queues now",
    add_json,
    run,
)
