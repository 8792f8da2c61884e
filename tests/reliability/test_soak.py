"""The soak, for seconds: everything at once loses and doubles nothing."""

import re

import pytest

from tests.django.processes import run_python
from tests.reliability.counts import counted, size


@pytest.mark.nightly  # a server, a site and ten processes start
def test_everything_at_once_loses_and_doubles_nothing() -> None:
    seconds = size(8, 60)
    done = run_python("-m", "tests.reliability.soak", "--seconds", str(seconds), timeout=240)
    wrong = done.stdout.partition("\nWRONG\n")[2].splitlines()
    # Memory still grows in so short a time.
    faults = [line for line in wrong if not line.startswith("grew: ")]
    line = done.stdout.partition("\ncounted: ")[2].partition("\n")[0]
    found = {what: int(number) for number, what in re.findall(r"(\d+) ([^,]+)", line)}
    counted("everything at once", f"the soak, {seconds} s", **found, faults=len(faults))
    assert faults == [], done.stdout
    assert done.returncode in (0, 1), done.stderr
    assert min(found["messages"], found["killed"], found["rounds of all"]) > 0
