"""Messages and events for WebSockets, each encoded once for all receivers."""

from __future__ import annotations

import json
import struct
from typing import Any, Final, Protocol

# First byte of a text message in a single frame (RFC 6455, 5.2).
_TEXT: Final = 0x81
# Fields used only between PostgreSQL and the hub.
_INTERNAL_FIELDS: Final = ("Dkey", "Nodes")


class EncodedFrame:
    """A text frame. ``data``: the frame without extensions; ``size``: bytes of the text."""

    __slots__ = ("data", "size", "text")

    def __init__(self, text: str) -> None:
        payload = text.encode()
        self.text = text
        self.size = size = len(payload)
        # A size above 125 follows in two bytes, announced by 126, or in eight, announced by 127.
        if size <= 125:
            head = struct.pack("!BB", _TEXT, size)
        elif size <= 0xFFFF:
            head = struct.pack("!BBH", _TEXT, 126, size)
        else:
            head = struct.pack("!BBQ", _TEXT, 127, size)
        self.data = head + payload


class HubMessage:
    """One message or event for receivers.

    ``header`` has the public fields of the notification. ``body`` is the text as sent
    (``header["Enc"]`` says how to decode it), None for events and for bodies that were not fetched.
    ``received_at`` is the ``time.time()`` at which the hub received it. ``frame`` has the fields of
    the header as JSON, and ``Body`` if there is one.
    """

    __slots__ = ("body", "frame", "header", "received_at")

    def __init__(self, header: dict[str, Any], body: str | None, received_at: float) -> None:
        self.header = {name: header[name] for name in header if name not in _INTERNAL_FIELDS}
        self.body = body
        self.received_at = received_at
        fields = self.header if body is None else {**self.header, "Body": body}
        self.frame = EncodedFrame(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))

    def __repr__(self) -> str:
        return f"HubMessage({self.header!r}, {self.body!r:.100})"


class Receiver(Protocol):
    """The owner of a node: a WebSocket or the monitor."""

    def deliver(self, message: HubMessage) -> None:
        """Take a message or event. Must return immediately and raise nothing."""
