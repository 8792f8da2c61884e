"""The arithmetic of `make bench`: what is reached, what fell, what is shown."""

from benchmarks import kept, tables
from benchmarks.programs import PROGRAMS
from benchmarks.results import Findings, Row


def measured(findings: Findings) -> str:
    return tables.measured("m", {}, [kept.Kept("sends", findings, "now", "c", 5)])


def test_the_page_shows_the_results_that_are_kept():
    text = tables.measured(*kept.load(list(PROGRAMS)))
    assert f"{tables.BEGIN}\n{text}{tables.END}" in tables.PAGE.read_text("utf-8")
    assert text in tables.RESULTS.read_text("utf-8")


def test_what_is_missed_is_marked_and_notes_are_numbered():
    noted = Row.of(
        "k", "send", "theirs", "ms", [2.0], [1.0], reach=1, is_at_most=True, note="no TCP"
    )
    text = measured(Findings([noted]))
    assert "| send (1) | theirs | 2 ms | 1 ms | 2.00 | 2.00 to 2.00 | ≤ 1 **missed** |" in text
    assert "1. no TCP" in text
