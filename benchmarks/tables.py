"""The results as Markdown: benchmarks/results.md, and docs/explanation/performance.md."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.kept import Kept
from benchmarks.results import Curve, Row

RESULTS = Path(__file__).with_name("results.md")
PAGE = Path(__file__).parents[1] / "docs/explanation/performance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = (
    "| what | against | ours | theirs | ratio | rounds | to reach |\n"
    "| --- | --- | ---: | ---: | ---: | --- | --- |"
)


def write(machine: str, versions: dict[str, str], kept: list[Kept]) -> None:
    """Write both."""
    text = measured(machine, versions, kept)
    RESULTS.write_text(
        "# Results\n\nWritten by `make bench`; what it means: [docs/explanation/performance.md]"
        "(../docs/explanation/performance.md).\n\n" + text + "\n" + curves(kept),
        "utf-8",
    )
    page = PAGE.read_text("utf-8")
    between = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n{text}{END}", page), "utf-8")


def measured(machine: str, versions: dict[str, str], kept: list[Kept]) -> str:
    """Say machine and versions, then a table for each program."""
    parts = [
        f"Machine: {machine}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    parts += [_program(each) for each in kept if each.findings.rows]
    return "\n\n".join(parts) + "\n"


def _program(kept: Kept) -> str:
    notes = [row.note for row in kept.findings.rows if row.note]
    notes = list(dict.fromkeys(notes))
    lines = [_line(row, notes) for row in kept.findings.rows]
    said = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    left_out = [f"Left out: {sentence}." for sentence in kept.findings.left_out]
    table = "\n".join((HEAD, *lines))
    when = (
        f"`python -m benchmarks.{kept.program}`, {kept.rounds} rounds,"
        f" {kept.measured_at} UTC, commit {kept.commit}"
    )
    return "\n\n".join(filter(None, (when, table, "\n".join(said), "\n".join(left_out))))


def _line(row: Row, notes: list[str]) -> str:
    mark = f" ({notes.index(row.note) + 1})" if row.note else ""
    reach = ""
    if row.reach is not None:
        sign = "≤" if row.is_at_most else "≥"
        reach = f"{sign} {row.reach:g} {'reached' if row.is_reached else '**missed**'}"
    return (
        f"| {row.what}{mark} | {row.against} | {figure(row.ours)} {row.unit}"
        f" | {figure(row.theirs)} {row.unit} | {row.ratio:.2f}"
        f" | {min(row.ratios):.2f} to {max(row.ratios):.2f} | {reach} |"
    )


def figure(number: float) -> str:
    """Print three digits, or all before the point."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def curves(kept: list[Kept]) -> str:
    """Make a table of each curve: a line for each size."""
    return "\n".join(_curve(curve) for each in kept for curve in each.findings.curves)


def _curve(curve: Curve) -> str:
    names = list(curve.lines)
    sizes = sorted({size for points in curve.lines.values() for size, _ in points})
    head = f"| {curve.size} | " + " | ".join(names) + " |\n| ---: |" + " ---: |" * len(names)
    by_name = {name: dict(map(tuple, points)) for name, points in curve.lines.items()}
    rows = [
        f"| {size:,g} | "
        + " | ".join(figure(by_name[n][size]) if size in by_name[n] else "" for n in names)
        + " |"
        for size in sizes
    ]
    note = f"\n\n{curve.note}" if curve.note else ""
    return f"## {curve.title}, {curve.unit}\n\n{head}\n" + "\n".join(rows) + note + "\n"
