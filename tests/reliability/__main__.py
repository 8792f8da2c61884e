"""Run the reliability tests in full size, and write their counts into the documentation.

python -m tests.reliability [arguments of pytest]   `-k disk` updates only the rows of these tests
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reliability.counts import FILE_VARIABLE, FULL_VARIABLE, format_counts

# This folder, and tests in other folders that report counts.
TESTS = (
    "tests/reliability", "tests/sql/test_random_calls.py", "tests/streams/test_exactly_once.py",
    "tests/exchanges/test_kill.py", "tests/exchanges/test_runner_crew.py",
    "tests/queues/client/test_queue_held.py", "tests/web/test_cut_connections.py",
    "tests/web/test_hostile_sockets.py", "tests/django/test_call.py",
    "tests/django/test_run_command.py", "tests/exchanges/test_runner_command.py",
    "tests/pipeline/test_session.py", "tests/pipeline/test_faults.py",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/reliability.md"
STORED_COUNTS = Path(__file__).with_name("counts.json")
BEGIN, END = "<!-- counts: make reliability -->\n", "<!-- end of counts -->\n"


Entry = dict[str, Any]


def merge(new: list[Entry]) -> list[Entry]:
    """Replace stored entries of the same case by new ones; group the entries by fault."""
    stored: list[Entry] = json.loads(STORED_COUNTS.read_text())
    entries = {(entry["fault"], entry["case"]): entry for entry in (*stored, *new)}
    order = list(dict.fromkeys(fault for fault, _ in entries))
    return sorted(entries.values(), key=lambda entry: order.index(entry["fault"]))


def write_page(entries: list[Entry]) -> None:
    rows = [f"| {e['fault']} | {e['case']} | {format_counts(e['counts'])} |" for e in entries]
    table = "\n".join(["| Fault | Case | Counts |", "| --- | --- | --- |", *rows, ""])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}")


def main() -> int:
    """Run the tests; if one fails, leave the page as it is and print where the counts are."""
    counts = Path(tempfile.mkdtemp(), "counts.jsonl")
    pytest = [sys.executable, "-m", "pytest", "-m", "", "-o", "timeout=900", *TESTS, *sys.argv[1:]]
    env = os.environ | {FULL_VARIABLE: "1", FILE_VARIABLE: str(counts)}
    status = subprocess.run(pytest, cwd=ROOT, env=env, check=False).returncode
    if status != 0:
        print(f"A test failed, so {PAGE.name} is unchanged. The counts of this run: {counts}")
        return status
    entries = merge([json.loads(line) for line in counts.read_text().splitlines()])
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    STORED_COUNTS.write_text(f"[\n{lines}\n]\n")
    write_page(entries)
    counts.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
