"""Send queue of a WebSocket, bounded in frames and bytes; socket.py closes slow readers."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from psqlmessages.relay.daphne import Transport
from psqlmessages.relay.frames import EncodedFrame

# Flushing: the frames that reach the send queues of one event loop together are written together.

# Upper limit of the time that other tasks of this event loop wait.
_SLICE_SECONDS: Final = 0.01


class FlushScheduler:
    """The send queues of one event loop that have frames to send.

    It wakes no task per queue, and several frames to one reader are one write.
    """

    def __init__(self) -> None:
        self._waiting: deque[SendQueue] = deque()

    def add(self, send_queue: SendQueue) -> None:
        """Flush a send queue after everything else that is ready in the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(send_queue)

    def _flush(self) -> None:
        begun = monotonic()
        while self._waiting:
            if monotonic() - begun > _SLICE_SECONDS:
                asyncio.get_running_loop().call_soon(self._flush)
                return
            self._waiting.popleft().flush()


_schedulers: WeakKeyDictionary[asyncio.AbstractEventLoop, FlushScheduler] = WeakKeyDictionary()

# Size of one write; these bytes wait in the server and do not count towards the queue's limits.
_WRITE_BYTES: Final = 64 * 1024


class SendQueue:
    """Frames to one reader, in order.

    All send queues flush together. If the reader is slow, or the server's ``send`` must be awaited,
    the task :meth:`run` sends. ``frames`` and ``size`` (bytes) limit the queue; one frame alone may
    be larger.
    """

    def __init__(self, transport: Transport, *, frames: int, size: int) -> None:
        self._transport = transport
        self._most_frames = frames
        self._most_bytes = size
        self._waiting: deque[EncodedFrame] = deque()
        self._bytes = 0
        self._scheduler = _schedulers.setdefault(asyncio.get_running_loop(), FlushScheduler())
        # Whether the flush scheduler or the task is going to send the waiting frames.
        self._is_scheduled = False
        self._is_slow = asyncio.Event()
        self._error: Exception | None = None

    def put(self, packet: EncodedFrame) -> bool:
        """Append a frame; False if there is no room because the reader is too slow."""
        size = packet.size
        if self._waiting and not self._has_room(size):
            # A fast reader may get more frames together than the queue holds, so flush first.
            self.flush()
            if self._waiting and not self._has_room(size):
                return False
        self._waiting.append(packet)
        self._bytes += size
        if not self._is_scheduled:
            self._is_scheduled = True
            self._scheduler.add(self)
        return True

    def clear(self) -> None:
        """Drop all waiting frames."""
        self._waiting.clear()
        self._bytes = 0

    def flush(self) -> None:
        """Send what the transport takes without waiting; the task sends the rest."""
        try:
            is_done = self._write()
        except Exception as problem:  # noqa: BLE001 - the task raises it, which ends the WebSocket
            self._error, is_done = problem, False
        if is_done:
            self._is_scheduled = False
        else:
            self._is_slow.set()

    async def run(self) -> None:
        """Send the frames that a flush left, as fast as the reader takes them, until cancelled."""
        while True:
            await self._is_slow.wait()
            self._is_slow.clear()
            if self._error is not None:
                raise self._error
            while self._waiting:
                await self._transport.writable()
                if not self._write():
                    await self._transport.send(self._next())
            self._is_scheduled = False

    def _has_room(self, size: int) -> bool:
        return len(self._waiting) < self._most_frames and self._bytes + size <= self._most_bytes

    def _write(self) -> bool:
        while self._waiting:
            if not self._transport.is_writable:
                return False
            first = self._next()
            if not self._waiting:
                self._transport.write_frames(first.framed, (first,))
                return True
            packets, size = [first], first.size
            while self._waiting and size < _WRITE_BYTES:
                packets.append(self._next())
                size += packets[-1].size
            self._transport.write_frames(b"".join([packet.framed for packet in packets]), packets)
        return True

    def _next(self) -> EncodedFrame:
        packet = self._waiting.popleft()
        self._bytes -= packet.size
        return packet
