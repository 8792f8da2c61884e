"""Command prune: remove expired data now, and nodes whose connection is closed."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

import psycopg

from psqlmessages.cli.direct_calls import connect_as
from psqlmessages.cli.output import CliCommand, add_json
from psqlmessages.exceptions import MessagesError

_COUNT_DEAD_SESSIONS = """
    SELECT count(*)::int FROM psqlmessages_session
    WHERE id NOT IN (SELECT messages._live_sessions())
"""


def _configure(parser: ArgumentParser) -> None:
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Remove expired data and print how much was removed."""
    done = prune(arguments.dsn)
    print(json.dumps(done) if arguments.json else format_result(done))
    return 0


def prune(dsn: str) -> dict[str, int]:
    """Run housekeeping and empty the tables in which everything has expired.

    Also removes queues that a wait has made and that were never used. Returns the numbers of
    emptied tables, ended sessions and removed queues.
    """
    with connect_as(dsn, "prune") as connection:
        # The role may default to a stricter level, whose older snapshot would prevent pruning.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        try:
            dead = connection.execute(_COUNT_DEAD_SESSIONS).fetchall()[0][0]
            with connection.transaction():
                # Housekeeping ends the dead sessions at the commit.
                emptied, queues, _ = connection.execute(
                    "SELECT messages._truncate_expired_bodies() + messages._prune_streams(),"
                    " messages._remove_unused_queues('-infinity'),"
                    " messages._request_housekeeping()"
                ).fetchall()[0]
            left = connection.execute(_COUNT_DEAD_SESSIONS).fetchall()[0][0]
        except psycopg.errors.InsufficientPrivilege as error:
            raise MessagesError(
                f"role {connection.info.user} may not prune: connect as the owner of the tables"
            ) from error
    return {
        "emptied_tables": emptied,
        "ended_sessions": max(dead - left, 0),
        "removed_queues": queues,
    }


def format_result(done: dict[str, int]) -> str:
    """Format the result of `prune` as a sentence."""
    tables, sessions = done["emptied_tables"], done["ended_sessions"]
    queues = done["removed_queues"]
    return (
        f"emptied {tables} table{'' if tables == 1 else 's'} of expired data;"
        f" ended {sessions} dead session{'' if sessions == 1 else 's'};"
        f" removed {queues} unused queue{'' if queues == 1 else 's'}"
    )


COMMAND = CliCommand(
    "prune",
    "remove expired bodies, stream messages, dead nodes and unused queues now, as the owner of the"
    " tables",
    _configure,
    run,
)
