"""Pacing: how much a viewer has not read yet. No I/O."""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from typing import Final

# So many frames travel at a time; a viewer that reads none of them for so long is left.
FRAMES: Final = 8
PATIENCE_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Sent:
    number: int
    at: float


class Window:
    """The frames on their way: each has a number that only who read it can echo.

    That bounds what waits for a slow viewer whatever the server between keeps in its buffers.
    """

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        # Seconds from sending the last frame that was echoed to its echo.
        self.lag: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be sent now."""
        return len(self._sent) >= FRAMES

    def number(self, now: float) -> int:
        """Draw the number of a frame that is about to be sent."""
        number = secrets.randbits(52)
        self._sent.append(_Sent(number, now))
        return number

    def echoed(self, number: int, now: float) -> None:
        """Take note that this frame was read, and those before it; an unknown number is nothing."""
        for place, sent in enumerate(self._sent):
            if sent.number == number:
                self.lag = now - sent.at
                for _ in range(place + 1):
                    self._sent.popleft()
                return

    def is_overdue(self, now: float) -> bool:
        """Whether the viewer is full, and has read nothing for too long."""
        return self.is_full and now - self._sent[0].at > PATIENCE_SECONDS
