"""The soak, for seconds: everything at once loses and doubles nothing, and a leak is found."""

import re
import subprocess

import pytest

from tests.django.processes import run_python
from tests.reliability.counts import counted, size


def soaked(*arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run it as `make soak` does; also what it found to be wrong."""
    done = run_python("-m", "tests.reliability.soak", *arguments, timeout=240)
    return done, done.stdout.partition("\nWRONG\n")[2].splitlines()


@pytest.mark.nightly  # a server, a site and ten processes start
def test_everything_at_once_loses_and_doubles_nothing() -> None:
    seconds = size(8, 60)
    done, wrong = soaked("--seconds", str(seconds))
    # In so short a time memory has not come to rest.
    faults = [line for line in wrong if not line.startswith("grew: ")]
    line = done.stdout.partition("\ncounted: ")[2].partition("\n")[0]
    found = {what: int(number) for number, what in re.findall(r"(\d+) ([^,]+)", line)}
    counted("everything at once", f"the soak, {seconds} s", **found, faults=len(faults))
    assert faults == [], done.stdout
    assert done.returncode in (0, 1), done.stderr
    assert min(found["messages"], found["killed"], found["rounds of all"]) > 0


@pytest.mark.timeout(300)
@pytest.mark.nightly  # a minute
def test_what_leaks_and_loses_is_found() -> None:
    done, found = soaked("--seconds", "40", "--leak")
    assert done.returncode == 1, done.stderr
    for what in (
        "memory of leaker", "descriptors of leaker", "threads of leaker", "connections",
        "advisory locks", "table public.soak_leak",
    ):  # fmt: skip
        assert any(line.startswith(f"grew: {what}: ") for line in found), (what, found)
