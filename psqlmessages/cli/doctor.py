"""Command doctor: report problems with cause and fix."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from psqlmessages.cli import doctor_checks, doctor_tables
from psqlmessages.cli.doctor_checks import Check, CheckContext, Finding, FindingState, run_check
from psqlmessages.cli.output import CliCommand, add_json, one_line
from psqlmessages.client.connect import connect

CHECKS: tuple[Check, ...] = (
    doctor_checks.server,
    doctor_checks.installed,
    doctor_checks.pooler,
    doctor_checks.listening,
    doctor_checks.notification_queue,
    doctor_checks.commit_lock,
    doctor_checks.open_transactions,
    doctor_checks.clock,
    doctor_tables.dead_nodes,
    doctor_tables.expired_bodies,
    doctor_tables.stream_tables,
    doctor_tables.owners,
    doctor_tables.rules,
    doctor_tables.create_rights,
)


def run(
    arguments: Namespace,
    *further_checks: Check,
    complete_fix: Callable[[str], str] = str,
    **names: str,
) -> int:
    """Run the checks and print the findings; fail if one of them is a problem.

    ``complete_fix`` adds the options that select the checked database to the text of a fix.
    ``names`` are the fields ``node`` and ``topic`` of CheckContext, if they are known.
    """
    findings = []
    for finding in run_checks(arguments.dsn, *further_checks, **names):
        completed = replace(finding, fix=complete_fix(finding.fix))
        findings.append(completed)
        if not arguments.json:
            print(_describe(completed), flush=True)
    problems = sum(finding.state is FindingState.WRONG for finding in findings)
    if arguments.json:
        print(json.dumps({"wrong": problems, "findings": [asdict(each) for each in findings]}))
    else:
        unknown = sum(finding.state is FindingState.UNKNOWN for finding in findings)
        summary = f"{problems} wrong" if problems else "nothing wrong"
        print(f"\n{summary}" + (f", {unknown} unknown" if unknown else ""), file=sys.stderr)
    return 1 if problems else 0


def run_checks(dsn: str, *further_checks: Check, **names: str) -> Iterator[Finding]:
    """Yield the findings for a database; raise psycopg.Error if the server is unreachable."""
    with connect(dsn) as connection:
        for check in (*CHECKS, *further_checks):
            yield from run_check(check, CheckContext(dsn, connection, **names))


def _describe(finding: Finding) -> str:
    lines = [f"{finding.state.value:7}  {finding.check:14}  {one_line(finding.found)}"]
    for label, text in (("why", finding.why), ("fix", finding.fix)):
        if text:
            lines.append(f"{'':9}{label}: {one_line(text)}")
    return "\n".join(lines)


COMMAND = CliCommand("doctor", "report problems with their cause and fix", add_json, run)
