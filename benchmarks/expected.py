"""The ratios that `make bench-quick` expects, in expected.json: a slow-down is a defect."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.results import Row

PATH = Path(__file__).with_name("expected.json")
# Ratios of short rounds on a shared machine move by so much when nothing changed.
LEAVE = 1.5


def load() -> dict[str, float]:
    """Read them."""
    return dict(json.loads(PATH.read_text("utf-8"))) if PATH.exists() else {}


def save(rows: list[Row]) -> None:
    """Expect from now on what was measured."""
    found = {row.key: round(row.ratio, 2) for row in sorted(rows, key=lambda row: row.key)}
    PATH.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def fallen(rows: list[Row], expected: dict[str, float]) -> list[str]:
    """Say which rows are worse than expected by more than noise, and which are not there."""
    said = []
    for row in rows:
        if row.key not in expected:
            said.append(f"{row.key}: {row.ratio:.2f}, and nothing is expected of it: --keep")
        elif _is_worse(row, expected[row.key]):
            said.append(f"{row.key}: {row.ratio:.2f}, and {expected[row.key]:.2f} is expected")
    return said


def _is_worse(row: Row, expected: float) -> bool:
    if row.is_at_most:
        return row.ratio > expected * LEAVE
    return row.ratio < expected / LEAVE
