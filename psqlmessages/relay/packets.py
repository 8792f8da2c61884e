"""Packets: texts on their way to WebSockets, framed once for all of them."""

from __future__ import annotations

import struct
from typing import Final

# A whole message of text, unmasked, as servers send it (RFC 6455, 5.2).
_TEXT: Final = 0x81
_SHORT: Final = 125
_TWO_BYTES, _EIGHT_BYTES = 126, 127


class Packet:
    """A text, its size in bytes, and what stands for it on a WebSocket without extensions."""

    __slots__ = ("framed", "size", "text")

    def __init__(self, text: str) -> None:
        payload = text.encode()
        self.text = text
        self.size = len(payload)
        self.framed = _head(self.size) + payload


def _head(size: int) -> bytes:
    if size <= _SHORT:
        return struct.pack("!BB", _TEXT, size)
    if size <= 0xFFFF:
        return struct.pack("!BBH", _TEXT, _TWO_BYTES, size)
    return struct.pack("!BBQ", _TEXT, _EIGHT_BYTES, size)
