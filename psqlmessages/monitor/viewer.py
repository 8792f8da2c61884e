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
from psqlmessages.relay.revalidation import MAX_UNCHECKED_SECONDS
from psqlmessages.relay.socket import TOO_SLOW

# At most this many unread frames per viewer. A viewer that then reads none for this long is closed.
MAX_UNREAD_FRAMES: Final = 8
READ_TIMEOUT_SECONDS: Final = 10.0
# Interval of frames with only the status; slightly less than the heartbeat of the monitor.
_STATUS_INTERVAL_SECONDS: Final = 0.9


class Viewer:
    """One page: takes frames from the observer and passes them to the WebSocket.

    ``topic`` is the topic of the page, None for the list. ``is_behind``: the next frame must be a
    snapshot, so that the backlog of a slow page does not grow. ``has_snapshot``: the first snapshot
    was due. ``close`` closes the WebSocket.
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
        self.access = access
        self.is_behind = True
        self.has_snapshot = False
        self._send = send
        self.close = close
        # Each unread frame: a random number, which only a page that has read it can echo, and when
        # it was sent. This limits the backlog, whatever proxies between us and the page buffer.
        self._unread: deque[tuple[int, float]] = deque()
        # Seconds between sending a frame and its echo, for the last echoed frame.
        self._lag: float | None = None
        self._checked_at = monotonic()
        self._status_sent_at = 0.0

    @property
    def is_checked(self) -> bool:
        """Whether the page's permissions were checked recently."""
        return monotonic() - self._checked_at <= MAX_UNCHECKED_SECONDS

    def is_ready(self) -> bool:
        """Return whether a frame can be sent now; close a page that reads nothing for too long."""
        if len(self._unread) < MAX_UNREAD_FRAMES:
            return True
        if monotonic() - self._unread[0][1] > READ_TIMEOUT_SECONDS:
            self.close(TOO_SLOW, "the page reads too slowly")
        else:
            self.is_behind = True
        return False

    def send_status_only(self, *, is_unreachable: bool) -> None:
        """Send only the reason why there is no data, once a second.

        It is that PostgreSQL is unreachable, or that the user could not be checked.
        """
        now = monotonic()
        if now - self._status_sent_at >= _STATUS_INTERVAL_SECONDS:
            self._status_sent_at = now
            state = AWAY if is_unreachable else UNCHECKED
            self.send_frame("update", to_json({"state": {"is": state}}))
        self.is_behind = True

    def send_frame(self, op: str, *parts: str) -> None:
        """Send a frame with the merged fields of these JSON objects."""
        number = secrets.randbits(52)
        self._unread.append((number, monotonic()))
        head = {"op": op, "n": number, "lag": self._lag}
        fields = (part[1:-1] for part in (to_json(head), *parts))
        self.is_behind = False
        self._send("{" + ",".join(field for field in fields if field) + "}")

    def on_echo(self, number: int) -> None:
        """Record that the page has read this frame and those before; ignore an unknown number."""
        sent_at = dict(self._unread).get(number)
        if sent_at is not None:
            self._lag = monotonic() - sent_at
            while self._unread.popleft()[0] != number:
                pass

    def set_access(self, access: MonitorAccess) -> None:
        """Record the page's permissions after a check."""
        if access != self.access:
            # The page shows too much or too little.
            self.access, self.is_behind = access, True
        self._checked_at = monotonic()
