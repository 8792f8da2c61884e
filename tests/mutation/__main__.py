"""Take conditions out of the SQL, one at a time, and see that a test notices each.

python -m tests.mutation [--mutants BEGINNING]   those of killers.txt whose name begins so; else all
python -m tests.mutation --find 50               look for the killers of 50 more, note them there
"""

import subprocess
import sys
from pathlib import Path

from tests.mutation.catalogue import FOLDERS

ROOT = Path(__file__).parents[2]
PLUGINS = ["-p", "tests.mutation.plugin", "-p", "no:terminal", "-p", "no:cacheprovider", "-s"]
LIMIT = ["-o", "timeout=60"]  # A mutant may make a test wait for ever.
TESTS = [f"tests/{name}" for name in FOLDERS]

if __name__ == "__main__":
    command = [sys.executable, "-m", "pytest", *PLUGINS, *LIMIT, *TESTS, *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
