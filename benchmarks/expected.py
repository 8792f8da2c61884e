"""The ratios that `make bench-quick` and `make bench` expect, stored in expected.json."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.results import Row

PATH = Path(__file__).with_name("expected.json")
# On a shared machine, ratios of short rounds vary by up to this factor.
TOLERANCE = 1.5


def load() -> dict[str, float]:
    """Read the expected ratios by key."""
    return dict(json.loads(PATH.read_text("utf-8"))) if PATH.exists() else {}


def save(rows: list[Row]) -> None:
    """Write the ratios of these rows as the expected ones; keep those of other rows."""
    ratios = load() | {row.key: round(row.ratio, 2) for row in rows}
    PATH.write_text(json.dumps(ratios, indent=1, sort_keys=True) + "\n", "utf-8")


def find_regressions(rows: list[Row], expected: dict[str, float]) -> list[str]:
    """Describe the rows that are worse than expected by more than TOLERANCE, or have no entry."""
    errors = []
    for row in rows:
        if row.key not in expected:
            errors.append(f"{row.key}: {row.ratio:.2f}, not in expected.json: use --save")
        elif _is_worse(row, expected[row.key]):
            errors.append(f"{row.key}: {row.ratio:.2f}, expected {expected[row.key]:.2f}")
    return errors


def _is_worse(row: Row, expected: float) -> bool:
    if row.is_lower_better:
        return row.ratio > expected * TOLERANCE
    return row.ratio < expected / TOLERANCE
