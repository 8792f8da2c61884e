"""Viewer: one open page, what it shows, and its rate limit."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from psqlmessages.monitor.access import MonitorAccess
from psqlmessages.monitor.frames import to_json
from psqlmessages.monitor.status import AWAY, UNCHECKED

# Pacing: how much a viewer has not read yet. No I/O.

# So many frames travel at a time; a viewer that reads none of them for so long is left.
FRAMES: Final = 8
PATIENCE_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Sent:
    number: int
    at: float


class AckWindow:
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


SLOW: Final = 4408
# What nobody could check for so long is not shown any more.
_TRUSTED_SECONDS: Final = 5.0
# No more often than that it is told so; a little less than the beat of the monitor.
_TOLD_SECONDS: Final = 0.9


class Viewer:
    """Between the observer, which offers frames at its own pace, and the WebSocket that sends them.

    ``topic`` is the one looked at, or None for the list. ``is_behind``: the next frame has to be a
    snapshot; so what waits for a slow page does not grow. ``is_greeted``: it was offered its first.
    """

    def __init__(
        self,
        topic: str | None,
        permit: MonitorAccess,
        *,
        send: Callable[[str], None],
        close: Callable[[int, str], None],
    ) -> None:
        self.topic = topic
        self.permit = permit
        self.is_behind = True
        self.is_greeted = False
        self._send = send
        self._close = close
        self._window = AckWindow()
        self._permitted_at = monotonic()
        self._told_at = 0.0

    @property
    def is_trusted(self) -> bool:
        """Whether it was checked of late what the page may show."""
        return monotonic() - self._permitted_at <= _TRUSTED_SECONDS

    def is_ready(self) -> bool:
        """Whether it can take a frame now; one that reads nothing for too long is closed."""
        now = monotonic()
        if self._window.is_overdue(now):
            self._close(SLOW, "the page reads too slowly")
            return False
        if self._window.is_full:
            self.is_behind = True
            return False
        return True

    def withhold(self, *, is_away: bool) -> None:
        """Tell why nothing is shown, once a second; ``is_away``: PostgreSQL cannot be reached."""
        now = monotonic()
        if now - self._told_at >= _TOLD_SECONDS:
            self._told_at = now
            self.offer("update", to_json({"state": {"is": AWAY if is_away else UNCHECKED}}))
        self.is_behind = True

    def offer(self, op: str, *parts: str) -> None:
        """Send a frame of these JSON objects, whose fields it joins."""
        head = {"op": op, "n": self._window.number(monotonic()), "lag": self._window.lag}
        fields = (part[1:-1] for part in (to_json(head), *parts))
        self.is_behind = False
        self._send("{" + ",".join(field for field in fields if field) + "}")

    def echoed(self, number: int) -> None:
        """Take note that the page has read a frame."""
        self._window.echoed(number, monotonic())

    def permitted(self, permit: MonitorAccess) -> None:
        """Take note of what the page may show, asked anew."""
        if permit != self.permit:
            # It shows what it may not any more, or not yet what it may.
            self.permit, self.is_behind = permit, True
        self._permitted_at = monotonic()

    def end(self, code: int, reason: str) -> None:
        """Close the page's WebSocket."""
        self._close(code, reason)
