"""The processes of a cluster: the one that postmaster.pid names, and those it left behind."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")
DEAD = ("Z", "X")  # a zombie has ended, but nobody has asked for its exit code yet


@dataclass(frozen=True)
class Postmaster:
    """A process that a cluster's postmaster.pid names."""

    pid: int
    data: Path

    @classmethod
    def named_in(cls, data: Path) -> "Postmaster | None":
        """Read a data folder's postmaster.pid; None if there is none or it says nothing."""
        try:
            first_line = (data / "postmaster.pid").read_text().partition("\n")[0]
            return cls(int(first_line), data)
        except (FileNotFoundError, ValueError):
            return None

    @property
    def pid_exists(self) -> bool:
        """Whether any process has this pid, be it a zombie or somebody else's."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    @property
    def is_alive(self) -> bool:
        """Whether the process is a living PostgreSQL server of this very data folder."""
        if not PROCESSES.joinpath("self", "stat").exists():  # macOS: the pid is all there is
            return self.pid_exists
        return _serves(PROCESSES / str(self.pid), self.data)


def end_orphans(data: Path) -> None:
    """End what works on the data though its postmaster is dead: a busy backend does not notice.

    SIGQUIT is what the postmaster itself sends to the rest after a crash.
    """
    for process in PROCESSES.glob("[0-9]*"):
        if _serves(process, data):
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGQUIT)


def _serves(process: Path, data: Path) -> bool:
    """Whether a process, given by its folder in /proc, is a living PostgreSQL on these data."""
    try:
        name, _, rest = process.joinpath("stat").read_text().partition("(")[2].rpartition(")")
        if name != "postgres" or rest.split()[0] in DEAD:
            return False
        # PostgreSQL works in its data folder. Who may not look at that (root in a container without
        # ptrace) reads the command line instead; the first holds even after the folder was moved.
        try:
            return process.joinpath("cwd").samefile(data)
        except PermissionError:
            return os.fsencode(data) in process.joinpath("cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
