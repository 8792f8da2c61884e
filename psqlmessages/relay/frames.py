"""Messages and events for WebSockets, each encoded once for all receivers."""

from __future__ import annotations

import json
import struct
from functools import cached_property
from typing import Any, Final, Protocol

# EncodedFrame: a text for WebSockets, framed once for all receivers.

# A complete text message, unmasked, as servers send it (RFC 6455, 5.2).
_TEXT: Final = 0x81


class EncodedFrame:
    """A text, its size in bytes, and its frame for a WebSocket without extensions."""

    __slots__ = ("framed", "size", "text")

    def __init__(self, text: str) -> None:
        payload = text.encode()
        self.text = text
        self.size = len(payload)
        self.framed = _head(self.size) + payload


def _head(size: int) -> bytes:
    # Above 125 bytes, 126 or 127 stands for a size in two or eight bytes.
    if size <= 125:
        return struct.pack("!BB", _TEXT, size)
    if size <= 0xFFFF:
        return struct.pack("!BBH", _TEXT, 126, size)
    return struct.pack("!BBQ", _TEXT, 127, size)


_INSIDE = ("Dkey", "Nodes")


class HubMessage:
    """One message or event.

    ``header`` has the fields of the notification, except those used only between PostgreSQL and the
    hub. ``body`` is the text as sent (``header["Enc"]`` says how to decode it), None for events.
    ``at`` is the ``time.time()`` at which the hub received it.
    """

    def __init__(self, header: dict[str, Any], body: str | None, at: float) -> None:
        self.header = {name: header[name] for name in header if name not in _INSIDE}
        self.body = body
        self.at = at

    @cached_property
    def json(self) -> str:
        """The text of the WebSocket frame: the header's fields, and ``Body`` if there is one."""
        whole = self.header if self.body is None else {**self.header, "Body": self.body}
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def packet(self) -> EncodedFrame:
        """The JSON text, encoded and framed for WebSockets."""
        return EncodedFrame(self.json)

    def __repr__(self) -> str:
        return f"HubMessage({self.header!r}, {self.body!r:.100})"


class Receiver(Protocol):
    """The owner of a node: a WebSocket or the monitor."""

    def deliver(self, frame: HubMessage) -> None:
        """Take a frame. Must return immediately and raise nothing."""
