"""docs/selectors.md says what is: its tables are asked, its programs run, its bounds compared."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psqlmessages.exchanges import (
    UNCHANGED,
    Delivery,
    Selector,
    SelectorError,
    answers,
    compiling,
    registry,
)
from psqlmessages.exchanges.bounds import MAX_UNITS, VALUE_UNITS
from psqlmessages.exchanges.conversion import MAX_NESTING
from psqlmessages.exchanges.looks import FIELDS
from tests.exchanges.asking import routed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "selectors.md").read_text()
ROW = re.compile(r"^\| `(?P<selector>.*)` \| (?P<taken>yes|no) \| (?P<says>.*) \|$", re.MULTILINE)
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
(MESSAGE,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
(PRINTED,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
ROWS = [
    (row["selector"].replace("\\|", "|"), row["taken"] == "yes", row["says"])
    for row in ROW.finditer(PAGE)
]


def changes(delivery: Delivery, headers: dict[str, Any]) -> dict[str, Any]:
    """What a delivery has that is not as in the message, the hop aside."""
    changed = {
        key: value
        for key, value in vars(delivery).items()
        if key in {"delay", "mature", "tries"} and value
    }
    if delivery.headers is not None:
        kept = {**headers, "x-hop-count": 1}.items()
        changed["headers"] = {
            key: value for key, value in delivery.headers.items() if (key, value) not in kept
        }
    if delivery.body is not UNCHANGED:
        changed["body"] = delivery.body
    return changed


def test_each_example_says_what_the_page_says() -> None:
    assert len(ROWS) >= 19
    for selector, is_taken, says in ROWS:
        message = json.loads(MESSAGE)
        result = routed(selector, body=message["body"], **message["headers"])
        (verdict,) = result.verdicts
        assert verdict.is_taken == is_taken, selector
        if says.startswith("`"):
            (delivery,) = result.deliveries
            assert changes(delivery, message["headers"]) == json.loads(says.strip("`")), selector
        else:
            assert verdict.why == says


@pytest.fixture
def by_region() -> Iterator[str]:
    """The selector in code of the page."""
    exec(PROGRAMS["selectors"], {"__name__": "selectors"})  # noqa: S102
    yield "@by-region"
    del registry._functions["by-region"]


def test_the_selector_in_code_does_what_the_page_says(by_region: str) -> None:
    (delivery,) = routed(by_region, country="it").deliveries
    assert delivery.headers == {"country": "it", "region": "eu", "x-hop-count": 1}
    assert routed(by_region, country="at").outcome == "no_route"


def test_the_program_prints_what_the_page_says() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAMS["trying"]],
        capture_output=True, text=True, cwd=ROOT, check=True, timeout=60,
    )  # fmt: skip
    assert ran.stdout == PRINTED


def test_the_bounds_are_those_of_the_page() -> None:
    for text in (
        *(f"`msg.{field}`" for field in FIELDS),
        f"at most {compiling.MAX_CHARACTERS:,} characters and 32 levels",
        f"another {VALUE_UNITS}.",
        f"look at {MAX_UNITS:,} units",
        f"more than {MAX_NESTING} levels",
        f"`tries` up to {answers.MAX_TRIES}",
    ):
        assert text in PAGE
    assert Selector("[" * 32 + "]" * 32)
    with pytest.raises(SelectorError, match="32"):
        Selector("[" * 33 + "]" * 33)
