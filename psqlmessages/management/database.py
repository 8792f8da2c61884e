"""Commands install and prune: reinstall the SQL functions, and remove expired data."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

from django.db import connections, transaction

from psqlmessages import schema, traffic_windows
from psqlmessages.cli import prune
from psqlmessages.cli.output import CliCommand, fail


def _install(arguments: Namespace) -> int:
    """Install the functions; fail if a migration that they may need is not applied."""
    alias = arguments.database
    if schema.has_unapplied_migrations(connections[alias]):
        return fail(
            f"not all migrations are applied to database {alias!r}. First run:"
            f" python manage.py migrate psqlmessages --database {alias}"
        )
    with transaction.atomic(using=alias):
        schema.install(connections[alias])
        schema.write_settings(using=alias)
    print(f"installed the functions of this version ({schema.digest()}) in database {alias!r}")
    return 0


def _prune(arguments: Namespace) -> int:
    """Run `prune`, and also remove old traffic windows; print the numbers."""
    counts = prune.prune(arguments.dsn)
    removed_windows = traffic_windows.prune(arguments.database)
    if arguments.json:
        print(json.dumps({**counts, "removed_windows": removed_windows}))
    else:
        print(f"{prune.format_counts(counts)}; removed traffic windows: {removed_windows:,}")
    return 0


INSTALL = CliCommand(
    "install",
    "reinstall the SQL functions, as the owner of the tables. Use this if functions are missing or"
    " of another version although `migrate` has nothing to apply",
    lambda parser: None,
    _install,
)
PRUNE = replace(
    prune.COMMAND, help=f"{prune.COMMAND.help}; also remove old traffic windows", run=_prune
)
