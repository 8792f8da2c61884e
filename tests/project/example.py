"""The example project as a newcomer runs it: a copy of the tree, and a database of its own."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import psycopg
from psycopg import sql

from tests.conftest import TestedServer

ROOT = Path(__file__).parents[2]


class Example:
    """`make run` on a terminal of its own, aborted after some minutes; `shown` is the output."""

    def __init__(self, folder: Path, url: str, **given: str) -> None:
        self.folder = folder
        self.database_url = url
        self.shown = ""
        self._screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            ["make", "run", f"BIN={Path(sys.executable).parent}", "-o", ".venv/run"],
            cwd=folder, env={**os.environ, "PYTHONFAULTHANDLER": "1", "DATABASE_URL": url, **given},
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            # The terminal controls the new session.
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # noqa: PLW1509
        )  # fmt: skip
        os.close(terminal)
        self._watchdog = Timer(300, self._give_up)
        self._watchdog.start()

    def until(self, text: str) -> None:
        while text not in self.shown:
            assert self._read(), f"{text!r} was never shown:\n{self.shown}"

    def field(self, name: str) -> str:
        found = re.search(rf"^  {name} +(.*?)\r?$", self.shown, re.MULTILINE)
        assert found is not None, self.shown
        return found.group(1)

    def press_ctrl_c(self) -> int:
        os.write(self._screen, b"\x03")
        while self._read():
            pass
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.press_ctrl_c()
        self._watchdog.cancel()
        os.close(self._screen)

    def children(self) -> list[int]:
        """Return the pids of processes that run in the folder, without make's."""
        found = set()
        for entry in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):
                if entry.readlink() == self.folder:
                    found.add(int(entry.parent.name))
        return [*(found - {self.process.pid})]

    def pid_of(self, word: str) -> int:
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in self.children()}
        (pid,) = (pid for pid, line in lines.items() if word in line.split("\0"))
        return pid

    def _read(self) -> str:
        try:
            news = os.read(self._screen, 4096).decode(errors="replace")
        except OSError:  # the terminal is closed
            return ""
        self.shown += news
        return news

    def _give_up(self) -> None:
        for pid in (*self.children(), self.process.pid):
            os.kill(pid, signal.SIGABRT)


def copy_project(folder: Path) -> Path:
    for name in ("project", "psqlmessages", "static", "templates"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("manage.py", "Makefile"):
        shutil.copy(ROOT / name, folder)
    return folder


@contextmanager
def own_database(server: TestedServer, name: str, more: str = "") -> Iterator[str]:
    """Create an empty database for the test; yield its address. `more`: such as ENCODING."""
    names = {"name": sql.Identifier(name), "owner": sql.Identifier(server.server.owner)}
    make = sql.SQL("CREATE DATABASE {name} OWNER {owner} " + more).format(**names)
    drop = sql.SQL("DROP DATABASE IF EXISTS {name} WITH (FORCE)").format(**names)
    with psycopg.connect(server.superuser_url, autocommit=True) as superuser:
        superuser.execute(drop)
        superuser.execute(make)
        try:
            yield server.server.url(name)
        finally:
            superuser.execute(drop)
