"""False clocks: libfaketime, preloaded, reads from a file how wrong the time is."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
ROOT = Path(__file__).parents[2]


# Of libfaketime's units.
UNITS = {"y": 365 * 86_400, "h": 3_600, "s": 1}
SOON_SECONDS = 60


def seconds(difference: str) -> int:
    """How many seconds a difference is, as in ``-1h``."""
    return int(difference[:-1]) * UNITS[difference[-1]]


class Clock:
    """How wrong the clock of some processes is, within a second of being set."""

    def __init__(self, folder: Path) -> None:
        if not LIBRARIES:
            pytest.skip("no libfaketime here: apt-get install libfaketime")
        # For the server's account too.
        folder.chmod(0o755)
        self._path = folder / "clock"
        self.set("+0s")

    def set(self, difference: str) -> None:
        """Say by how much, as libfaketime does: ``+20y``, ``-1h``."""
        draft = self._path.with_suffix(".new")
        draft.write_text(difference)
        draft.chmod(0o644)
        draft.rename(self._path)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be deceived; how long things take stays true."""
        return {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            # Read anew each second: at each look a program would be a thousand times slower.
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }


@contextmanager
def false_clock() -> Iterator[Clock]:
    """A clock of its own, right at first."""
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        yield Clock(Path(folder))


class Deceived:
    """A client in a process of its own, whose clock is wrong."""

    def __init__(self, clock: Clock, ident: str, dsn: str) -> None:
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

    def sees(self, difference: str) -> bool:
        """Ask until its clock is so wrong, as it soon is once that is set."""
        end = monotonic() + SOON_SECONDS
        while monotonic() < end:
            if abs(self.does("clock") - time() - seconds(difference)) < SOON_SECONDS:
                return True
        return False

    def kill(self) -> None:
        """End it as a crash does; nothing of it stays."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def deceived(clock: Clock, ident: str, dsn: str) -> Iterator[Deceived]:
    """Run one."""
    client = Deceived(clock, ident, dsn)
    try:
        yield client
    finally:
        client.kill()
