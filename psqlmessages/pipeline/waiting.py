"""Waiting for a database that is away: with back-off, a line in the log, and not for ever."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from time import monotonic
from typing import Final

from psqlmessages.client.backoff import Backoff, QuietLog
from psqlmessages.exceptions import ServerUnreachable

logger = logging.getLogger("psqlmessages.pipeline")

# A restart, a failover or a night's maintenance; after that a supervisor is to know.
PATIENCE: Final = timedelta(minutes=10)
NO_PATIENCE: Final = timedelta(0)

_LEAST, _MOST = timedelta(seconds=0.2), timedelta(seconds=5)


class Waiting:
    """The waits of one call. After ``patience`` without a success the error is raised."""

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self._patience = patience
        self._backoff = Backoff(_LEAST, _MOST)
        self._log = QuietLog(logger)
        self._ended = threading.Event()
        self._since: float | None = None

    def after(self, reason: object) -> None:
        """Wait a while after a failure; raises ServerUnreachable where it was long enough."""
        now = monotonic()
        self._since = self._since or now
        text = str(reason).strip().splitlines()[0] if str(reason).strip() else repr(reason)
        if now - self._since >= self._patience.total_seconds():
            raise ServerUnreachable(f"the database is away: {text}") from None
        self._log.warning("the database is away, trying again: %s", text)
        self._ended.wait(self._backoff.failed(now))

    def over(self) -> None:
        """Note a success, and say so where there was a wait."""
        if self._since is not None:
            logger.warning("the database is back after %.1f s", monotonic() - self._since)
        self._since = None
        self._backoff.succeeded()
