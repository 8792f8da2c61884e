"""Take security checks out of the SQL, one at a time, and see that a test notices each.

python -m tests.reliability.mutate [NAME ...]   these, or those whose names begin so; else all
--list   say which there are

PSQLMESSAGES_MUTATION=NAME python -m pytest ...   any tests, with one of them installed
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.reliability.mutation import VARIABLE
from tests.reliability.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
PLUGINS = ["-p", "tests.reliability.sweep", "-p", "no:terminal", "-p", "no:cacheprovider", "-s"]


def chosen(names: list[str]) -> list[str]:
    """The mutations of these names or beginnings of names; all where none is given."""
    for name in names:
        if not any(each.startswith(name) for each in MUTATIONS):
            raise SystemExit(f"No mutation's name begins with {name}.")
    return [each for each in MUTATIONS if not names or each.startswith(tuple(names))]


def swept(names: list[str]) -> int:
    """Run the tests of mutations in one run of pytest; its code, not 0 where one survived."""
    tests = sorted({f"tests/{MUTATIONS[name].test}" for name in names})
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *tests, "--mutations", *names],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        check=False,
    ).returncode


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    names = chosen(options.names)
    if options.list:
        print(*(f"{name:44} {MUTATIONS[name].test}" for name in names), sep="\n")
        return 0
    return swept(names)


if __name__ == "__main__":
    sys.exit(main())
