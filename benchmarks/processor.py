"""How much of the processors a piece of work takes: steadier than the clock on a busy machine."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
# Of /proc/PID/stat after the name: the parent, then the times of it and of its ended children.
_PARENT, _TIMES = 1, slice(11, 15)


def seconds(*roots: int) -> float:
    """Sum the time of these processes, of all below them, and of those of them that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(folder.name)] = int(fields[_PARENT])
        ticks[int(folder.name)] = sum(map(int, fields[_TIMES]))
    return sum(ticks[pid] for pid in ticks if _is_below(pid, roots, parents)) / _TICKS


def _is_below(pid: int, roots: tuple[int, ...], parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid in roots:
            return True
        pid = parents[pid]
    return False
