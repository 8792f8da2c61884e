"""Send queue of a WebSocket, bounded in frames and bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from psqlmessages.relay.daphne import Transport
from psqlmessages.relay.frames import EncodedFrame

# Departures: what was put into the outboxes of one event loop in a moment leaves together.

# What else runs in this loop waits so long at most.
_SLICE_SECONDS: Final = 0.01


class Departing(Protocol):
    """An outbox."""

    def depart(self) -> None:
        """Send what waits, as far as that is possible at once; raises nothing."""


class FlushScheduler:
    """The outboxes of one event loop in which something waits.

    No task is woken for each of them, and several frames to one reader are one write.
    """

    def __init__(self) -> None:
        self._waiting: deque[Departing] = deque()

    def add(self, send_queue: Departing) -> None:
        """Let an outbox depart once this moment's messages have been put in."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._depart)
        self._waiting.append(send_queue)

    def _depart(self) -> None:
        begun = monotonic()
        while self._waiting:
            if monotonic() - begun > _SLICE_SECONDS:
                asyncio.get_running_loop().call_soon(self._depart)
                return
            self._waiting.popleft().depart()


_departures: WeakKeyDictionary[asyncio.AbstractEventLoop, FlushScheduler] = WeakKeyDictionary()


def get_departures() -> FlushScheduler:
    """Return the departures of the running event loop."""
    return _departures.setdefault(asyncio.get_running_loop(), FlushScheduler())


# So much is written at once, and waits in the server outside of the bounds.
_WRITE_BYTES: Final = 64 * 1024


class SendQueue:
    """Frames on their way to one reader, in order.

    They depart with those of all others at the end of the moment. Where the reader is slow, or its
    server wants to be waited for, one task sends them, :meth:`run`. ``frames`` and ``size`` (in
    bytes) are what may wait; one frame alone may be larger.
    """

    def __init__(self, transport: Transport, *, frames: int, size: int) -> None:
        self._transport = transport
        self._most_frames = frames
        self._most_bytes = size
        self._waiting: deque[EncodedFrame] = deque()
        self._bytes = 0
        self._departures = get_departures()
        # Whether the departures or the task will see to what waits.
        self._is_leaving = False
        self._is_slow = asyncio.Event()
        self._error: Exception | None = None

    def put(self, packet: EncodedFrame) -> bool:
        """Let a frame wait for its turn; False where there is no room: the reader is too slow."""
        size = packet.size
        if self._waiting and not self._has_room(size):
            # A fast reader may get more in a moment than a slow one may leave.
            self.depart()
            if self._waiting and not self._has_room(size):
                return False
        self._waiting.append(packet)
        self._bytes += size
        if not self._is_leaving:
            self._is_leaving = True
            self._departures.add(self)
        return True

    def clear(self) -> None:
        """Drop what waits."""
        self._waiting.clear()
        self._bytes = 0

    def depart(self) -> None:
        """Send what waits, as far as the transport takes it at once; the task does the rest."""
        try:
            is_done = self._leave()
        except Exception as problem:  # noqa: BLE001 - the task raises it: the WebSocket ends by it
            self._error, is_done = problem, False
        if is_done:
            self._is_leaving = False
        else:
            self._is_slow.set()

    async def run(self) -> None:
        """Send what could not depart, as fast as the reader takes it, until cancelled."""
        while True:
            await self._is_slow.wait()
            self._is_slow.clear()
            if self._error is not None:
                raise self._error
            while self._waiting:
                await self._transport.writable()
                if not self._leave():
                    await self._transport.send(self._next())
            self._is_leaving = False

    def _has_room(self, size: int) -> bool:
        return len(self._waiting) < self._most_frames and self._bytes + size <= self._most_bytes

    def _leave(self) -> bool:
        while self._waiting:
            if not self._transport.takes_now:
                return False
            first = self._next()
            if not self._waiting:
                self._transport.give(first.framed, (first,))
                return True
            packets, size = [first], first.size
            while self._waiting and size < _WRITE_BYTES:
                packets.append(self._next())
                size += packets[-1].size
            self._transport.give(b"".join([packet.framed for packet in packets]), packets)
        return True

    def _next(self) -> EncodedFrame:
        packet = self._waiting.popleft()
        self._bytes -= packet.size
        return packet
