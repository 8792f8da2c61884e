"""Stopping: what SIGINT and SIGTERM do to a process that works until it is told to end."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_STDERR: Final = 2


@contextmanager
def stopped_by_signals(
    stop: Callable[[], object], text: str, seconds: float | None = None
) -> Iterator[None]:
    """Call ``stop`` at the first SIGINT or SIGTERM, and print a text; a second one ends at once.

    After so many seconds the process ends, whatever its threads wait for: see
    :func:`end_within`. Must be entered in the main thread.
    """
    is_stopping = False

    def stop_or_end(number: int, _: object) -> None:
        nonlocal is_stopping
        if is_stopping:
            os._exit(128 + number)
        is_stopping = True
        if seconds is not None:
            end_within(seconds)
        stop()
        # Not print: the signal may have come amid another print.
        os.write(sys.stderr.fileno(), f"{text}\n".encode())

    previous = {number: signal.signal(number, stop_or_end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_within(seconds: float) -> None:
    """End the process after so many seconds, with exit code 1, unless it has ended before.

    It prints what each thread was doing. Python itself may hang while it ends: it waits for all
    threads. What the process has not committed is rolled back by PostgreSQL.
    """
    # By a thread that needs nothing of Python's; callable from signal handlers.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
