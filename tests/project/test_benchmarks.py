"""The tables of `make bench`: goals, notes, and the pages that show the stored results."""

from benchmarks import stored_results, tables
from benchmarks.programs import PROGRAMS
from benchmarks.results import Findings, Row


def test_the_pages_show_the_stored_results():
    loaded = stored_results.load(list(PROGRAMS))
    text, main = tables.to_markdown(*loaded), tables.main_table(loaded[-1])
    assert f"{tables.BEGIN}\n{text}{tables.END}" in tables.DETAILS.read_text("utf-8")
    assert f"{tables.BEGIN}\n{main}{tables.END}" in tables.MAIN.read_text("utf-8")
    assert text in tables.RESULTS.read_text("utf-8")


def test_missed_goals_are_marked_and_notes_are_numbered():
    given = {"goal": 1, "is_lower_better": True, "note": "no TCP"}
    row = Row.of("k", "send", "theirs", "ms", [2.0], [1.0], **given)
    stored = stored_results.StoredFindings("sends", Findings([row]), "now", "c", 5)
    text = tables.to_markdown("m", {}, [stored])
    assert "| send (1) | theirs | 2 ms | 1 ms | 2.00 | 2.00 to 2.00 | ≤ 1 **missed** |" in text
    assert "1. no TCP" in text
