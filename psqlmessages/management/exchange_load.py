"""exchange load: show what a file would change, do it, and say what is missing for it to work."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import psycopg
from django.db import DatabaseError

from psqlmessages.commands.output import one_line
from psqlmessages.graph import changes, definitions, stored
from psqlmessages.graph.cycles import graph
from psqlmessages.graph.entries import DefinedExchange, MalformedExchanges
from psqlmessages.graph.rights import lacking_together


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("file", metavar="FILE", help='the file; "-" is the standard input')
    parser.add_argument("--dry-run", action="store_true", help="only print what would change")
    parser.add_argument(
        "--replace-all", action="store_true", help="remove the exchanges the file does not name"
    )
    parser.add_argument(
        "--with-rules",
        action="store_true",
        help="also add the rules that the exchanges need in this database",
    )


def run(arguments: Namespace) -> int:
    """Do it; fail with a line for each thing wrong, having changed nothing."""
    try:
        wanted = definitions.read(_read(arguments.file))
    except MalformedExchanges as error:
        for fault in error.faults:
            _complain(str(fault))
        return 1
    now = stored.present(arguments.database)
    todo = changes.difference(now, wanted, replace_all=arguments.replace_all)
    for line in todo.lines():
        print(one_line(line))
    if not arguments.dry_run and not _applied(todo, changes.fingerprint(now), arguments):
        return 1
    _tell(f"{'would be ' if arguments.dry_run else ''}{todo.summary()}")
    kept = [exchange for exchange in now if exchange.name not in {each.name for each in wanted}]
    _remark(wanted, [*wanted, *(() if arguments.replace_all else kept)], arguments.database)
    return 0


def _applied(todo: changes.Difference, shown: str, arguments: Namespace) -> bool:
    try:
        added = changes.apply(todo, shown, arguments.database, with_rules=arguments.with_rules)
    except changes.ExchangesChanged:
        _complain("somebody changed exchanges meanwhile: try again")
        return False
    except DatabaseError as error:
        _complain(_reason(error))
        return False
    for rule in added:
        print(one_line(f"+ rule, in {rule.namespace}: {rule.statement}"))
    return True


def _reason(error: DatabaseError) -> str:
    """Say what PostgreSQL said, and its hint, without where it was in its functions."""
    cause = error.__cause__
    if not isinstance(cause, psycopg.Error) or cause.diag.message_primary is None:
        return str(error).strip()
    return f"{cause.diag.message_primary}. {cause.diag.message_hint or ''}".rstrip()


def _remark(
    wanted: tuple[DefinedExchange, ...], together: list[DefinedExchange], using: str
) -> None:
    """Say which rules are missing, and what goes round."""
    found = lacking_together(wanted, using)
    for rule in found.rules:
        _tell(f"missing rule, in {rule.namespace}: {rule.statement}")
    for namespace, why in found.unasked.items():
        _tell(f"which rules are missing in {namespace} is not known: {why}")
    for cycle in graph(together).cycles:
        _tell(f"a cycle: {', '.join(map(str, cycle))}")


def _read(name: str) -> bytes:
    return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


def _tell(text: str) -> None:
    print(one_line(text), file=sys.stderr)


def _complain(text: str) -> None:
    _tell(f"psqlmessages: {text}")
