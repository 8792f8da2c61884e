"""Command doctor: report problems with cause and fix."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from psqlmessages.cli import doctor_checks, doctor_tables
from psqlmessages.cli.doctor_checks import Check, CheckContext, Finding, FindingState, examine
from psqlmessages.cli.output import one_line
from psqlmessages.client.connect import connect

NAME = "doctor"
HELP = "report problems with their cause and fix"

CHECKS: tuple[Check, ...] = (
    doctor_checks.server,
    doctor_checks.installed,
    doctor_checks.pooler,
    doctor_checks.listening,
    doctor_checks.queue,
    doctor_checks.commit_lock,
    doctor_checks.open_transactions,
    doctor_checks.clock,
    doctor_tables.expired_bodies,
    doctor_tables.stream_tables,
    doctor_tables.owners,
    doctor_tables.rules,
    doctor_tables.create_rights,
)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(arguments: Namespace, *more: Check) -> int:
    """Run the checks and report; fail if something is wrong. Unknown results are not failures."""
    findings = []
    for finding in examinations(arguments.dsn, *more):
        findings.append(finding)
        if not arguments.json:
            print(_describe(finding), flush=True)
    wrong = sum(finding.state is FindingState.WRONG for finding in findings)
    if arguments.json:
        print(json.dumps({"wrong": wrong, "findings": [_as_json(f) for f in findings]}))
    else:
        print(f"\n{wrong} wrong" if wrong else "\nnothing wrong", file=sys.stderr)
    return 1 if wrong else 0


def examinations(dsn: str, *more: Check) -> Iterator[Finding]:
    """Run the checks of a database; raise if the server cannot be reached."""
    with connect(dsn) as connection:
        for check in (*CHECKS, *more):
            yield from examine(check, CheckContext(dsn, connection))


def _describe(finding: Finding) -> str:
    lines = [f"{finding.state.value:7}  {finding.check:14}  {one_line(finding.found)}"]
    if finding.state is not FindingState.OK:
        advice = (("why", finding.why), ("fix", finding.mend))
        lines += [f"{'':9}{word}: {one_line(text)}" for word, text in advice if text]
    return "\n".join(lines)


def _as_json(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "state": finding.state.value,
        "found": finding.found,
        "why": finding.why,
        "mend": finding.mend,
    }
