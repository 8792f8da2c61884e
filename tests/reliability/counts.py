"""What the tests of faults counted: printed, and kept for docs/explanation/reliability.md."""

import json
import os
from pathlib import Path

# The file that each test adds a line to; unset in an ordinary run of the tests.
VARIABLE = "RELIABILITY_COUNTS"
# With it, the sizes that docs/explanation/reliability.md tells; without, those for every day.
FULL = "RELIABILITY_FULL"


def size(everyday: int, full: int) -> int:
    """How many: for every day, or where `make reliability` counts for the documentation."""
    return full if os.environ.get(FULL) else everyday


def counted(fault: str, what: str, **counts: object) -> None:
    """Tell what came of a fault: ``counted("PostgreSQL restarts", "streams, fast", lost=0)``."""
    entry = {"fault": fault, "what": what, "counts": counts}
    print(f"{fault}: {what}: {said(counts)}")
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            file.write(json.dumps(entry, default=str) + "\n")


def said(counts: dict[str, object]) -> str:
    """Counts as words: ``100,000 published, 0 lost, p99_seconds 0.2``."""
    return ", ".join(
        f"{value:,} {name.replace('_', ' ')}"
        if isinstance(value, int)
        else f"{name.replace('_', ' ')} {round(value, 2):.2g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in counts.items()
    )
