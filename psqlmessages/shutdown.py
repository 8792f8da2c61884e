"""Shutdown: the first SIGINT or SIGTERM stops the work, the second ends the process."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_STDERR: Final = 2


@contextmanager
def stop_on_signals(
    stop: Callable[[], object], work: str, seconds: float | None = None
) -> Iterator[None]:
    """Call ``stop`` at the first SIGINT or SIGTERM, and print what ends first; exit at the second.

    ``work`` names what ends first, such as "batch". ``seconds`` after the first signal, the
    process ends even if threads still run: see :func:`exit_after`. Use this function in the main
    thread only.
    """
    is_stopping = False

    def stop_or_end(number: int, _: object) -> None:
        nonlocal is_stopping
        if is_stopping:
            os._exit(128 + number)
        is_stopping = True
        if seconds is not None:
            exit_after(seconds)
        stop()
        # Not `print`, because the signal may have interrupted a call of `print`.
        text = f"Stopping after the current {work}. Press Ctrl-C again to stop now.\n"
        os.write(sys.stderr.fileno(), text.encode())

    with signal_handler(stop_or_end, *_SIGNALS):
        yield


@contextmanager
def signal_handler(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: int
) -> Iterator[None]:
    """Handle these signals in the block. Use this function in the main thread only."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            # None: the earlier handler is not Python's, so Python cannot set it again.
            signal.signal(number, earlier or signal.SIG_DFL)


def exit_after(seconds: float) -> None:
    """End the process with exit code 1 after this time, unless all threads have ended before.

    Before it ends, the process prints the stack of each thread. PostgreSQL rolls back its open
    transactions. Without this function, Python may hang at exit, since it waits for all threads.
    """
    # The timer thread does not need the interpreter, so a signal handler can start it safely.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    # Cancel when all threads have ended: the rest of Python's exit may take seconds.
    atexit.register(faulthandler.cancel_dump_traceback_later)
