"""Command definitions: export and import of rules and web identities."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from psqlmessages.cli.output import CliCommand, fail, one_line, read_input
from psqlmessages.rules import changes, document


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", choices=("export", "import"), help="export or import"
    )
    parser.add_argument("file", metavar="FILE", help='the file; "-" is standard input or output')
    parser.add_argument("--dry-run", action="store_true", help="import: only print the changes")
    parser.add_argument(
        "--replace", action="store_true", help="import: remove entries that are not in the file"
    )


def run(arguments: Namespace) -> int:
    """Export or import. If the file has errors, print each on a line, change nothing, and fail."""
    if arguments.action == "export":
        text = document.write(changes.read_current(arguments.database))
        if arguments.file == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.file).write_text(text, encoding="utf-8")
        return 0
    try:
        wanted = document.read(read_input(arguments.file))
        changes.check_users_and_groups(wanted, arguments.database)
    except document.MalformedDefinitions as error:
        return fail(*error.errors)
    current = changes.read_current(arguments.database)
    difference = changes.difference(current, wanted, is_replacing=arguments.replace)
    for line in difference.lines():
        print(one_line(line))
    if not arguments.dry_run:
        try:
            changes.apply(difference, changes.fingerprint(current), arguments.database)
        except changes.DefinitionsChanged:
            return fail("the rules or web identities have changed during the import: run it again")
    print(f"{'dry run: ' if arguments.dry_run else ''}{difference.summary()}", file=sys.stderr)
    return 0


COMMAND = CliCommand(
    "definitions", "export rules and web identities to JSON, or import them", _configure, run
)
