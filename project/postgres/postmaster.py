"""Processes of a cluster: the postmaster, and backends that outlived a crashed postmaster."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")
DEAD_STATES = ("Z", "X")  # Z: a zombie has ended, but its parent has not read the exit code


@dataclass(frozen=True)
class Postmaster:
    """The process that a cluster's postmaster.pid names, alive or not."""

    pid: int
    data: Path

    @classmethod
    def read(cls, data: Path) -> "Postmaster | None":
        """Read the postmaster.pid in a data folder; None if it is missing or has no pid."""
        try:
            first_line = (data / "postmaster.pid").read_text().partition("\n")[0]
            return cls(int(first_line), data)
        except (FileNotFoundError, ValueError):
            return None

    @property
    def pid_exists(self) -> bool:
        """Whether any process has this pid, even a zombie or a process of another user."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    @property
    def is_alive(self) -> bool:
        """Whether the process is a running PostgreSQL server of this data folder."""
        if not PROCESSES.joinpath("self", "stat").exists():  # macOS has no /proc
            return self.pid_exists
        return _is_postgres_of(PROCESSES / str(self.pid), self.data)


def stop_orphans(data: Path) -> None:
    """Stop the backends of a dead postmaster, because busy backends do not notice its death.

    SIGQUIT stops the backends. A postmaster sends SIGQUIT too if a backend crashes.
    """
    for process in PROCESSES.glob("[0-9]*"):
        if _is_postgres_of(process, data):
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGQUIT)


def _is_postgres_of(process: Path, data: Path) -> bool:
    """Return whether a process, given by its folder in /proc, is PostgreSQL on this data."""
    try:
        name, _, rest = process.joinpath("stat").read_text().partition("(")[2].rpartition(")")
        if name != "postgres" or rest.split()[0] in DEAD_STATES:
            return False
        # PostgreSQL's working directory is its data folder, even if the folder was moved. Without
        # permission to read it (root in a container without ptrace), compare the command line.
        try:
            return process.joinpath("cwd").samefile(data)
        except PermissionError:
            return os.fsencode(data) in process.joinpath("cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
