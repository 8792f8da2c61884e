"""Results: what a benchmark found, as rows with ratios and as curves, printed or as JSON.

A benchmark is a module with a function measure(options) that returns Findings, and ends with
run(measure, __doc__): then `python -m benchmarks.NAME` prints them, and `--json FILE` keeps them
for `python -m benchmarks`, which runs all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

ROUNDS = 5


@dataclass(frozen=True)
class Options:
    """How much to measure. ``is_quick``: a few seconds for each program, fewer rows."""

    rounds: int = ROUNDS
    is_quick: bool = False


@dataclass(frozen=True)
class Row:
    """Ours beside a peer's: a rate (to reach at least) or a time (to reach at most).

    ``key`` names it for ever, as `sends: 1 KB to pg_notify`. ``ratios``: ours / theirs of each
    round. ``unit``: messages/s, ms. ``note``: what is not equal, in a few words.
    """

    key: str
    what: str
    against: str
    unit: str
    ours: float
    theirs: float
    ratios: list[float]
    reach: float | None = None
    is_at_most: bool = False
    note: str = ""

    @classmethod
    def of(
        cls, key: str, what: str, against: str, unit: str,
        ours: Sequence[float], theirs: Sequence[float], **more: Any,
    ) -> Self:  # fmt: skip
        """Make a row of the figures of each round, ours and theirs side by side."""
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        return cls(key, what, against, unit, median(ours), median(theirs), ratios, **more)

    def with_rounds_of(self, other: Row) -> Row:
        """Add the rounds of another run of the same."""
        return replace(self, ratios=[*self.ratios, *other.ratios])

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return median(self.ratios)

    @property
    def is_reached(self) -> bool:
        """Tell whether the ratio is where it is wanted; to two digits, as it is printed."""
        if self.reach is None:
            return True
        ratio = round(self.ratio, 2)
        return ratio <= self.reach if self.is_at_most else ratio >= self.reach


@dataclass(frozen=True)
class Curve:
    """How a figure goes with a size: points are (size, figure). One line for each name."""

    key: str
    title: str
    size: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    note: str = ""


@dataclass
class Findings:
    """All that a benchmark found. ``left_out``: a sentence for each peer that is not here."""

    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, other: Findings) -> None:
        """Take over another's."""
        self.rows += other.rows
        self.curves += other.curves
        self.left_out += other.left_out
        self.versions.update(other.versions)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), "utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what was saved."""
        found = json.loads(path.read_text("utf-8"))
        return cls(
            [Row(**row) for row in found["rows"]],
            [Curve(**curve) for curve in found["curves"]],
            found["left_out"],
            found["versions"],
        )


def shown(row: Row) -> str:
    """Say a row in a line."""
    sign = "≤" if row.is_at_most else "≥"
    goal = (
        ""
        if row.reach is None
        else f"  ({sign} {row.reach:g}{'' if row.is_reached else ' MISSED'})"
    )
    spread = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
    return (
        f"{row.what} | {row.against} | {row.ours:,.4g} to {row.theirs:,.4g} {row.unit}"
        f" | {row.ratio:.2f} [{spread}]{goal}"
    )


def report(findings: Findings) -> None:
    """Print it all."""
    for sentence in findings.left_out:
        print(f"left out: {sentence}")
    for row in findings.rows:
        print(shown(row))
    for curve in findings.curves:
        print(f"{curve.title} ({curve.unit} by {curve.size})")
        for name, points in curve.lines.items():
            print(f"  {name}: " + ", ".join(f"{size:,g}: {figure:,.4g}" for size, figure in points))


def run(measure: Callable[[Options], Findings], doc: str | None) -> None:
    """Be the main program of a benchmark."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternating, each (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a few seconds, fewer rows")
    parser.add_argument("--json", type=Path, help="also write it to this file")
    arguments = parser.parse_args()
    findings = measure(Options(arguments.rounds, arguments.quick))
    report(findings)
    if arguments.json:
        findings.save(arguments.json)
