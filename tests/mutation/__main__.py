"""Take conditions out of the SQL, one at a time, and see that a test notices each.

python -m tests.mutation [BEGINNING]     those of killers.txt whose name begins so; else all
python -m tests.mutation --find 50       look for the killers of 50 more, and note them there
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = ["-p", "tests.mutation.plugin", "-p", "no:terminal", "-p", "no:cacheprovider", "-s"]
TESTS = [f"tests/{name}" for name in ("sql", "streams", "queues", "exchanges", "reliability")]


def main() -> int:
    """Run pytest with the plugin; its code, not 0 where a mutant survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("beginning", nargs="?", default="")
    parser.add_argument("--find", type=int, default=0, metavar="N")
    parser.add_argument("--files", type=int, default=10, metavar="N")
    asked = parser.parse_args()
    options = ["--find", str(asked.find), "--files", str(asked.files), "--mutants", asked.beginning]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *TESTS, *options], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
