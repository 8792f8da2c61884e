"""What tests wait for."""

import threading
from collections.abc import Callable

from tests.sql.conftest import Program


def answer_to(asker: Program) -> dict[str, object]:
    """The answer that the asker waits for, among the events that come besides."""
    while True:
        (header,) = asker.headers(1)
        if header["Type"] == "Return":
            return header


def wait_until(condition: Callable[[], object]) -> None:
    """Wait, a minute at most, until something is so."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never was so")
