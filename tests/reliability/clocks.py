"""Clocks that are wrong, of a server or of a client in a process of its own: see false_time.c."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import time
from typing import Any

import pytest

from project.postgres import Server

SOURCE = Path(__file__).with_name("false_time.c")
ROOT = Path(__file__).parents[2]


@contextmanager
def false_clock() -> Iterator[FalseClock]:
    """A clock of its own, right at first, where the server's account can reach it."""
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        yield FalseClock(Path(folder))


class FalseClock:
    """How wrong the clock of some processes is; it takes effect at once, in all of them."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler here, which a false clock needs: apt-get install gcc")
        # For the server's account too.
        folder.chmod(0o755)
        library, self._file = folder / "false_time.so", folder / "seconds"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-o", library, SOURCE], check=True
        )
        self.environment = {"LD_PRELOAD": str(library), "FALSE_TIME": str(self._file)}
        self._file.write_bytes(struct.pack("q", 0))
        self._file.chmod(0o644)

    def put(self, by: timedelta) -> None:
        """Put it forward, or back, by so much from the true time."""
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("q", int(by.total_seconds())))

    def difference_at(self, told: float) -> timedelta:
        """How far a process's time is from the one that it should be deceived with."""
        (added,) = struct.unpack("q", self._file.read_bytes())
        return timedelta(seconds=abs(told - time() - added))

    def deceive(self, server: Server) -> None:
        """Start a server anew, as it was started, but with this clock."""
        postmaster, account = server.postmaster, server.home.account
        assert postmaster is not None
        program = Path(f"/proc/{postmaster.pid}/exe").resolve().with_name("pg_ctl")
        with server.home.log.open("ab") as log:
            subprocess.run(
                [program, "restart", "-D", server.home.data, "-m", "fast", "-w", "-s"],
                env={"LC_ALL": "C", **self.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=True,
                start_new_session=True, umask=0o077,
                **({"user": account.uid, "group": account.gid, "extra_groups": []}
                   if account.is_foreign else {}),
            )  # fmt: skip


class Deceived:
    """A client in a process of its own, whose clock is wrong: see clocked.py."""

    def __init__(self, clock: FalseClock, ident: str, dsn: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.reliability.clocked", ident, dsn],
            cwd=ROOT, env={**os.environ, **clock.environment}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.answer() == "ready"

    def tell(self, *words: object) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for what came of it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def does(self, *words: object) -> Any:
        """Both."""
        self.tell(*words)
        return self.answer()

    def kill(self) -> None:
        """End it as a crash does; nothing of it stays."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def deceived(clock: FalseClock, ident: str, dsn: str) -> Iterator[Deceived]:
    """Run one."""
    client = Deceived(clock, ident, dsn)
    try:
        yield client
    finally:
        client.kill()
