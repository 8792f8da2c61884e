"""What was found, kept in results.json: each program's findings, when, of which commit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.results import Curve, Findings, Row

PATH = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Kept:
    """The findings of one program."""

    program: str
    findings: Findings
    measured_at: str
    commit: str
    rounds: int


def keep(program: str, findings: Findings, rounds: int) -> None:
    """Put a program's findings in place of its earlier ones."""
    found = _read()
    found["machine"] = machine.machine()
    found["versions"] = machine.versions()
    found["programs"][program] = {
        "measured_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "commit": machine.commit(),
        "rounds": rounds,
        **asdict(findings),
    }
    PATH.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def load(programs: list[str]) -> tuple[str, dict[str, str], list[Kept]]:
    """Read machine, versions and findings, in the order of ``programs``."""
    found = _read()
    kept = [_kept(name, found["programs"][name]) for name in programs if name in found["programs"]]
    versions = dict(found["versions"])
    for each in kept:
        versions |= each.findings.versions
    return found["machine"], versions, kept


def _kept(program: str, found: dict[str, Any]) -> Kept:
    findings = Findings(
        [Row(**row) for row in found["rows"]],
        [Curve(**curve) for curve in found["curves"]],
        found["left_out"],
        found["versions"],
    )
    return Kept(program, findings, found["measured_at"], found["commit"], found["rounds"])


def _read() -> dict[str, Any]:
    if PATH.exists():
        return dict(json.loads(PATH.read_text("utf-8")))
    return {"machine": "", "versions": {}, "programs": {}}
