"""Pinging: something done again and again beside a stream, while Spark is busy with a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import psycopg

from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline.waiting import logger

_LONGEST_SECONDS: Final = 60.0


class Pinging:
    """Calls ``ping`` in a thread of its own, three times within ``seconds`` at least.

    An error of the database or of a right is logged: the stream's own next call meets it too.
    """

    def __init__(self, ping: Callable[[], None], seconds: float) -> None:
        self._ping = ping
        self._seconds = min(seconds / 3, _LONGEST_SECONDS)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, where it has not begun."""
        if self._thread is None:
            # A daemon: Spark ends its worker without a word.
            self._thread = threading.Thread(target=self._run, name="pinging", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it; a ping under way is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._ping()
            except (MessagesError, psycopg.Error) as error:
                if self._ended.is_set():
                    return
                logger.warning("a stream could not tell that it is alive: %s", error)
