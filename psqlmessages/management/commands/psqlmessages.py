"""manage.py psqlmessages …: the same commands as the console script, on a database of Django's."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections
from psycopg import pq
from psycopg.conninfo import make_conninfo

from psqlmessages.cli import DONE, add_commands, execute
from psqlmessages.commands import COMMANDS


class Command(BaseCommand):
    """Hands over to the commands that need no Django, with the address of a configured database."""

    help = "Send, receive and watch messages."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the commands, and which database they are for."""
        parser.add_argument(
            "--database",
            default=DEFAULT_DB_ALIAS,
            choices=tuple(connections),
            help='alias of the database in DATABASES (default: "default")',
        )
        add_commands(parser, COMMANDS)

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the chosen command; where it does not succeed, leave with its exit code."""
        arguments = Namespace(**options, dsn=dsn_of(options["database"]))
        if (code := execute(arguments)) != DONE:
            sys.exit(code)


def dsn_of(alias: str) -> str:
    """Write the connection string of a configured database, as Django itself would connect."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise CommandError(f"database {alias!r} is {connection.display_name}, not PostgreSQL")
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    parameters = connection.get_connection_params()
    return make_conninfo(**{name: value for name, value in parameters.items() if name in known})
