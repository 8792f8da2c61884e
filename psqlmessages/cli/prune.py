"""Command prune: remove expired data now."""

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
    """Empty tables in which everything has expired, and print their number."""
    number = empty_expired_tables(arguments.dsn)
    print(json.dumps({"emptied_tables": number}) if arguments.json else describe(number))
    return 0


def empty_expired_tables(dsn: str) -> int:
    """Empty tables in which everything has expired; return their number."""
    with connect_as(dsn, "prune") as connection:
        # The role's default may be a stricter level: its older snapshot would prevent pruning.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        try:
            with connection.transaction():
                row = connection.execute(
                    "SELECT messages._truncate_expired_bodies() + messages._prune_streams()"
                ).fetchone()
        except psycopg.errors.InsufficientPrivilege as error:
            raise MessagesError(
                f"role {connection.info.user} may not prune: connect as the owner of the tables"
            ) from error
    return int(row[0]) if row else 0


def describe(number: int) -> str:
    """Return the sentence for this number of emptied tables."""
    return f"emptied {number} table{'' if number == 1 else 's'} of expired data"


COMMAND = CliCommand(
    "prune",
    "remove expired bodies and stream messages now, as the owner of the tables",
    _configure,
    run,
)
