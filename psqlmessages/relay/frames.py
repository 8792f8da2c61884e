"""Frames: messages and events on their way to receivers, each made once for all of them."""

from __future__ import annotations

import json
from typing import Any, Protocol

from psqlmessages.relay.packets import Packet

_INSIDE = ("Dkey", "Nodes")


class Frame:
    """One message or event.

    ``header`` holds the fields of the notification, without those that are between PostgreSQL and
    the hub; ``body`` is the text as it travelled (``header["Enc"]`` says how to read it), and None
    for events; ``at`` is the time.time() at which the hub got it.
    """

    __slots__ = ("_json", "_packet", "at", "body", "header")

    def __init__(self, header: dict[str, Any], body: str | None, at: float) -> None:
        self.header = {name: header[name] for name in header if name not in _INSIDE}
        self.body = body
        self.at = at
        self._json: str | None = None
        self._packet: Packet | None = None

    @property
    def json(self) -> str:
        """The whole as a WebSocket frame: the header's fields, and ``Body`` where there is one."""
        if self._json is None:
            whole = self.header if self.body is None else {**self.header, "Body": self.body}
            self._json = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
        return self._json

    @property
    def packet(self) -> Packet:
        """The same on its way to WebSockets."""
        if self._packet is None:
            self._packet = Packet(self.json)
        return self._packet

    def __repr__(self) -> str:
        return f"Frame({self.header!r}, {self.body!r:.100})"


class Receiver(Protocol):
    """Whoever stands behind a node: a WebSocket, the monitor."""

    def deliver(self, frame: Frame) -> None:
        """Take a frame; returns at once and raises nothing."""
