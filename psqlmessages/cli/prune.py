"""Command prune: remove expired data now, and nodes whose connection is closed."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

import psycopg

from psqlmessages.cli.direct_calls import connect_as
from psqlmessages.cli.output import CliCommand, add_json
from psqlmessages.exceptions import MessagesError


def _configure(parser: ArgumentParser) -> None:
    add_json(parser)


def run(arguments: Namespace) -> int:
    """Empty the tables in which everything has expired; print how many."""
    number = empty_expired_tables(arguments.dsn)
    print(json.dumps({"emptied_tables": number}) if arguments.json else format_result(number))
    return 0


def empty_expired_tables(dsn: str) -> int:
    """Run housekeeping and empty the tables in which everything has expired; return how many."""
    with connect_as(dsn, "prune") as connection:
        # The role may default to a stricter level, whose older snapshot would prevent pruning.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        try:
            with connection.transaction():
                row = connection.execute(
                    "SELECT messages._truncate_expired_bodies() + messages._prune_streams(),"
                    " messages._request_housekeeping()"
                ).fetchone()
        except psycopg.errors.InsufficientPrivilege as error:
            raise MessagesError(
                f"role {connection.info.user} may not prune: connect as the owner of the tables"
            ) from error
    return int(row[0]) if row else 0


def format_result(number: int) -> str:
    """Format the number of emptied tables for people."""
    return f"emptied {number} table{'' if number == 1 else 's'} of expired data"


COMMAND = CliCommand(
    "prune",
    "remove expired bodies, stream messages and dead nodes now, as the owner of the tables",
    _configure,
    run,
)
