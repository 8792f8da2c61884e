"""keuss, of Node.js: installed into a folder of the run, and its loop as a process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.brokers import NotHere, program

VERSION, LOOPS = "2.0.6", 16
LOOP = Path(__file__).with_name("loop.js")
SOURCE = "apt-get install nodejs npm"
INSTALL_SECONDS = 300


def install(folder: Path) -> None:
    """Install keuss into a folder, unless it is there."""
    program("node", SOURCE)
    if (folder / "node_modules" / "keuss").is_dir():
        return
    wanted = [program("npm", SOURCE), "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
    done = subprocess.run(
        [*wanted, f"keuss@{VERSION}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_SECONDS,
    )
    if done.returncode:
        raise NotHere(f"npm could not install it: {done.stderr[-300:]}")


class Loop:
    """A process that routes with keuss as often as it is asked to."""

    def __init__(self, folder: Path, backend: str, options: Mapping[str, Any]) -> None:
        settings = {"backend": backend, "options": options, "loops": LOOPS}
        self._process = subprocess.Popen(
            [program("node", SOURCE), str(LOOP), json.dumps(settings)],
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
