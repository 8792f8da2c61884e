"""Retries and limits: backoff, rate-limited logging, waits, token bucket, budget for lock waits."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Final

# A connection must last this long before its loss resets the backoff.
_STABLE_SECONDS: Final = 5.0


class Backoff:
    """Exponential delays with jitter, so that many nodes do not retry at the same moment.

    ``now`` is the time of a monotonic clock in seconds.
    """

    def __init__(
        self, minimum: timedelta, maximum: timedelta, *, jitter: Callable[[], float] = random.random
    ) -> None:
        self._minimum = minimum.total_seconds()
        self._maximum = maximum.total_seconds()
        self._jitter = jitter
        self._connected_at = 0.0
        self.failures = 0
        self.next_at = 0.0

    def record_failure(self, now: float) -> float:
        """Count a failed attempt; return the seconds until the next one: up to half are random."""
        # The exponent is bounded: 2.0 ** 1100 overflows after a night without a server.
        ceiling = min(self._maximum, self._minimum * 2.0 ** min(self.failures, 60))
        delay = ceiling * (0.5 + 0.5 * self._jitter())
        self.failures += 1
        self.next_at = now + delay
        return delay

    def reset(self) -> None:
        """Start again with the shortest delay."""
        self.failures = 0
        self.next_at = 0.0

    def on_connected(self, now: float) -> None:
        """Record a new connection. The delay stays until the connection has proved stable."""
        self._connected_at = now

    def on_connection_lost(self, now: float) -> None:
        """Reset the delay if the connection was stable, then count the loss as a failure."""
        if now - self._connected_at >= _STABLE_SECONDS:
            self.reset()
        # Delay even the first attempt, because a server's restart disconnects all clients.
        self.record_failure(now)


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, at most ``seconds``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def error_line(error: object) -> str:
    """Return the text of an error in one line, for logs."""
    return " ".join(str(error).split())


class RateLimitedLogger:
    """Logs each warning at most once per interval, with the number of suppressed ones."""

    def __init__(self, logger: logging.Logger, interval: timedelta = timedelta(seconds=10)) -> None:
        self._logger = logger
        self._interval = interval.total_seconds()
        # For each text and key: when it was last logged, and the number suppressed since then.
        self._history: dict[tuple[str, Hashable], tuple[float, int]] = {}

    def warning(
        self, text: str, *values: Any, key: Hashable = None, exc_info: BaseException | None = None
    ) -> None:
        """Log ``text % values``, once per interval for each pair of ``text`` and ``key``."""
        now = monotonic()
        logged_at, suppressed = self._history.get((text, key), (-self._interval, 0))
        if now - logged_at < self._interval:
            self._history[text, key] = logged_at, suppressed + 1
            return
        self._history[text, key] = now, 0
        if suppressed:
            text += " (%d more times since the last warning)"
            values += (suppressed,)
        self._logger.warning(text, *values, exc_info=exc_info)


class TokenBucket:
    """Starts with ``burst`` tokens, and adds ``rate`` tokens per second up to ``burst``."""

    def __init__(
        self, rate: float, burst: float, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self.tokens = burst
        self._refilled_at = clock()

    def refill(self) -> float:
        """Add the tokens for the time since the last call; return the number of tokens."""
        now = self._clock()
        self.tokens = min(self._burst, self.tokens + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        return self.tokens


# Lock waits: a session shared by many nodes must not wait long for locks of other sessions.

MAX_LOCK_WAIT_SECONDS: Final = 0.5
# With this lock_timeout, an attempt succeeds only if the lock is free.
MIN_LOCK_WAIT_SECONDS: Final = 0.001
# The share of time that failed waits may take.
_FAILED_WAIT_SHARE: Final = 0.1
_BURST_SECONDS: Final = 1.0
# A subject counts as locked for this time after a lock timeout.
_LOCKED_SECONDS: Final = 60.0
_MAX_LOCKED_SUBJECTS: Final = 1000


class LockWaitBudget:
    """Limits the time that a shared session spends waiting for locks.

    After a timeout on a subject (a topic or an ident), the timeout is 1 ms until an attempt
    succeeds, for a minute at most. A token bucket limits all failed waits together to a tenth of
    the time. A wait takes at most ``max_wait`` seconds, a burst of failed waits ``burst`` seconds.
    """

    def __init__(
        self,
        *,
        max_wait: float = MAX_LOCK_WAIT_SECONDS,
        burst: float = _BURST_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._max_wait = max_wait
        self._bucket = TokenBucket(_FAILED_WAIT_SHARE, burst, clock=clock)
        # The end of the locked time of each subject, oldest first. Users choose the names, so
        # their number is limited.
        self._locked_until: dict[str, float] = {}

    def timeout_seconds(self, subjects: Iterable[str] = ()) -> float:
        """Return the lock timeout, in seconds, for an attempt that locks these subjects."""
        now, seconds_left = self._clock(), self._bucket.refill()
        if any(self._locked_until.get(subject, now) > now for subject in subjects):
            return MIN_LOCK_WAIT_SECONDS
        return max(MIN_LOCK_WAIT_SECONDS, min(self._max_wait, seconds_left))

    def record_timeout(self, seconds: float, subject: str | None = None) -> None:
        """Record a lock timeout after ``seconds``; ``subject`` is the locked subject if known."""
        self._bucket.tokens = max(0.0, self._bucket.tokens - seconds)
        if subject is not None:
            self._locked_until.pop(subject, None)
            self._locked_until[subject] = self._clock() + _LOCKED_SECONDS
            if len(self._locked_until) > _MAX_LOCKED_SUBJECTS:
                del self._locked_until[next(iter(self._locked_until))]

    def record_success(self, *subjects: str) -> None:
        """Record that these subjects are not locked now."""
        for subject in subjects:
            self._locked_until.pop(subject, None)
