"""Retries and limits: backoff, rate-limited logging, token bucket, budget for lock waits."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from datetime import timedelta
from time import monotonic
from typing import Any, Final


class Backoff:
    """Exponential delays with jitter, so that many nodes do not return at the same moment."""

    def __init__(
        self, least: timedelta, most: timedelta, *, chance: Callable[[], float] = random.random
    ) -> None:
        self._least = least.total_seconds()
        self._most = most.total_seconds()
        self._chance = chance
        self.attempts = 0
        self.next_at = 0.0

    def failed(self, now: float) -> float:
        """Count a failed attempt; return the seconds until the next: half fixed, half random."""
        # The exponent is bounded: 2.0 ** 1100 overflows after a night without a server.
        ceiling = min(self._most, self._least * 2.0 ** min(self.attempts, 60))
        delay = ceiling * (0.5 + 0.5 * self._chance())
        self.attempts += 1
        self.next_at = now + delay
        return delay

    def succeeded(self) -> None:
        """Reset the delay."""
        self.attempts = 0
        self.next_at = 0.0


def error_line(error: object) -> str:
    """Return the text of an error in one line, for logs."""
    return " ".join(str(error).split())


class RateLimitedLogger:
    """Logs each warning at most once per interval, then with the number of suppressed ones."""

    def __init__(
        self,
        logger: logging.Logger,
        interval: timedelta = timedelta(seconds=10),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._logger = logger
        self._interval = interval.total_seconds()
        self._clock = clock
        # By text: when it was last logged, and how often it was suppressed since.
        self._logged: dict[str, tuple[float, int]] = {}

    def warning(self, text: str, *values: Any, exc_info: BaseException | None = None) -> None:
        """Log ``text % values`` as a warning; warnings with the same ``text`` count as the same."""
        now = self._clock()
        logged_at, suppressed = self._logged.get(text, (-self._interval, 0))
        if now - logged_at < self._interval:
            self._logged[text] = logged_at, suppressed + 1
            return
        self._logged[text] = now, 0
        if suppressed:
            text += " (and %d more times since)"
            values += (suppressed,)
        self._logger.warning(text, *values, exc_info=exc_info)


class TokenBucket:
    """Tokens that return at ``rate`` per second, up to ``burst``, which is what it starts with."""

    def __init__(
        self, rate: float, burst: float, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self.tokens = burst
        self._at = clock()

    def refill(self) -> float:
        """Add the tokens that have returned since the last call; return how many there are."""
        now = self._clock()
        self.tokens = min(self._burst, self.tokens + (now - self._at) * self._rate)
        self._at = now
        return self.tokens


# Lock waits: a session shared by many nodes must not wait long for locks of other sessions.

MOST_SECONDS: Final = 0.5
# A lock_timeout that only succeeds if the lock is free.
LEAST_SECONDS: Final = 0.001
# The share of time that failed waits may take, and the most in one burst.
_SHARE: Final = 0.1
_BURST_SECONDS: Final = 1.0
_REMEMBERED_SECONDS: Final = 60.0
_REMEMBERED: Final = 1000


class LockWaitBudget:
    """Limits the time that a shared session spends waiting for locks.

    After one timeout on a subject, such as a topic or an ident, later attempts use 1 ms until one
    succeeds. A token bucket limits all failed waits together to a tenth of the time. A single wait
    takes at most ``most`` seconds, a burst of waits ``burst``.
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
        self._bucket = TokenBucket(_SHARE, burst, clock=clock)
        # Locked subjects, each until when, oldest first. Limited, since users choose the names.
        self._held: dict[str, float] = {}

    def seconds(self, subjects: Iterable[str] = ()) -> float:
        """Return the lock timeout, in seconds, of an attempt that concerns these subjects."""
        now, left = self._clock(), self._bucket.refill()
        if any(self._held.get(subject, now) > now for subject in subjects):
            return LEAST_SECONDS
        return max(LEAST_SECONDS, min(self._most, left))

    def waited(self, seconds: float, subject: str | None = None) -> None:
        """Record a lock timeout; ``subject`` is the locked one if there was only one."""
        self._bucket.tokens = max(0.0, self._bucket.tokens - seconds)
        if subject is not None:
            self._held.pop(subject, None)
            self._held[subject] = self._clock() + _REMEMBERED_SECONDS
            if len(self._held) > _REMEMBERED:
                del self._held[next(iter(self._held))]

    def found_free(self, *subjects: str) -> None:
        """Record a successful attempt."""
        for subject in subjects:
            self._held.pop(subject, None)
