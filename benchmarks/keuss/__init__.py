"""keuss, of Node.js: installed into a folder of the run, its loop as a process, a Redis for it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VERSION, LOOPS = "2.0.6", 16
LOOP = Path(__file__).with_name("loop.js")


class NotHere(Exception):
    """What keuss needs is not on this machine; the text says what."""


def program(name: str) -> str:
    """Find a program."""
    found = shutil.which(name)
    if not found:
        raise NotHere(f"there is no {name}")
    return found


def install(folder: Path) -> None:
    """Install keuss into a folder, unless it is there."""
    if (folder / "node_modules" / "keuss").is_dir():
        return
    wanted = [program("npm"), "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
    done = subprocess.run(
        [*wanted, f"keuss@{VERSION}"], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise NotHere(f"npm could not install it: {done.stderr[-300:]}")


class Loop:
    """A process that routes with keuss as often as it is asked to."""

    def __init__(self, folder: Path, backend: str, options: Mapping[str, Any]) -> None:
        settings = {"backend": backend, "options": options, "loops": LOOPS}
        self._process = subprocess.Popen(
            [program("node"), str(LOOP), json.dumps(settings)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def route(self, count: int) -> float:
        """Push so many elements, then route them: the seconds that the routing took."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the loop of keuss ended with {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextmanager
def own_redis(folder: Path) -> Iterator[int]:
    """Run a Redis that keeps nothing on disk: its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(
        [program("redis-server"), *arguments, "--dir", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        else:
            raise RuntimeError(f"redis-server ended with {process.wait()}")
        yield port
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
