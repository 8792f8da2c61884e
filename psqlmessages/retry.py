"""Retries: backoff, rate-limited logging, budget for lock waits."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, Final


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


class RateLimitedLogger:
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


# Patience: how long one session waits for locks that others hold, as many stand behind it.

MOST_SECONDS: Final = 0.5
# A look: no lock that is free makes anybody wait.
LEAST_SECONDS: Final = 0.001
# What waits that were in vain may take of the time, and at once.
_SHARE: Final = 0.1
_BURST_SECONDS: Final = 1.0
_REMEMBERED_SECONDS: Final = 60.0
_REMEMBERED: Final = 1000


class LockWaitBudget:
    """A bucket of seconds, and what was found held; a subject is whatever one is likely to meet.

    What is held costs one wait: until it is found free, further attempts are looks. However many
    subjects are held, all waits together take a tenth of the time. One wait has ``most`` seconds,
    those at once have ``burst``.
    """

    def __init__(
        self,
        *,
        most: float = MOST_SECONDS,
        burst: float = _BURST_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._most = most
        self._burst = self._left = burst
        self._at = clock()
        # Until when, in this order. Names come from users, so they are not kept without limit.
        self._held: dict[str, float] = {}

    def seconds(self, subjects: Iterable[str] = ()) -> float:
        """Tell how long an attempt may wait that concerns these subjects."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * _SHARE)
        self._at = now
        if any(self._held.get(subject, now) > now for subject in subjects):
            return LEAST_SECONDS
        return max(LEAST_SECONDS, min(self._most, self._left))

    def waited(self, seconds: float, subject: str | None = None) -> None:
        """Note a wait in vain, and for which subject, where there was but one."""
        self._left = max(0.0, self._left - seconds)
        if subject is not None:
            self._held.pop(subject, None)
            self._held[subject] = self._clock() + _REMEMBERED_SECONDS
            if len(self._held) > _REMEMBERED:
                del self._held[next(iter(self._held))]

    def found_free(self, *subjects: str) -> None:
        """Note an attempt that came to its end."""
        for subject in subjects:
            self._held.pop(subject, None)
