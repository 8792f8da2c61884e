"""What tests wait for."""

import threading
from collections.abc import Callable
from time import monotonic

from tests.sql.conftest import Program


def answer_to(asker: Program) -> dict[str, object]:
    """The answer that the asker waits for, among the events that come besides."""
    while True:
        (header,) = asker.headers(1)
        if header["Type"] == "Return":
            return header


def wait_until(condition: Callable[[], object]) -> object:
    """Wait, a minute at least, until something is so; return what the condition does."""
    deadline, pause = monotonic() + 60, threading.Event()
    while not (found := condition()):
        assert monotonic() < deadline, "it never was so"
        pause.wait(0.01)
    return found
