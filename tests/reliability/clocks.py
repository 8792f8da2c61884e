"""Clocks that are wrong, of a server or of a client in a process of its own: see false_time.c."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import time
from typing import Any

import pytest

from project.postgres import Server
from tests.django.processes import talking

SOURCE = Path(__file__).with_name("false_time.c")


class FalseClock:
    """How wrong the clock of some processes is; it takes effect at once, in all of them."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler here, which a false clock needs: apt-get install gcc")
        folder.chmod(0o755)  # for the server's account too
        library, self._file = folder / "false_time.so", folder / "seconds"
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE], check=True)
        self.environment = {"LD_PRELOAD": str(library), "FALSE_TIME": str(self._file)}
        self._file.write_bytes(struct.pack("q", 0))
        self._file.chmod(0o644)

    def put(self, by: timedelta) -> None:
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("q", int(by.total_seconds())))

    def difference_at(self, told: float) -> timedelta:
        """How far a process's time is from the one that it should be deceived with."""
        (added,) = struct.unpack("q", self._file.read_bytes())
        return timedelta(seconds=abs(told - time() - added))

    def deceive(self, server: Server) -> None:
        """Start a server anew, as it was started, but with this clock."""
        postmaster, account = server.postmaster, server.home.account
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


@contextmanager
def false_clock() -> Iterator[FalseClock]:
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        yield FalseClock(Path(folder))


CLIENT = """
import json, sys
from datetime import timedelta
from itertools import islice
from time import monotonic, time
from psqlmessages import Node
from psqlmessages.exceptions import CallTimeout

def consumed(number):
    bodies = []
    while len(bodies) < number:
        elements = node.reserve("Q", 20, timeout=timedelta(seconds=5))
        node.commit(*elements)
        bodies += [element.body for element in elements]
    return bodies

def called_in_vain():
    began = monotonic()
    try:
        node.call("SILENT", "?", timeout=timedelta(seconds=1))
    except CallTimeout:
        return monotonic() - began

with Node(*sys.argv[1:]) as node:
    print("0", flush=True)
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)
"""


class Deceived:
    """A node in a process whose clock is wrong; it evaluates what the test asks for."""

    def __init__(self, clock: FalseClock, ident: str, dsn: str) -> None:
        code = ("-W", "error", "-c", CLIENT)
        self.process = talking(*code, ident, dsn, env=os.environ | clock.environment)
        self.answer()

    def ask(self, expression: str) -> None:
        self.process.stdin.write(f"{expression}\n")

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def value(self, expression: str) -> Any:
        self.ask(expression)
        return self.answer()


@contextmanager
def deceived(clock: FalseClock, ident: str, dsn: str) -> Iterator[Deceived]:
    client = Deceived(clock, ident, dsn)
    try:
        yield client
    finally:
        client.process.kill()
        client.process.communicate()
