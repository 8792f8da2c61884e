"""CPU time of processes: on a busy machine it varies less than elapsed time."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name: the parent, and the CPU times of the process and of its
# ended children.
_PARENT, _TIMES = 1, slice(11, 15)


def seconds(*roots: int) -> float:
    """Return the CPU time of these processes and all their descendants, also of ended ones."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(folder.name)] = int(fields[_PARENT])
        ticks[int(folder.name)] = sum(map(int, fields[_TIMES]))
    return sum(ticks[pid] for pid in ticks if _is_descendant(pid, roots, parents)) / _TICKS


def process_nanoseconds(pid: int) -> int:
    """Return the CPU time of the present threads of a process, more precise than ``seconds``."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


def _is_descendant(pid: int, roots: tuple[int, ...], parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid in roots:
            return True
        pid = parents[pid]
    return False
