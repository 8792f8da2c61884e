"""Patience: how long one session waits for locks that others hold, as many stand behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

MOST_SECONDS: Final = 0.5
# A look: no lock that is free makes anybody wait.
LEAST_SECONDS: Final = 0.001
# What waits that were in vain may take of the time, and at once.
_SHARE: Final = 0.1
_BURST_SECONDS: Final = 1.0
_REMEMBERED_SECONDS: Final = 60.0
_REMEMBERED: Final = 1000


class Patience:
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
