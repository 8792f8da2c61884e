"""Messages and events for WebSockets, each encoded once for all receivers."""

from __future__ import annotations

import json
import struct
from functools import cached_property
from typing import Any, Final, Protocol

# A complete text message, unmasked, as servers send it (RFC 6455, 5.2).
_TEXT: Final = 0x81


class EncodedFrame:
    """A text frame; ``data``: its bytes on a WebSocket without extensions."""

    __slots__ = ("data", "size", "text")

    def __init__(self, text: str) -> None:
        payload = text.encode()
        self.text = text
        self.size = len(payload)
        self.data = _head(self.size) + payload


def _head(size: int) -> bytes:
    # A size above 125 follows in two bytes, announced by 126, or in eight bytes, announced by 127.
    if size <= 125:
        return struct.pack("!BB", _TEXT, size)
    if size <= 0xFFFF:
        return struct.pack("!BBH", _TEXT, 126, size)
    return struct.pack("!BBQ", _TEXT, 127, size)


# Fields used only between PostgreSQL and the hub.
_INTERNAL_FIELDS: Final = ("Dkey", "Nodes")


class HubMessage:
    """One message or event for receivers.

    ``header`` has the public fields of the notification. ``body`` is the text as sent
    (``header["Enc"]`` says how to decode it), None for events and for bodies that were not fetched.
    ``received_at`` is the ``time.time()`` at which the hub received it.
    """

    def __init__(self, header: dict[str, Any], body: str | None, received_at: float) -> None:
        self.header = {name: header[name] for name in header if name not in _INTERNAL_FIELDS}
        self.body = body
        self.received_at = received_at

    @cached_property
    def json(self) -> str:
        """The text of the WebSocket frame: the header's fields, and ``Body`` if there is one."""
        fields = self.header if self.body is None else {**self.header, "Body": self.body}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def frame(self) -> EncodedFrame:
        """The JSON text as a WebSocket frame."""
        return EncodedFrame(self.json)

    def __repr__(self) -> str:
        return f"HubMessage({self.header!r}, {self.body!r:.100})"


class Receiver(Protocol):
    """The owner of a node: a WebSocket or the monitor."""

    def deliver(self, message: HubMessage) -> None:
        """Take a message or event. Must return immediately and raise nothing."""
