"""manage.py psqlmessages: the commands of the console script, and commands that need Django."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections

from psqlmessages.checks import COMMAND_TAG
from psqlmessages.cli import COMMANDS
from psqlmessages.cli.main import DONE, add_commands, execute
from psqlmessages.cli.output import fail
from psqlmessages.client.calls import translate_error
from psqlmessages.management import access, database, exchange, pipeline, run
from psqlmessages.orm import direct_dsn, resolve_alias
from psqlmessages.retry import error_line


class Command(BaseCommand):
    """Runs a command of psqlmessages on a database of DATABASES."""

    help = "Send, receive and watch messages."
    # The checks of other apps would import the project's URLs and views, which takes a second.
    requires_system_checks = (COMMAND_TAG,)

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the option --database and the commands."""
        parser.add_argument(
            "--database",
            choices=tuple(connections),
            help='alias of the database in DATABASES (default: PSQLMESSAGES["DATABASE"])',
        )
        # These replace commands of the console script, and also use Django.
        replacements = (database.PRUNE, database.DOCTOR)
        names = {command.name for command in replacements}
        unchanged = (command for command in COMMANDS if command.name not in names)
        additional = (
            database.INSTALL,
            run.COMMAND,
            access.ALLOW,
            access.DENY,
            access.DEFINITIONS,
            exchange.COMMAND,
            pipeline.COMMAND,
            access.TOKEN,
        )
        add_commands(parser, (*unchanged, *replacements, *additional))

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the chosen command; exit with its code unless this is 0."""
        try:
            options["database"] = resolve_alias(options["database"])
            arguments = Namespace(**options, dsn=direct_dsn(options["database"]))
            code = execute(arguments)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        except Error as error:
            code = fail(_error_text(error))
        if code != DONE:
            sys.exit(code)


def _error_text(error: Error) -> str:
    """Return the text of a database error of Django.

    If the client translates the error, this is the client's text; otherwise PostgreSQL's message
    and hint, if there are any.
    """
    cause = error.__cause__
    if not isinstance(cause, psycopg.Error):
        return error_line(error)
    translated = translate_error(cause, is_broken=False)
    if translated is not cause or cause.diag.message_primary is None:
        return error_line(translated)
    return f"{cause.diag.message_primary}. {cause.diag.message_hint or ''}".rstrip()
