"""Shutdown: the first SIGINT or SIGTERM stops, the second ends the process."""

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
    """Call ``stop`` at the first SIGINT or SIGTERM and print ``text``; exit at the second.

    After ``seconds`` the process ends even if threads still run: see :func:`end_within`. Works in
    the main thread only.
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
        # Not `print`, which the signal may have interrupted.
        os.write(sys.stderr.fileno(), f"{text}\n".encode())

    previous = {number: signal.signal(number, stop_or_end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_within(seconds: float) -> None:
    """End the process with exit code 1 after this time, unless it has ended before.

    Prints the stack of each thread. Python itself may hang at exit, since it waits for all threads.
    PostgreSQL rolls back open transactions.
    """
    # The timer thread does not need the interpreter. Callable from signal handlers.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
