"""WebSocket consumer of the monitor pages, at /ws/monitor/."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Set
from typing import Any, Final
from urllib.parse import parse_qs

from psqlmessages.models.names import is_name
from psqlmessages.monitor.access import (
    ACCESS_PERMISSIONS,
    VIEW_MONITOR,
    MonitorAccess,
    access_of,
    load_access,
)
from psqlmessages.monitor.observer import get_observer
from psqlmessages.monitor.topic_list import TopicQuery, parse_query
from psqlmessages.monitor.viewer import Viewer
from psqlmessages.relay.revalidation import in_thread
from psqlmessages.relay.socket import NOT_ALLOWED, Receive, Socket

# Close codes.
MALFORMED: Final = 4400
NO_PERMISSION: Final = 4403
_MAX_REQUEST_CHARACTERS: Final = 4096
_ACCESS_TEXT: Final = f"the monitor needs a staff user with the permission {VIEW_MONITOR}"


class MonitorConsumer(Socket):
    """The WebSocket of one page. It parses requests; the observer sends the frames.

    ``?topic=NAME`` selects one topic instead of the list of topics. Requests are
    ``{"op":"watch","topic":…}``, ``{"op":"list","q":…,"sort":…,"page":…}`` for a page of the list,
    with optional fields, and ``{"op":"echo","n":…}`` after reading the frame with this number.
    """

    permissions = ACCESS_PERMISSIONS

    def __init__(self) -> None:
        self._viewer: Viewer | None = None
        self._access = MonitorAccess()
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        """Load the user's permissions, then run the WebSocket."""
        user = scope.get("user")
        if user is not None and user.is_authenticated:
            self._access = await in_thread(load_access, user)
        await super().__call__(scope, receive, send)

    def check_access(self) -> tuple[int, str] | None:
        """Return a close code and reason if the user may not view the monitor; else None."""
        if not self._access.can_view:
            return NO_PERMISSION, _ACCESS_TEXT
        return None

    def on_accepted(self) -> None:
        """Add a viewer for the topic or the page of the list in the URL."""
        text = self.scope.get("query_string", b"").decode("latin-1")
        values: dict[str, Any] = {name: each[0] for name, each in parse_qs(text).items()}
        if values.get("page", "").isdecimal():
            values["page"] = int(values["page"][:9])
        topic = values.get("topic", "")
        self._viewer = Viewer(
            topic if is_name(topic) else None, self._access, send=self.put, close=self.close
        )
        # If the page is malformed, show the first.
        self._viewer.query = parse_query(values) or TopicQuery()
        get_observer().add(self._viewer)

    async def on_frame(self, text: str) -> None:
        """Handle a request; close the WebSocket if it is malformed."""
        viewer = self._viewer
        if viewer is None:
            return
        match _parse(text):
            case {"op": "echo", "n": int(number)}:
                viewer.on_echo(number)
            case {"op": "watch", "topic": str(topic)} if is_name(topic):
                get_observer().watch(viewer, topic)
            case {"op": "list", **values} if query := parse_query(values):
                get_observer().watch_list(viewer, query)
            case _:
                self.close(MALFORMED, "malformed request")

    async def on_closed(self, *, has_crashed: bool) -> None:
        """Remove the viewer."""
        if self._viewer is not None:
            get_observer().remove(self._viewer)

    # Called by CredentialMonitor of relay/revalidation.py

    def permits(self, user: Any, granted: Set[str]) -> bool:
        """Return whether the reloaded user may still view the monitor; called in a thread."""
        self._access = access_of(user, granted)
        if self._viewer is not None and self._access.can_view:
            # In the event loop, so that no frame is built with a mix of old and new permissions.
            self._loop.call_soon_threadsafe(self._viewer.set_access, self._access)
        return self._access.can_view

    def on_access_revoked(self, reason: str) -> None:
        """Close the WebSocket: the user is logged out or deleted, or has lost the permission."""
        if self._access.can_view:
            self.close(NOT_ALLOWED, reason)
        else:
            self.close(NO_PERMISSION, _ACCESS_TEXT)


def _parse(text: str) -> Any:
    if len(text) > _MAX_REQUEST_CHARACTERS:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
