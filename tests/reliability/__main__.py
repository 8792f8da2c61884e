"""Make all faults happen in full size, and write the counts to docs/explanation/reliability.md.

python -m tests.reliability [arguments of pytest]   `-k disk` leaves the other lines as they were
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reliability.counts import FULL, VARIABLE, said

# Besides those of this folder: faults that are counted beside what they befall.
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
KEPT = Path(__file__).with_name("counts.json")
BEGIN, END = "<!-- counts: make reliability -->\n", "<!-- end of counts -->\n"


def kept() -> list[dict[str, Any]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else []


def merged(news: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was counted before, with what was counted now in its place."""
    entries = {(entry["fault"], entry["what"]): entry for entry in (*kept(), *news)}
    order = list(dict.fromkeys(entry["fault"] for entry in entries.values()))
    return sorted(entries.values(), key=lambda entry: order.index(entry["fault"]))


def table(entries: list[dict[str, Any]]) -> str:
    rows = [f"| {e['fault']} | {e['what']} | {said(e['counts'])} |" for e in entries]
    return "\n".join(["| What happens | To what | Counted |", "| --- | --- | --- |", *rows, ""])


def draw() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table(kept())}{END}{after}")


def main() -> int:
    """Run the tests; nothing is written where one fails, and what was counted is kept beside."""
    counts = Path(tempfile.mkdtemp(), "counts.jsonl")
    pytest = [sys.executable, "-m", "pytest", "-m", "", "-o", "timeout=900", *TESTS, *sys.argv[1:]]
    env = os.environ | {FULL: "1", VARIABLE: str(counts)}
    done = subprocess.run(pytest, cwd=ROOT, env=env, check=False)
    if done.returncode != 0:
        print(f"a test failed, so the page stays as it was; what was counted is in {counts}")
        return done.returncode
    entries = merged([json.loads(line) for line in counts.read_text().splitlines()])
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    KEPT.write_text(f"[\n{lines}\n]\n")
    draw()
    counts.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
