"""Command install: reinstall the SQL functions of this version; data and grants stay."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from django.db import connections, transaction

from psqlmessages import schema
from psqlmessages.cli.output import fail

NAME = "install"
HELP = (
    "reinstall the SQL functions of this version, as the owner of the tables: if they are"
    " missing or of another version although `migrate` has nothing to apply"
)


def configure(parser: ArgumentParser) -> None:
    """Add no arguments."""


def run(arguments: Namespace) -> int:
    """Install the functions; fail if a migration that they may need is not applied."""
    alias = arguments.database
    if schema.unapplied(connections[alias]):
        return fail(
            f"not all migrations are applied to database {alias!r}. First run:"
            f" python manage.py migrate psqlmessages --database {alias}"
        )
    with transaction.atomic(using=alias):
        schema.install(connections[alias])
        schema.write_settings(using=alias)
    print(f"installed the functions of this version ({schema.digest()}) in database {alias!r}")
    return 0
