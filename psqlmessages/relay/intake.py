"""Intake: what came in through one WebSocket and was not worked yet, bounded by rate and size."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from psqlmessages.relay.transport import Transport

# So many seconds' worth of frames may come at once: a page that opens asks for much.
BURST_SECONDS: Final = 4
# Reading stops while more waits: what was read before that is bounded by the burst.
MOST_WAITING: Final = 64
# The same in bytes, counted in the longest frames there may be.
MOST_LONG_FRAMES: Final = 4


class Bucket:
    """A token bucket: ``rate`` a second on average, ``burst`` at once."""

    def __init__(
        self, rate: float, burst: float, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._at = clock()

    def take(self) -> bool:
        """Take one; False where there is none."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Intake:
    """The frames of one peer, in order; the peer is not read while too much of it waits."""

    def __init__(self, transport: Transport, *, per_second: int, frame_bytes: int) -> None:
        self._transport = transport
        self._bucket = Bucket(per_second, per_second * BURST_SECONDS)
        self._most_bytes = frame_bytes * MOST_LONG_FRAMES
        self._waiting: deque[str] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._is_held = False
        self._is_ended = False

    def put(self, text: str) -> bool:
        """Let a frame wait for its turn; False where the peer sends too many a second."""
        if not self._bucket.take():
            return False
        self._waiting.append(text)
        self._bytes += len(text)
        self._arrived.set()
        if not self._is_held and self._is_full:
            self._hold(is_held=True)
        return True

    async def get(self) -> str | None:
        """Wait for the oldest frame, and take it; None where none will come."""
        while not self._waiting:
            if self._is_ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        text = self._waiting.popleft()
        self._bytes -= len(text)
        if self._is_held and not self._is_full:
            self._hold(is_held=False)
        return text

    def end(self) -> None:
        """Drop what waits; nothing will come."""
        self._waiting.clear()
        self._bytes = 0
        self._is_ended = True
        self._arrived.set()

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= MOST_WAITING or self._bytes > self._most_bytes

    def _hold(self, *, is_held: bool) -> None:
        self._is_held = is_held
        self._transport.hold_reading(is_held=is_held)
