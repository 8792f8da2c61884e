"""Backoff: when to try again, and log lines at a bounded rate."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any


class Backoff:
    """Exponential delays with jitter, so that many nodes do not return at the same moment."""

    def __init__(
        self,
        least: timedelta,
        most: timedelta,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._least = least.total_seconds()
        self._most = most.total_seconds()
        self._chance = chance
        self.attempts = 0
        self.next_at = 0.0

    def failed(self, now: float) -> float:
        """Count a failed attempt; return the seconds until the next: half fixed, half by chance."""
        # The exponent is bounded: 2.0 ** 1100 overflows after a night without a server.
        ceiling = min(self._most, self._least * 2.0 ** min(self.attempts, 60))
        delay = ceiling * (0.5 + 0.5 * self._chance())
        self.attempts += 1
        self.next_at = now + delay
        return delay

    def succeeded(self) -> None:
        """Start over."""
        self.attempts = 0
        self.next_at = 0.0


@dataclass(slots=True)
class _Said:
    at: float
    suppressed: int = 0


class QuietLog:
    """A logger that says the same thing at most once in a while, then with how often it was so."""

    def __init__(
        self,
        logger: logging.Logger,
        interval: timedelta = timedelta(seconds=10),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._logger = logger
        self._interval = interval.total_seconds()
        self._clock = clock
        self._said: dict[str, _Said] = {}

    def warning(self, text: str, *values: Any, exc_info: BaseException | None = None) -> None:
        """Log ``text % values`` as a warning; ``text`` tells whether it is the same thing."""
        now = self._clock()
        said = self._said.get(text)
        if said is not None and now - said.at < self._interval:
            said.suppressed += 1
            return
        self._said[text] = _Said(now)
        if said is not None and said.suppressed:
            text += " (and %d times more since)"
            values += (said.suppressed,)
        self._logger.warning(text, *values, exc_info=exc_info)
