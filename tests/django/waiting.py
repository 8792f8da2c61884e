"""Waiting for a condition, and for an answer."""

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from tests.sql.conftest import Program


def answer_to(asker: Program) -> dict[str, Any]:
    while True:
        (header,) = asker.headers(1)
        if header["Type"] == "Return":
            return header


def wait_until(condition: Callable[[], object], seconds: float = 60) -> object:
    deadline, pause = monotonic() + seconds, threading.Event()
    while not (found := condition()):
        assert monotonic() < deadline, "the condition never became true"
        pause.wait(0.01)
    return found
