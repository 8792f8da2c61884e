"""Take security checks out of the SQL, one at a time, and see that a test notices each.

python -m tests.reliability.mutate [NAME ...]   these, or those whose names begin so; else all
--list     say which there are
--jobs N   so many at a time
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.reliability.mutation import VARIABLE
from tests.reliability.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
# What a mutation is that has merely broken the function: no proof that the check is guarded.
BROKEN = re.compile(r"(SyntaxError|Undefined\w+|Ambiguous\w+|DatatypeMismatch|CannotCoerce): ")
FAILED = re.compile(r"^FAILED (.*)$", re.MULTILINE)
WHY = re.compile(r"^(?:E |!|ERROR).*$", re.MULTILINE)
LIMIT_SECONDS = 300


def pytest(tests: Collection[str], mutation: str | None = None) -> tuple[int, str]:
    """Run tests with or without a mutation: pytest's exit code, and what it says."""
    environment = os.environ | ({} if mutation is None else {VARIABLE: mutation})
    paths = [f"tests/{test}" for test in sorted(tests)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", *paths],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def verdict(name: str) -> tuple[str, str]:
    """What becomes of a mutation: killed, SURVIVED or ERROR, and how that shows."""
    code, said = pytest([MUTATIONS[name].test], name)
    if code == 0:
        return "SURVIVED", MUTATIONS[name].test
    failed = FAILED.search(said)
    if code != 1 or failed is None or BROKEN.search(said):
        return "ERROR", "\n".join(WHY.findall(said) or [said])
    return "killed", failed[1]


def chosen(names: list[str]) -> list[str]:
    """The mutations of these names or beginnings of names; all where none is given."""
    for name in names:
        if not any(each.startswith(name) for each in MUTATIONS):
            raise SystemExit(f"No mutation's name begins with {name}.")
    return [each for each in MUTATIONS if not names or each.startswith(tuple(names))]


def main() -> int:
    """Run what the command line asks for; 1 where a mutation survived or could not be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    names = chosen(options.names)
    if options.list:
        print(*(f"{name:44} {MUTATIONS[name].test}" for name in names), sep="\n")
        return 0
    code, said = pytest({MUTATIONS[name].test for name in names})
    if code != 0:
        print(said, "Without a mutation the tests must pass.", sep="\n")
        return 1
    counts = {"killed": 0, "SURVIVED": 0, "ERROR": 0}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, (what, how) in zip(names, pool.map(verdict, names), strict=True):
            counts[what] += 1
            print(f"{what:8} {name}: {how}", flush=True)
    print(", ".join(f"{number} {what}" for what, number in counts.items()))
    return 1 if counts["SURVIVED"] + counts["ERROR"] else 0


if __name__ == "__main__":
    sys.exit(main())
