"""Viewer: one open page, its topic and permissions, and its rate limit."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from psqlmessages.monitor.access import MonitorAccess
from psqlmessages.monitor.json_views import to_json
from psqlmessages.monitor.status import AWAY, UNCHECKED

# At most this many unread frames per viewer. A viewer that then reads none for this long is closed.
FRAMES: Final = 8
READ_TIMEOUT_SECONDS: Final = 10.0
SLOW: Final = 4408
# Withhold data after this long without a check of the permissions.
_TRUSTED_SECONDS: Final = 5.0
# Minimum interval between notices of this; slightly less than the heartbeat of the monitor.
_NOTICE_SECONDS: Final = 0.9


class Viewer:
    """One page: takes frames from the observer and passes them to the WebSocket.

    ``topic`` is the topic shown, or None for the list. ``is_behind``: the next frame must be a
    snapshot, so that the backlog of a slow page does not grow. ``is_greeted``: it was offered its
    first snapshot.
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
        # Unread frames: a random number, which only a page that read it can echo, and the time.
        # This bounds the backlog of a slow viewer, regardless of buffers in servers between.
        self._unread: deque[tuple[int, float]] = deque()
        # Seconds between sending a frame and its echo, for the last echoed frame.
        self._lag: float | None = None
        self._permitted_at = monotonic()
        self._noticed_at = 0.0

    @property
    def is_trusted(self) -> bool:
        """Whether the page's permissions were checked recently."""
        return monotonic() - self._permitted_at <= _TRUSTED_SECONDS

    def is_ready(self) -> bool:
        """Return whether it can take a frame now; close it if it has read nothing for too long."""
        if len(self._unread) < FRAMES:
            return True
        if monotonic() - self._unread[0][1] > READ_TIMEOUT_SECONDS:
            self._close(SLOW, "the page reads too slowly")
        else:
            self.is_behind = True
        return False

    def withhold(self, *, is_away: bool) -> None:
        """Send the reason for missing data once a second; ``is_away``: no PostgreSQL connection."""
        now = monotonic()
        if now - self._noticed_at >= _NOTICE_SECONDS:
            self._noticed_at = now
            self.offer("update", to_json({"state": {"is": AWAY if is_away else UNCHECKED}}))
        self.is_behind = True

    def offer(self, op: str, *parts: str) -> None:
        """Send a frame with the merged fields of these JSON objects."""
        number = secrets.randbits(52)
        self._unread.append((number, monotonic()))
        head = {"op": op, "n": number, "lag": self._lag}
        fields = (part[1:-1] for part in (to_json(head), *parts))
        self.is_behind = False
        self._send("{" + ",".join(field for field in fields if field) + "}")

    def echoed(self, number: int) -> None:
        """Record that the page has read this frame and those before; ignore an unknown number."""
        sent_at = dict(self._unread).get(number)
        if sent_at is not None:
            self._lag = monotonic() - sent_at
            while self._unread.popleft()[0] != number:
                pass

    def permitted(self, permit: MonitorAccess) -> None:
        """Record the page's permissions after a check."""
        if permit != self.permit:
            # The page shows too much or too little: send a snapshot next.
            self.permit, self.is_behind = permit, True
        self._permitted_at = monotonic()

    def end(self, code: int, reason: str) -> None:
        """Close the page's WebSocket."""
        self._close(code, reason)
