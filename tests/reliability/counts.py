"""Counts of a reliability test: printed, and appended to a file for `make reliability`."""

import json
import os
import re
from pathlib import Path

# The file to which each test appends its counts; not set in an ordinary run of the tests.
FILE_VARIABLE = "RELIABILITY_COUNTS"
# If set, the tests run in full size, as for docs/explanation/reliability.md.
FULL_VARIABLE = "RELIABILITY_FULL"
PLURAL = re.compile(r"(kill|prune|table|event|process|element|line|answer)(es|s)\b")
UNITS = {"seconds": "s", "megabytes": "MB", "kilobytes": "kB", "bytes": "bytes"}


def size(small: int, full: int) -> int:
    """Return the full size if `make reliability` runs the test, else the small one."""
    return full if os.environ.get(FULL_VARIABLE) else small


def report(fault: str, case: str, **counts: object) -> None:
    """Report the counts of a test: ``report("disk full", "publish_many", refused=3, lost=0)``."""
    print(f"{fault}: {case}: {format_counts(counts)}")
    if path := os.environ.get(FILE_VARIABLE):
        with Path(path).open("a") as file:
            entry = {"fault": fault, "case": case, "counts": counts}
            file.write(json.dumps(entry, default=str) + "\n")


def memory_megabytes(pid: int | str = "self") -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def format_counts(counts: dict[str, object]) -> str:
    """Format counts as text: ``100,000 published, 0 lost, slowest 0.2 s, closed with 1009``."""
    return ", ".join(_format_count(name, value) for name, value in counts.items())


def _format_count(name: str, value: object) -> str:
    *words, last = name.split("_")
    text = str(value)
    if isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{round(value, 2):.2g}"
    if last in UNITS:
        return " ".join([*words, text, UNITS[last]])
    label = name.replace("_", " ")
    if value == 1:
        label = PLURAL.sub(r"\1", label, count=1)
    return f"{text} {label}" if isinstance(value, int) else f"{label} {text}"
