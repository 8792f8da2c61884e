"""Run the reliability tests in full size, and write their counts into the documentation.

python -m tests.reliability [arguments of pytest]   `-k disk` updates only the rows of these tests
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reliability.counts import FILE_VARIABLE, FULL_VARIABLE, format_counts

# This folder, and tests in other folders that report counts.
TESTS = (
    "tests/reliability", "tests/streams/test_exactly_once.py",
    "tests/exchanges/test_kill.py", "tests/exchanges/test_runner_processes.py",
    "tests/queues/client/test_queue_waiting.py", "tests/web/test_cut_connections.py",
    "tests/web/test_hostile_sockets.py", "tests/django/test_call.py",
    "tests/django/test_run_command.py", "tests/exchanges/test_runner_command.py",
    "tests/pipeline/test_session.py", "tests/pipeline/test_faults.py",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/reliability.md"
BEGIN, END = "<!-- counts: make reliability -->\n", "<!-- end of counts -->\n"


def update_page(new: list[dict[str, Any]], *, is_complete: bool) -> None:
    """Put counts into the table, grouped by fault; after a complete run, drop all other rows."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    head, rows = table.splitlines(keepends=True)[:2], table.splitlines()[2:]
    counts = {tuple(row.split(" | ")[:2]): row.split(" | ")[2] for row in rows}
    found = {(f"| {e['fault']}", e["case"]): f"{format_counts(e['counts'])} |" for e in new}
    counts = {case: counts[case] for case in counts if case in found or not is_complete} | found
    faults = list(dict.fromkeys(fault for fault, _ in counts))
    lines = [" | ".join((*case, counts[case])) + "\n" for case in counts]
    lines.sort(key=lambda line: faults.index(line.split(" | ")[0]))
    PAGE.write_text("".join([before, BEGIN, *head, *lines, END, after]))


def main() -> int:
    """Run the tests and write their counts into the page.

    If a test fails, leave the page unchanged and print the name of the file with the counts.
    A run of some tests, or one that skips a test, is not complete.
    """
    counts = Path(tempfile.mkdtemp(), "counts.jsonl")
    results = counts.with_name("results.xml")
    options = ["-m", "", "-o", "timeout=900", f"--junit-xml={results}"]
    pytest = [sys.executable, "-m", "pytest", *options, *TESTS, *sys.argv[1:]]
    env = os.environ | {FULL_VARIABLE: "1", FILE_VARIABLE: str(counts)}
    status = subprocess.run(pytest, cwd=ROOT, env=env, check=False).returncode
    if status != 0:
        print(f"A test failed, so {PAGE.name} is unchanged. The counts of this run: {counts}")
        return status
    found = [json.loads(line) for line in counts.read_text().splitlines()]
    has_skips = "<skipped" in results.read_text()
    update_page(found, is_complete=not sys.argv[1:] and not has_skips)
    shutil.rmtree(counts.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
