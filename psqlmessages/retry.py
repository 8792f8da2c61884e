"""Retries and limits: backoff, rate-limited logging, token bucket, budget for lock waits."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from time import monotonic
from typing import Any, Final


class Backoff:
    """Exponential delays with jitter, so that many nodes do not return at the same moment."""

    def __init__(
        self, minimum: timedelta, maximum: timedelta, *, chance: Callable[[], float] = random.random
    ) -> None:
        self._minimum = minimum.total_seconds()
        self._maximum = maximum.total_seconds()
        self._chance = chance
        self.attempts = 0
        self.next_at = 0.0

    def failed(self, now: float) -> float:
        """Count a failed attempt; return the seconds until the next: half fixed, half random."""
        # The exponent is bounded: 2.0 ** 1100 overflows after a night without a server.
        ceiling = min(self._maximum, self._minimum * 2.0 ** min(self.attempts, 60))
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
        # When each text was last logged for each key, and how often it was suppressed since.
        self._by_text: dict[tuple[str, Hashable], tuple[float, int]] = {}

    def warning(
        self, text: str, *values: Any, key: Hashable = None, exc_info: BaseException | None = None
    ) -> None:
        """Log ``text % values``; warnings with the same ``text`` and ``key`` count as the same."""
        now = self._clock()
        logged_at, suppressed = self._by_text.get((text, key), (-self._interval, 0))
        if now - logged_at < self._interval:
            self._by_text[text, key] = logged_at, suppressed + 1
            return
        self._by_text[text, key] = now, 0
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
        self._refilled_at = clock()

    def refill(self) -> float:
        """Add the tokens that have returned since the last call; return how many there are."""
        now = self._clock()
        self.tokens = min(self._burst, self.tokens + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        return self.tokens


# Lock waits: a session shared by many nodes must not wait long for locks of other sessions.

MAX_WAIT_SECONDS: Final = 0.5
# A lock_timeout that only succeeds if the lock is free.
MIN_WAIT_SECONDS: Final = 0.001
# The share of time that failed waits may take, and the seconds that one burst may take.
_SHARE: Final = 0.1
_BURST_SECONDS: Final = 1.0
_LOCKED_SECONDS: Final = 60.0
_MAX_SUBJECTS: Final = 1000


class LockWaitBudget:
    """Limits the time that a shared session spends waiting for locks.

    After one timeout on a subject, such as a topic or an ident, later attempts use 1 ms until one
    succeeds. A token bucket limits all failed waits together to a tenth of the time. A single wait
    takes at most ``max_wait`` seconds, a burst of waits ``burst``.
    """

    def __init__(
        self,
        *,
        max_wait: float = MAX_WAIT_SECONDS,
        burst: float = _BURST_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._max_wait = max_wait
        self._bucket = TokenBucket(_SHARE, burst, clock=clock)
        # By subject, oldest first. Limited, since users choose the names.
        self._locked_until: dict[str, float] = {}

    def seconds(self, subjects: Iterable[str] = ()) -> float:
        """Return the lock timeout, in seconds, of an attempt that concerns these subjects."""
        now, left = self._clock(), self._bucket.refill()
        if any(self._locked_until.get(subject, now) > now for subject in subjects):
            return MIN_WAIT_SECONDS
        return max(MIN_WAIT_SECONDS, min(self._max_wait, left))

    def record_timeout(self, seconds: float, subject: str | None = None) -> None:
        """Record a lock timeout; ``subject`` is the locked one if there was only one."""
        self._bucket.tokens = max(0.0, self._bucket.tokens - seconds)
        if subject is not None:
            self._locked_until.pop(subject, None)
            self._locked_until[subject] = self._clock() + _LOCKED_SECONDS
            if len(self._locked_until) > _MAX_SUBJECTS:
                del self._locked_until[next(iter(self._locked_until))]

    def record_success(self, *subjects: str) -> None:
        """Record a successful attempt."""
        for subject in subjects:
            self._locked_until.pop(subject, None)
