"""The clock of a server, put forward and back under whoever is connected: see false_time.c."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from project.postgres import Server

SOURCE = Path(__file__).with_name("false_time.c")


@contextmanager
def server_clock() -> Iterator[ServerClock]:
    """A clock of its own, right at first."""
    # Where the server's account can reach it.
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        yield ServerClock(Path(folder))


class ServerClock:
    """How wrong the clock of a server is; it takes effect at once, in all its processes."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler here, which a false clock for the server needs")
        # For the server's account too.
        folder.chmod(0o755)
        self._library, self._file = folder / "false_time.so", folder / "seconds"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-o", self._library, SOURCE], check=True
        )
        self._file.write_bytes(struct.pack("q", 0))
        self._file.chmod(0o644)

    def put(self, by: timedelta) -> None:
        """Put it forward, or back, by so much from the true time."""
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("q", int(by.total_seconds())))

    def deceive(self, server: Server) -> None:
        """Start a server anew, as it was started, but with this clock."""
        postmaster, account = server.postmaster, server.home.account
        assert postmaster is not None
        program = Path(f"/proc/{postmaster.pid}/exe").resolve().with_name("pg_ctl")
        with server.home.log.open("ab") as log:
            subprocess.run(
                [program, "restart", "-D", server.home.data, "-m", "fast", "-w", "-s"],
                env={
                    "LC_ALL": "C", "LD_PRELOAD": str(self._library), "FALSE_TIME": str(self._file)
                },
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=True,
                start_new_session=True, umask=0o077,
                **({"user": account.uid, "group": account.gid, "extra_groups": []}
                   if account.is_foreign else {}),
            )  # fmt: skip
