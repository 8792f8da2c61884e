"""Clocks that are wrong, of a server or of a client in a process of its own: see false_time.c."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest

from project.postgres import Server
from psqlmessages import Node
from psqlmessages.exceptions import CallTimeout
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


class Client:
    """A node whose clock is wrong, in a process of its own: what the test asks for, by name."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._events: list[str] = []
        self._came = threading.Condition()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        for message in self._node.messages():
            with self._came:
                self._events.append(f"{message.event} {message.ident}")
                self._came.notify_all()

    def clock(self) -> float:
        return time()

    def event(self, event: str) -> int:
        """Wait for an event; how often it came."""
        with self._came:
            assert self._came.wait_for(lambda: event in self._events, 60), self._events
            return self._events.count(event)

    def read(self, number: int) -> list[Any]:
        """Read so many messages of the stream; their bodies in the order in which they came."""
        return [message.body for message in islice(self._node.subscribe("NEWS"), number)]

    def publish(self, number: int) -> int:
        self._node.publish_many("NEWS", range(number))
        return number

    def consume(self, number: int) -> list[Any]:
        """Take so many elements by leases, and commit them."""
        bodies: list[Any] = []
        while len(bodies) < number:
            elements = self._node.reserve("Q", 20, timeout=timedelta(seconds=5))
            self._node.commit(*elements)
            bodies += [element.body for element in elements]
        return bodies

    def call(self, number: int) -> int:
        """Ask so many questions; how many answers came."""
        return sum(self._node.call("CALLEE", each) == [each] for each in range(number))

    def call_in_vain(self) -> float:
        """Ask a node that does not answer; for how many seconds."""
        began = monotonic()
        with pytest.raises(CallTimeout):
            self._node.call("SILENT", "?", timeout=timedelta(seconds=1))
        return monotonic() - began


class Deceived:
    """The process of such a client, from the test's side."""

    def __init__(self, clock: FalseClock, ident: str, dsn: str) -> None:
        module = ("-W", "error", "-m", "tests.reliability.clocks")
        self.process = talking(*module, ident, dsn, env=os.environ | clock.environment)
        assert self.answer() == "ready"

    def tell(self, *words: object) -> None:
        print(json.dumps(words), file=self.process.stdin)

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def does(self, *words: object) -> Any:
        self.tell(*words)
        return self.answer()


@contextmanager
def deceived(clock: FalseClock, ident: str, dsn: str) -> Iterator[Deceived]:
    client = Deceived(clock, ident, dsn)
    try:
        yield client
    finally:
        client.process.kill()
        client.process.communicate()


def main(ident: str, dsn: str) -> None:
    with Node(ident, dsn) as node:
        client = Client(node)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(getattr(client, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
