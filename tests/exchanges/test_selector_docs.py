"""docs/reference/selectors.md: its tables are asked, its programs run, its bounds compared."""

import json
import re
from typing import Any

import pytest

from psqlmessages.exchanges import UNCHANGED, Delivery, Selector, SelectorError, selectors
from psqlmessages.exchanges import result as result_module
from psqlmessages.exchanges.compiler import MAX_CHARACTERS
from psqlmessages.exchanges.conversion import MAX_NESTING
from psqlmessages.exchanges.cost import MAX_UNITS, VALUE_UNITS
from psqlmessages.exchanges.expression import FIELDS
from tests.django.processes import ROOT, run_python
from tests.exchanges.asking import routed

PAGE = (ROOT / "docs/reference/selectors.md").read_text()
ROW = re.compile(r"^\| `(?P<selector>.*)` \| (?P<taken>yes|no) \| (?P<says>.*) \|$", re.MULTILINE)
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
(MESSAGE,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
(PRINTED,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
FOUND = (row.groups() for row in ROW.finditer(PAGE))
ROWS = [(text.replace("\\|", "|"), taken == "yes", says) for text, taken, says in FOUND]


def changes(delivery: Delivery, headers: dict[str, Any]) -> dict[str, Any]:
    """Return how a delivery differs from the message, without the hop count."""
    fields = ("delay", "mature", "tries")
    changed = {key: value for key in fields if (value := getattr(delivery, key))}
    if delivery.headers is not None:
        kept = {**headers, "x-hop-count": 1}.items()
        changed["headers"] = dict(each for each in delivery.headers.items() if each not in kept)
    if delivery.body is not UNCHANGED:
        changed["body"] = delivery.body
    return changed


def test_each_example_says_what_the_page_says():
    assert len(ROWS) >= 19
    for selector, is_accepted, says in ROWS:
        message = json.loads(MESSAGE)
        result = routed(selector, body=message["body"], **message["headers"])
        (verdict,) = result.verdicts
        assert verdict.is_accepted == is_accepted, selector
        if says.startswith("`"):
            (delivery,) = result.deliveries
            assert changes(delivery, message["headers"]) == json.loads(says.strip("`")), selector
        else:
            assert verdict.why == says


def test_the_selector_in_code_does_what_the_page_says(monkeypatch):
    monkeypatch.setattr(selectors, "_functions", {})
    exec(PROGRAMS["selectors"], {"__name__": "selectors"})  # noqa: S102
    (delivery,) = routed("@by-region", country="it").deliveries
    assert delivery.headers == {"country": "it", "region": "eu", "x-hop-count": 1}
    assert routed("@by-region", country="at").outcome == "no_route"


def test_the_program_prints_what_the_page_says():
    ran = run_python("-W", "error", "-c", PROGRAMS["trying"])
    assert (ran.returncode, ran.stdout) == (0, PRINTED), ran.stderr


def test_the_bounds_are_those_of_the_page():
    for text in (
        *(f"`msg.{field}`" for field in FIELDS),
        f"at most {MAX_CHARACTERS:,} characters and 32 levels",
        f"another {VALUE_UNITS}.",
        f"look at {MAX_UNITS:,} units",
        f"more than {MAX_NESTING} levels",
        f"`tries` up to {result_module.MAX_TRIES}",
    ):
        assert text in PAGE
    assert Selector("[" * 32 + "]" * 32)
    with pytest.raises(SelectorError, match="32"):
        Selector("[" * 33 + "]" * 33)
