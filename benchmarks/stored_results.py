"""Findings of all benchmarks, stored in results.json with their time, commit and rounds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.results import Findings

PATH = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class StoredFindings:
    """The stored findings of one program."""

    program: str
    findings: Findings
    measured_at: str
    commit: str
    rounds: int


def store(program: str, findings: Findings, rounds: int) -> None:
    """Replace the stored findings of a program."""
    stored = _read()
    stored["machine"] = machine.machine()
    stored["versions"] = machine.versions()
    stored["programs"][program] = {
        "measured_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "commit": machine.commit(),
        "rounds": rounds,
        **asdict(findings),
    }
    PATH.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


def load(programs: list[str]) -> tuple[str, dict[str, str], list[StoredFindings]]:
    """Return machine, versions and findings, in the order of ``programs``."""
    stored = _read()
    findings = [
        _to_findings(name, stored["programs"][name])
        for name in programs
        if name in stored["programs"]
    ]
    versions = dict(stored["versions"])
    for each in findings:
        versions |= each.findings.versions
    return stored["machine"], versions, findings


def _to_findings(program: str, stored: dict[str, Any]) -> StoredFindings:
    findings = Findings.of(stored)
    return StoredFindings(
        program, findings, stored["measured_at"], stored["commit"], stored["rounds"]
    )


def _read() -> dict[str, Any]:
    if PATH.exists():
        return dict(json.loads(PATH.read_text("utf-8")))
    return {"machine": "", "versions": {}, "programs": {}}
