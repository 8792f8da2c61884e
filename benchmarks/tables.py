"""The results as Markdown: benchmarks/results.md, and the tables of the pages on performance."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import fill

from benchmarks.programs import MAIN_ROWS
from benchmarks.results import Curve, Row
from benchmarks.stored_results import StoredFindings

RESULTS = Path(__file__).with_name("results.md")
PAGES = Path(__file__).parents[1] / "docs/explanation"
MAIN, DETAILS = PAGES / "performance.md", PAGES / "performance-details.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = (
    "| measured | compared with | ours | theirs | ratio | ratios of rounds | goal |\n"
    "| --- | --- | ---: | ---: | ---: | --- | --- |"
)
MAIN_HEAD = "| measured | compared with | ratio | goal |\n| --- | --- | ---: | --- |"


def write(machine: str, versions: dict[str, str], stored: list[StoredFindings]) -> None:
    """Write results.md and the tables of both pages."""
    text = to_markdown(machine, versions, stored)
    title = "# Results\n\nWritten by `make bench`."
    title += " Explained in [performance.md](../docs/explanation/performance.md).\n\n"
    RESULTS.write_text(title + text + "\n" + curve_tables(stored), "utf-8")
    between = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    for path, content in ((MAIN, main_table(stored)), (DETAILS, text)):
        page = path.read_text("utf-8")
        path.write_text(between.sub(lambda _: f"{BEGIN}\n{content}{END}", page), "utf-8")  # noqa: B023


def main_table(stored: list[StoredFindings]) -> str:
    """Return the table of the main rows, without figures and notes."""
    lines = [
        f"| {row.subject} | {row.peer} | {row.ratio:.2f} | {_goal(row)} |"
        for row in main_rows(stored)
    ]
    return "\n".join((MAIN_HEAD, *lines)) + "\n"


def main_rows(stored: list[StoredFindings]) -> list[Row]:
    """Return the stored rows of MAIN_ROWS, in that order."""
    rows = {row.key: row for each in stored for row in each.findings.rows}
    return [rows[key] for key in MAIN_ROWS if key in rows]


def to_markdown(machine: str, versions: dict[str, str], stored: list[StoredFindings]) -> str:
    """Return machine and versions, and a table for each program."""
    parts = [
        f"Machine: {machine}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    parts += [_program_table(each) for each in stored if each.findings.rows]
    # The pages have at most 120 characters in a line, except in tables.
    lines = ("\n\n".join(parts) + "\n").split("\n")
    return "\n".join(line if line.startswith("|") else _wrapped(line) for line in lines)


def _wrapped(line: str) -> str:
    return fill(line, 120, subsequent_indent="   " if re.match(r"\d\. ", line) else "")


def _program_table(stored: StoredFindings) -> str:
    notes = list(dict.fromkeys(row.note for row in stored.findings.rows if row.note))
    lines = [_line(row, notes) for row in stored.findings.rows]
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    left_out = [f"Left out: {reason}." for reason in stored.findings.left_out]
    table = "\n".join((HEAD, *lines))
    origin = (
        f"`python -m benchmarks.{stored.program}`, {stored.rounds} rounds,"
        f" {stored.measured_at} UTC, commit {stored.commit}"
    )
    return "\n\n".join(filter(None, (origin, table, "\n".join(numbered), "\n".join(left_out))))


def _line(row: Row, notes: list[str]) -> str:
    mark = f" ({notes.index(row.note) + 1})" if row.note else ""
    return (
        f"| {row.subject}{mark} | {row.peer} | {format_figure(row.ours)} {row.unit}"
        f" | {format_figure(row.theirs)} {row.unit} | {row.ratio:.2f}"
        f" | {min(row.ratios):.2f} to {max(row.ratios):.2f} | {_goal(row)} |"
    )


def _goal(row: Row) -> str:
    if row.goal is None:
        return ""
    sign = "≤" if row.is_lower_better else "≥"
    return f"{sign} {row.goal:g} {'reached' if row.meets_goal else '**missed**'}"


def format_figure(number: float) -> str:
    """Return three digits, or all digits before the decimal point."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def curve_tables(stored: list[StoredFindings]) -> str:
    """Return a table for each curve, with a line for each size."""
    return "\n".join(_curve_table(curve) for each in stored for curve in each.findings.curves)


def _curve_table(curve: Curve) -> str:
    names = list(curve.lines)
    sizes = sorted({size for points in curve.lines.values() for size, _ in points})
    head = f"| {curve.size} | " + " | ".join(names) + " |\n| ---: |" + " ---: |" * len(names)
    by_name = {name: dict(map(tuple, points)) for name, points in curve.lines.items()}
    rows = [
        f"| {size:,g} | "
        + " | ".join(format_figure(by_name[n][size]) if size in by_name[n] else "" for n in names)
        + " |"
        for size in sizes
    ]
    note = f"\n\n{curve.note}" if curve.note else ""
    return f"## {curve.title}, {curve.unit}\n\n{head}\n" + "\n".join(rows) + note + "\n"
