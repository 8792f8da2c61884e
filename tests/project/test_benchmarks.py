"""The arithmetic of `make bench` and `make audit`: what is reached, what fell, what is shown."""

from benchmarks import kept, tables
from benchmarks.programs import PROGRAMS
from benchmarks.results import Findings, Row
from project.audit import verdict


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


def test_a_vulnerability_fails_the_audit_and_not_knowing_is_said():
    fine = {"name": "django", "version": "5.2.19", "vulns": []}
    found = [{"id": "CVE-2024-3651", "fix_versions": ["3.7"]}]
    weak = {"name": "idna", "version": "3.6", "vulns": found}
    unknown = {"name": "psqlmessages", "skip_reason": "not found on PyPI"}
    for dependencies, code, said in (
        ([fine], 0, "1 packages were looked up, 0 have known vulnerabilities."),
        ([fine, weak], 1, "idna 3.6: CVE-2024-3651, mended in 3.7"),
        ([fine, unknown], 0, "Could not be looked up: psqlmessages."),
        ([unknown], 0, "Nothing is known: none of 1 packages could be looked up."),
    ):
        judged, text = verdict({"dependencies": dependencies})
        assert (judged, said in text) == (code, True), text
