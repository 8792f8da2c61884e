"""keuss, a peer for Node.js: its installation, and a process that routes with it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.brokers import PeerMissing, find_program

VERSION, LOOPS = "2.0.6", 16
SCRIPT = Path(__file__).with_name("loop.js")
SOURCE = "apt-get install nodejs npm"
INSTALL_SECONDS = 300


def install(folder: Path) -> None:
    """Install keuss into a folder, unless it is installed there."""
    find_program("node", SOURCE)
    if (folder / "node_modules" / "keuss").is_dir():
        return
    npm = find_program("npm", SOURCE)
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"keuss@{VERSION}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_SECONDS,
    )
    if done.returncode:
        raise PeerMissing(f"npm could not install keuss: {done.stderr[-300:]}")


class KeussLoop:
    """A process that routes with loops of keuss."""

    def __init__(self, folder: Path, backend: str, options: Mapping[str, Any]) -> None:
        settings = {"backend": backend, "options": options, "loops": LOOPS}
        self._process = subprocess.Popen(
            [find_program("node", SOURCE), str(SCRIPT), json.dumps(settings)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def route(self, count: int) -> float:
        """Push elements and route them; return the seconds of the routing."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of keuss ended with {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """Stop the process."""
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
