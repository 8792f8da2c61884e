"""manage.py psqlmessages: the commands of the console script, and commands that need Django."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from psqlmessages.cli import COMMANDS
from psqlmessages.cli.main import DONE, add_commands, execute
from psqlmessages.management import (
    doctor_rules,
    exchange,
    install,
    permissions,
    pipeline,
    prune_all,
    rules,
    run,
    token,
)
from psqlmessages.orm import alias_of, direct_dsn


class Command(BaseCommand):
    """Runs the commands with the address of a configured database."""

    help = "Send, receive and watch messages."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the option --database and the commands."""
        parser.add_argument(
            "--database",
            choices=tuple(connections),
            help='alias of the database in DATABASES (default: PSQLMESSAGES["DATABASE"])',
        )
        # These two do more than the plain ones of the same names.
        replaced = (prune_all, doctor_rules)
        names = [command.NAME for command in replaced]
        plain = (command for command in COMMANDS if command.NAME not in names)
        own = (
            *replaced, install, run, permissions.ALLOW, permissions.DENY, rules, exchange, pipeline,
            token,
        )  # fmt: skip
        add_commands(parser, (*plain, *own))

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the chosen command; exit with its code if it fails."""
        try:
            options["database"] = alias_of(options["database"])
            arguments = Namespace(**options, dsn=direct_dsn(options["database"]))
            code = execute(arguments)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if code != DONE:
            sys.exit(code)
