"""Waiting for a database that is away: with backoff, a line in the log, and a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Final, TypeVar

from psycopg import errors

from psqlmessages.client.backoff import Backoff, QuietLog
from psqlmessages.exceptions import ConnectionLost, ServerUnreachable
from psqlmessages.pipeline.errors import KeptConnectionLost

logger = logging.getLogger("psqlmessages.pipeline")

T = TypeVar("T")

# A restart, a failover or a night's maintenance; after that a supervisor is to know.
PATIENCE: Final = timedelta(minutes=10)
NO_PATIENCE: Final = timedelta(0)

# Errors that may not occur again a moment later. After the last two all is rolled back.
PASSING: Final = (ConnectionLost, errors.DeadlockDetected, errors.SerializationFailure)

_LEAST, _MOST = timedelta(seconds=0.2), timedelta(seconds=5)


class Waiting:
    """The waits of one call. After ``patience`` without a success the error is raised."""

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self._patience = patience
        self._backoff = Backoff(_LEAST, _MOST)
        self._log = QuietLog(logger)
        self._ended = threading.Event()
        self._since: float | None = None

    def call(self, attempt: Callable[[], T]) -> T:
        """Call until an attempt ends without an error of PASSING; return its result."""
        while True:
            try:
                result = attempt()
            except PASSING as error:
                self.after(error)
            else:
                self.over()
                return result

    def after(self, error: object) -> None:
        """Wait a while after a failure; raise ServerUnreachable if the patience is over."""
        if isinstance(error, KeptConnectionLost):
            # It may have been dead for long, so the database may be there: try again immediately.
            return
        now = monotonic()
        self._since = self._since or now
        text = _first_line(error)
        if now - self._since >= self._patience.total_seconds():
            raise ServerUnreachable(f"the database is away: {text}") from None
        self._log.warning("the database is away, trying again: %s", text)
        self._ended.wait(self._backoff.failed(now))

    def over(self) -> None:
        """Note a success, and log it if there was a wait."""
        if self._since is not None:
            logger.warning("the database is back after %.1f s", monotonic() - self._since)
        self._since = None
        self._backoff.succeeded()


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)
