"""Viewer: one open page, its topic and permissions, and the frames that it has not read."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from psqlmessages.monitor.access import MonitorAccess
from psqlmessages.monitor.json_views import to_json
from psqlmessages.monitor.status import UNCHECKED, UNREACHABLE
from psqlmessages.monitor.topic_list import TopicQuery
from psqlmessages.relay.revalidation import MAX_UNCHECKED_SECONDS
from psqlmessages.relay.socket import TOO_SLOW

# A page with this number of unread frames gets no more frames. The WebSocket is closed if the
# oldest frame stays unread for READ_TIMEOUT_SECONDS.
MAX_UNREAD_FRAMES: Final = 8
READ_TIMEOUT_SECONDS: Final = 10.0
# Minimum interval of frames with only the status, just below _HEARTBEAT_SECONDS of broadcast.py.
_STATUS_INTERVAL_SECONDS: Final = 0.9


class Viewer:
    """Sends frames to one page, and skips frames while the page reads too slowly.

    ``topic`` is None if the page shows the list of topics; ``query`` then selects a part of it.
    ``is_behind``: the next frame must be a snapshot. ``has_started``: the broadcast has called its
    ``send_snapshot`` for this viewer. ``send`` and ``close`` are methods of the WebSocket.
    """

    def __init__(
        self,
        topic: str | None,
        access: MonitorAccess,
        *,
        send: Callable[[str], None],
        close: Callable[[int, str], None],
    ) -> None:
        self.topic = topic
        self.query = TopicQuery()
        self.access = access
        self.is_behind = True
        self.has_started = False
        self._send = send
        self.close = close
        # Random number and time of each unread frame. After reading a frame, the page echoes the
        # number, so the limit also holds if a proxy buffers frames.
        self._unread: deque[tuple[int, float]] = deque()
        # Seconds between sending the last echoed frame and receiving its echo.
        self._lag: float | None = None
        self._checked_at = monotonic()
        self._status_sent_at = 0.0

    @property
    def is_checked(self) -> bool:
        """Whether the user was checked within the last ``MAX_UNCHECKED_SECONDS``."""
        return monotonic() - self._checked_at <= MAX_UNCHECKED_SECONDS

    def check_ready(self) -> bool:
        """Return whether a frame can be sent now; close a page whose oldest frame waits too long.

        After a False, the next frame must be a snapshot.
        """
        if len(self._unread) < MAX_UNREAD_FRAMES:
            return True
        if monotonic() - self._unread[0][1] > READ_TIMEOUT_SECONDS:
            self.close(TOO_SLOW, "the page reads too slowly")
        else:
            self.is_behind = True
        return False

    def send_status_only(self, *, is_unreachable: bool) -> None:
        """Send a frame without data, about once a second.

        It says that PostgreSQL is unreachable, or otherwise that the user could not be checked.
        """
        now = monotonic()
        if now - self._status_sent_at >= _STATUS_INTERVAL_SECONDS:
            self._status_sent_at = now
            state = UNREACHABLE if is_unreachable else UNCHECKED
            self.send_frame("update", to_json({"state": {"is": state}}))
        self.is_behind = True

    def send_frame(self, op: str, *parts: str) -> None:
        """Send a frame with the fields of these JSON objects."""
        number = secrets.randbits(52)
        self._unread.append((number, monotonic()))
        head = {"op": op, "n": number, "lag": self._lag}
        fields = (part[1:-1] for part in (to_json(head), *parts))
        self.is_behind = False
        self._send("{" + ",".join(field for field in fields if field) + "}")

    def on_echo(self, number: int) -> None:
        """Record that the page has read this frame and all before it; ignore an unknown number."""
        sent_at = dict(self._unread).get(number)
        if sent_at is not None:
            self._lag = monotonic() - sent_at
            while self._unread.popleft()[0] != number:
                pass

    def set_access(self, access: MonitorAccess) -> None:
        """Record the page's permissions after a check."""
        if access != self.access:
            # The page shows data for the old permissions.
            self.access, self.is_behind = access, True
        self._checked_at = monotonic()
