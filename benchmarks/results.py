"""Findings of a benchmark, as rows with ratios and as curves: printed, or saved as JSON.

A benchmark is a module with a function measure(options) that returns Findings, and ends with
run(measure, __doc__). `python -m benchmarks.NAME` prints the findings; `--json FILE` saves them for
`python -m benchmarks`, which runs all benchmarks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

ROUNDS = 5


@dataclass(frozen=True)
class Options:
    """How much to measure. A quick run takes a few seconds for each program, and has fewer rows."""

    rounds: int = ROUNDS
    is_quick: bool = False


@dataclass(frozen=True)
class Row:
    """A comparison of psqlmessages with a peer: a rate, or a time or size if ``is_lower_better``.

    ``key`` identifies the row and never changes, as in `sends: 1 KB to pg_notify`. ``ratios`` are
    ours / theirs of each round. ``goal`` is the ratio to reach. ``note`` says how the sides differ.
    """

    key: str
    subject: str
    peer: str
    unit: str
    ours: float
    theirs: float
    ratios: list[float]
    goal: float | None = None
    is_lower_better: bool = False
    note: str = ""

    @classmethod
    def of(
        cls, key: str, subject: str, peer: str, unit: str,
        ours: Sequence[float], theirs: Sequence[float], **more: Any,
    ) -> Self:  # fmt: skip
        """Create a row from the figures of each round."""
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        return cls(key, subject, peer, unit, median(ours), median(theirs), ratios, **more)

    def with_rounds_of(self, other: Row) -> Row:
        """Return a copy of this row with the ratios of both runs."""
        return replace(self, ratios=[*self.ratios, *other.ratios])

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)

    @property
    def meets_goal(self) -> bool:
        """Whether the ratio reaches the goal, rounded to two digits as it is printed."""
        if self.goal is None:
            return True
        ratio = round(self.ratio, 2)
        return ratio <= self.goal if self.is_lower_better else ratio >= self.goal


@dataclass(frozen=True)
class Curve:
    """How a figure depends on a size. Each line has a name, and points (size, figure)."""

    key: str
    title: str
    size: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    note: str = ""


@dataclass
class Findings:
    """The results of a benchmark. ``left_out`` has a reason for each peer that is missing."""

    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Create findings from their JSON."""
        rows = [Row(**row) for row in saved["rows"]]
        curves = [Curve(**curve) for curve in saved["curves"]]
        return cls(rows, curves, saved["left_out"], saved["versions"])

    def add(self, other: Findings) -> None:
        """Add other findings to these."""
        self.rows += other.rows
        self.curves += other.curves
        self.left_out += other.left_out
        self.versions.update(other.versions)

    def save(self, path: Path) -> None:
        """Write the findings as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), "utf-8")


def format_row(row: Row) -> str:
    """Return a row as a line of text."""
    goal = ""
    if row.goal is not None:
        sign = "≤" if row.is_lower_better else "≥"
        goal = f"  ({sign} {row.goal:g}{'' if row.meets_goal else ' MISSED'})"
    return (
        f"{row.subject} | {row.peer} | {row.ours:,.4g} to {row.theirs:,.4g} {row.unit}"
        f" | {row.ratio:.2f} [{min(row.ratios):.2f} to {max(row.ratios):.2f}]{goal}"
    )


def print_findings(findings: Findings) -> None:
    """Print all rows and curves."""
    for reason in findings.left_out:
        print(f"left out: {reason}")
    for row in findings.rows:
        print(format_row(row))
    for curve in findings.curves:
        print(f"{curve.title} ({curve.unit} by {curve.size})")
        for name, points in curve.lines.items():
            print(f"  {name}: " + ", ".join(f"{size:,g}: {figure:,.4g}" for size, figure in points))


def run(measure: Callable[[Options], Findings], doc: str | None) -> None:
    """Run a benchmark as the main program."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a few seconds, fewer rows")
    parser.add_argument("--json", type=Path, help="also write the findings to this file")
    arguments = parser.parse_args()
    findings = measure(Options(arguments.rounds, arguments.quick))
    print_findings(findings)
    if arguments.json:
        findings.save(arguments.json)
