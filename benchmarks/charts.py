"""The charts of the pages on performance: the main ratios, rates with many tasks, and curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.results import Curve, Row
from benchmarks.stored_results import StoredFindings
from benchmarks.tables import main_rows

IMAGES = Path(__file__).parents[1] / "docs" / "images"
REACHED, MISSED, INK = "#2a9d8f", "#e76f51", "#333333"
COLUMNS = 2
# The curves of performance.md. All others are in curves.svg.
MAIN_CURVES = (
    "scaling: sessions", "scaling: nodes on one session", "streams: by stored messages",
    "websockets: rates",
)  # fmt: skip


def draw(stored: list[StoredFindings]) -> None:
    """Draw all charts."""
    mpl.use("svg")
    # Keep text as text. With a fixed salt, the same figures give the same file.
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "psqlmessages", "font.size": 9}
    # A ratio of 0, for instance of no WAL at all, has no place on a logarithmic axis.
    if rows := [row for row in main_rows(stored) if row.ratio]:
        _ratios(rows)
    concurrent = [
        row for each in stored if each.program == "concurrency" for row in each.findings.rows
    ]
    if concurrent:
        _rates(concurrent)
    curves = {curve.key: curve for each in stored for curve in each.findings.curves}
    main = [curves.pop(key) for key in MAIN_CURVES if key in curves]
    for name, group in (("slow.svg", main), ("curves.svg", list(curves.values()))):
        if group:
            _curves(group, name)


def _ratios(rows: list[Row]) -> None:
    figure, axes = pyplot.subplots(figsize=(11, 0.24 * len(rows) + 1.2), layout="constrained")
    places = range(len(rows))
    speeds = [1 / row.ratio if row.is_lower_better else row.ratio for row in rows]
    axes.barh(places, [speed - 1 for speed in speeds], left=1, color=_colours(rows), height=0.7)
    for place, row in enumerate(rows):
        if row.goal:
            goal = 1 / row.goal if row.is_lower_better else row.goal
            axes.scatter(goal, place, marker="|", s=90, color=INK, linewidths=1.8, zorder=3)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, [_plain(f"{row.subject} · {row.peer}") for row in rows])
    axes.invert_yaxis()
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title("Speed relative to the other system (1: equal). The stroke marks the goal")
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, "performance.svg")


def _colours(rows: Sequence[Row]) -> list[str]:
    return [REACHED if row.meets_goal else MISSED for row in rows]


def _plain(text: str) -> str:
    return text.replace("`", "")


def _rates(rows: Sequence[Row]) -> None:
    """Draw the rates of the benchmark of concurrency: ours in green, those of peers in grey."""
    rates: dict[str, tuple[float, str]] = {}
    for row in rows:
        rates[row.subject] = row.ours, REACHED
        if not row.peer.startswith("1 process"):
            rates[row.peer] = row.theirs, INK
    figure, axes = pyplot.subplots(figsize=(11, 0.26 * len(rates) + 1.0), layout="constrained")
    places = range(len(rates))
    axes.barh(places, [rate for rate, _ in rates.values()],
              color=[colour for _, colour in rates.values()], height=0.7)  # fmt: skip
    axes.set_yticks(places, [_plain(name) for name in rates])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Calls per second by 100 tasks, 1 KB (green: psqlmessages)")
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, "concurrency.svg")


def _curves(curves: Sequence[Curve], name: str) -> None:
    lines = -(-len(curves) // COLUMNS)
    figure, grid = pyplot.subplots(
        lines, COLUMNS, figsize=(11, 3.1 * lines), layout="constrained", squeeze=False
    )
    places = list(grid.flat)
    for axes, curve in zip(places, curves, strict=False):
        _curve(axes, curve)
    for axes in places[len(curves) :]:
        axes.set_visible(False)
    _save(figure, name)


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
