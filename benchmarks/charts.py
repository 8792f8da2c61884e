"""The charts of docs/explanation/performance.md: ratios side by side, and the curves."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.results import Curve, Row
from benchmarks.stored_results import StoredFindings

IMAGES = Path(__file__).parents[1] / "docs" / "images"
REACHED, MISSED, INK = "#2a9d8f", "#e76f51", "#333333"
COLUMNS = 2


def draw(stored: list[StoredFindings]) -> None:
    """Draw the chart of ratios and the chart of curves."""
    mpl.use("svg")
    # Keep text as text. With a fixed salt, the same figures give the same file.
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "psqlmessages", "font.size": 9}
    rows = [row for each in stored for row in each.findings.rows if row.goal is not None]
    curves = [curve for each in stored for curve in each.findings.curves]
    if rows:
        _ratios(rows)
    if curves:
        _curves(curves)


def _ratios(rows: list[Row]) -> None:
    figure, axes = pyplot.subplots(figsize=(11, 0.24 * len(rows) + 1.2), layout="constrained")
    places = range(len(rows))
    speeds = [1 / row.ratio if row.is_lower_better else row.ratio for row in rows]
    goals = [1 / row.goal if row.is_lower_better else row.goal for row in rows]
    colours = [REACHED if row.meets_goal else MISSED for row in rows]
    axes.barh(places, [speed - 1 for speed in speeds], left=1, color=colours, height=0.7)
    axes.scatter(goals, places, marker="|", s=90, color=INK, linewidths=1.8, zorder=3)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, [_plain(f"{row.subject} · {row.peer}") for row in rows])
    axes.invert_yaxis()
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title("Speed relative to the peer (1: equal). The stroke marks the goal")
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, "performance.svg")


def _plain(text: str) -> str:
    return text.replace("`", "")


def _curves(curves: list[Curve]) -> None:
    lines = -(-len(curves) // COLUMNS)
    figure, grid = pyplot.subplots(
        lines, COLUMNS, figsize=(11, 3.1 * lines), layout="constrained", squeeze=False
    )
    places = list(grid.flat)
    for axes, curve in zip(places, curves, strict=False):
        _curve(axes, curve)
    for axes in places[len(curves) :]:
        axes.set_visible(False)
    _save(figure, "curves.svg")


def _curve(axes: Axes, curve: Curve) -> None:
    for name, points in curve.lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set_xscale("linear" if curve.size == "seconds" else "log")
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.set_title(curve.title, fontsize=10)
    axes.set_xlabel(curve.size)
    axes.set_ylabel(curve.unit)
    axes.grid(alpha=0.3)
    if len(curve.lines) > 1:
        axes.legend(fontsize=7)


def _save(figure: pyplot.Figure, name: str) -> None:
    figure.savefig(IMAGES / name, metadata={"Date": None})
    pyplot.close(figure)
