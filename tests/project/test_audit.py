"""What `make audit` makes of a report: a vulnerability fails, and not knowing is said."""

from typing import Any

import pytest

from project.audit import verdict

FINE = {"name": "django", "version": "5.2.19", "vulns": []}
WEAK = {
    "name": "idna", "version": "3.6", "vulns": [{"id": "CVE-2024-3651", "fix_versions": ["3.7"]}]
}  # fmt: skip
UNKNOWN = {"name": "psqlmessages", "skip_reason": "not found on PyPI"}


@pytest.mark.parametrize(
    ("dependencies", "code", "said"),
    [
        ([FINE], 0, "1 packages were looked up, 0 have known vulnerabilities."),
        ([FINE, WEAK], 1, "idna 3.6: CVE-2024-3651, mended in 3.7"),
        ([FINE, UNKNOWN], 0, "Could not be looked up: psqlmessages."),
        ([UNKNOWN], 0, "Nothing is known: none of 1 packages could be looked up."),
    ],
)
def test_a_report_is_judged(dependencies: list[dict[str, Any]], code: int, said: str) -> None:
    found, text = verdict({"dependencies": dependencies})
    assert found == code
    assert said in text
