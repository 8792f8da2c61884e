"""Outbox: what waits to be sent through one WebSocket, bounded in number and bytes."""

from __future__ import annotations

import asyncio
from collections import deque

from psqlmessages.relay.transport import Transport


class Outbox:
    """Frames on their way to one reader; one task, :meth:`run`, sends them in order.

    ``frames`` and ``size`` (in bytes) are what may wait; one frame alone may be larger.
    """

    def __init__(self, transport: Transport, *, frames: int, size: int) -> None:
        self._transport = transport
        self._most_frames = frames
        self._most_bytes = size
        self._waiting: deque[tuple[str, int]] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()

    def put(self, text: str) -> bool:
        """Let a frame wait for its turn; False where there is no room: the reader is too slow."""
        size = len(text) if text.isascii() else len(text.encode())
        if self._waiting and (
            len(self._waiting) >= self._most_frames or self._bytes + size > self._most_bytes
        ):
            return False
        self._waiting.append((text, size))
        self._bytes += size
        self._arrived.set()
        return True

    def clear(self) -> None:
        """Drop what waits."""
        self._waiting.clear()
        self._bytes = 0

    async def run(self) -> None:
        """Send what arrives, as fast as the reader takes it, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                await self._transport.writable()
                if self._waiting:
                    text, size = self._waiting.popleft()
                    self._bytes -= size
                    await self._transport.send(text)
