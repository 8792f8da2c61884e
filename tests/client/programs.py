"""Commands as processes of their own, as a terminal starts them."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from time import monotonic

SECONDS = 110
# Seconds within which a command must end. It would take LONG_CLOSING if something hung.
PROMPTLY = 30
LONG_CLOSING = 60.0
# Closing waits 5 s at most: with 60 s, a close that hangs differs from a slow machine.
COMMAND = f"""
import sys
from psqlmessages.client import async_queue_consumer, async_session, session
for module in (async_queue_consumer, async_session, session):
    assert module._CLOSING_SECONDS == 5
    module._CLOSING_SECONDS = {LONG_CLOSING}
from psqlmessages.cli.main import main
sys.exit(main())
"""


class Program:
    """A running command; everything it prints is read by lines, with a time limit."""

    def __init__(self, arguments: list[str], dsn: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", COMMAND, *arguments],
            env={**os.environ, "PSQLMESSAGES_DSN": dsn, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._watchdog = threading.Timer(SECONDS, self._process.kill)
        self._watchdog.start()
        self.printed = ""

    def until(self, text: str) -> str:
        for line in self._process.stdout:
            self.printed += line
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never printed:\n{self.printed}")

    def interrupt(self, signal_number: int = signal.SIGINT) -> float:
        """Press Ctrl-C, which reaches the whole group; return the seconds until the end."""
        started = monotonic()
        os.killpg(self._process.pid, signal_number)
        self.end()
        return monotonic() - started

    def end(self) -> int:
        self.printed += self._process.stdout.read()
        code = self._process.wait()
        self._watchdog.cancel()
        return code

    def close(self) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def started(*arguments: str, dsn: str) -> "closing[Program]":
    return closing(Program(list(arguments), dsn))


def finished(*words: str, dsn: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", COMMAND, *words],
        env={**os.environ, "PSQLMESSAGES_DSN": dsn}, input=typed, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
