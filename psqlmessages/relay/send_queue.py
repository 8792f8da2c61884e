"""Send queue of a WebSocket, limited in frames and bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from psqlmessages.relay.daphne import Transport
from psqlmessages.relay.frames import EncodedFrame

# After this time, let other tasks of the event loop run.
_SLICE_SECONDS: Final = 0.01


class FlushScheduler:
    """Flushes the send queues of one event loop together.

    All frames that are queued before a flush go to a reader in few writes. No task needs to wake up
    while readers are fast.
    """

    def __init__(self) -> None:
        self._queues: deque[SendQueue] = deque()

    def add(self, send_queue: SendQueue) -> None:
        """Flush a send queue after the callbacks that are ready in the event loop now."""
        if not self._queues:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queues.append(send_queue)

    def _flush(self) -> None:
        began = monotonic()
        while self._queues:
            if monotonic() - began > _SLICE_SECONDS:
                asyncio.get_running_loop().call_soon(self._flush)
                return
            self._queues.popleft().flush()


_schedulers: WeakKeyDictionary[asyncio.AbstractEventLoop, FlushScheduler] = WeakKeyDictionary()

# A write of this size gets no more frames. Written frames do not count for the queue's limits.
_WRITE_BYTES: Final = 64 * 1024


class SendQueue:
    """Frames to one reader, in order.

    The flush scheduler sends the frames. If the reader is slow, or the server's ``send`` must be
    awaited, the task :meth:`run` sends them. An empty queue takes a frame of any size.
    """

    def __init__(self, transport: Transport, *, max_frames: int, max_bytes: int) -> None:
        self._transport = transport
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames: deque[EncodedFrame] = deque()
        self._bytes = 0
        self._scheduler = _schedulers.setdefault(asyncio.get_running_loop(), FlushScheduler())
        # False: the next put() must add this queue to the flush scheduler.
        self._has_sender = False
        # Wakes the task run().
        self._wakeup = asyncio.Event()
        self._error: Exception | None = None

    def put(self, frame: EncodedFrame) -> bool:
        """Append a frame; False if there is no room because the reader is too slow."""
        size = frame.size
        if self._frames and not self._has_room(size):
            # A fast reader may have room, but the scheduler has not flushed yet: flush now.
            self.flush()
            if self._frames and not self._has_room(size):
                return False
        self._frames.append(frame)
        self._bytes += size
        if not self._has_sender:
            self._has_sender = True
            self._scheduler.add(self)
        return True

    def clear(self) -> None:
        """Drop all waiting frames."""
        self._frames.clear()
        self._bytes = 0

    def flush(self) -> None:
        """Write frames while the transport is writable; wake the task to send the others."""
        try:
            is_empty = self._write_while_writable()
        except Exception as error:  # noqa: BLE001 - the task raises it, which ends the WebSocket
            self._error, is_empty = error, False
        if is_empty:
            self._has_sender = False
        else:
            self._wakeup.set()

    async def run(self) -> None:
        """Send the frames that a flush left, until cancelled; raise the error of a failed flush."""
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            if self._error is not None:
                raise self._error
            while self._frames:
                await self._transport.wait_until_writable()
                if not self._write_while_writable():
                    frame = self._frames.popleft()
                    self._bytes -= frame.size
                    await self._transport.send(frame)
            self._has_sender = False

    def _has_room(self, size: int) -> bool:
        return len(self._frames) < self._max_frames and self._bytes + size <= self._max_bytes

    def _write_while_writable(self) -> bool:
        """Write frames without waiting; return whether the queue is empty."""
        while self._frames:
            if not self._transport.is_writable:
                return False
            frames, size = [], 0
            while self._frames and size < _WRITE_BYTES:
                frames.append(frame := self._frames.popleft())
                size += frame.size
            self._bytes -= size
            self._transport.write_frames(frames)
        return True
