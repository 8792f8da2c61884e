"""The arithmetic of `make bench` and `make audit`: what is reached, what fell, what is shown."""

from pathlib import Path

from benchmarks import expected, kept, tables
from benchmarks.programs import PROGRAMS
from benchmarks.results import Curve, Findings, Row
from project.audit import verdict


def row(ratio: float, *, key: str = "sends: 1 KB", is_at_most: bool = False) -> Row:
    given = ([100 * ratio], [100.0])
    return Row.of(key, "send", "theirs", "messages/s", *given, reach=1.0, is_at_most=is_at_most)


def measured(findings: Findings) -> str:
    return tables.measured("m", {}, [kept.Kept("sends", findings, "now", "c", 5)])


def test_a_ratio_is_the_median_of_those_of_each_round():
    found = Row.of("k", "send", "theirs", "ms", [10, 40, 30], [10, 20, 10])
    assert (found.ours, found.theirs, found.ratio) == (30, 10, 2)


def test_a_rate_has_to_reach_and_a_time_to_stay_below_and_neither_may_fall():
    for ratio, is_at_most, is_reached in (
        (1.0, False, True), (0.99, False, False), (1.0, True, True), (1.01, True, False),
    ):  # fmt: skip
        assert row(ratio, is_at_most=is_at_most).is_reached is is_reached
    for ratio, is_at_most, has_fallen in (
        (0.7, False, False), (0.6, False, True), (3.0, False, False),
        (1.45, True, False), (1.6, True, True), (0.2, True, False),
    ):  # fmt: skip
        said = expected.fallen([row(ratio, is_at_most=is_at_most)], {"sends: 1 KB": 1.0})
        assert bool(said) is has_fallen


def test_a_row_of_which_nothing_is_expected_is_told():
    assert expected.fallen([row(1, key="new")], {}) == [
        "new: 1.00, and nothing is expected of it: --keep"
    ]


def test_findings_are_read_as_they_were_saved(tmp_path: Path):
    curve = Curve("c", "By rules", "rules", "ms", {"send": [(1, 2)]})
    found = Findings([row(1.5)], [curve], ["no peer"], {"x": "1"})
    found.save(tmp_path / "findings.json")
    assert measured(Findings.load(tmp_path / "findings.json")) == measured(found)


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
