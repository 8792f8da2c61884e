"""Send queue of a WebSocket, limited in frames and bytes; socket.py closes slow readers."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from psqlmessages.relay.daphne import Transport
from psqlmessages.relay.frames import EncodedFrame

# Upper limit of the time that other tasks of this event loop wait.
_SLICE_SECONDS: Final = 0.01


class FlushScheduler:
    """Flushes all send queues of one event loop together.

    So several frames to one reader need one write, and no queue needs a task to be woken.
    """

    def __init__(self) -> None:
        self._waiting: deque[SendQueue] = deque()

    def add(self, send_queue: SendQueue) -> None:
        """Flush a send queue after everything else that is ready in the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(send_queue)

    def _flush(self) -> None:
        began = monotonic()
        while self._waiting:
            if monotonic() - began > _SLICE_SECONDS:
                asyncio.get_running_loop().call_soon(self._flush)
                return
            self._waiting.popleft().flush()


_schedulers: WeakKeyDictionary[asyncio.AbstractEventLoop, FlushScheduler] = WeakKeyDictionary()

# Size of one write. Written bytes wait in the server and do not count towards the queue's limits.
_WRITE_BYTES: Final = 64 * 1024


class SendQueue:
    """Frames to one reader, in order.

    The flush scheduler sends them. If the reader is slow, or the server's ``send`` must be awaited,
    the task :meth:`run` does. One frame alone may be larger than ``max_bytes``.
    """

    def __init__(self, transport: Transport, *, max_frames: int, max_bytes: int) -> None:
        self._transport = transport
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._waiting: deque[EncodedFrame] = deque()
        self._bytes = 0
        self._scheduler = _schedulers.setdefault(asyncio.get_running_loop(), FlushScheduler())
        # Whether the flush scheduler or the task will send the waiting frames.
        self._is_scheduled = False
        self._has_rest = asyncio.Event()
        self._error: Exception | None = None

    def put(self, frame: EncodedFrame) -> bool:
        """Append a frame; False if there is no room because the reader is too slow."""
        size = frame.size
        if self._waiting and not self._has_room(size):
            # More frames may arrive together than fit: flush, so that a fast reader has room.
            self.flush()
            if self._waiting and not self._has_room(size):
                return False
        self._waiting.append(frame)
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
        """Send frames while the transport takes them without waiting; the task sends the rest."""
        try:
            is_done = self._write()
        except Exception as error:  # noqa: BLE001 - the task raises it, which ends the WebSocket
            self._error, is_done = error, False
        if is_done:
            self._is_scheduled = False
        else:
            self._has_rest.set()

    async def run(self) -> None:
        """Send the frames that a flush left, as fast as the reader takes them, until cancelled."""
        while True:
            await self._has_rest.wait()
            self._has_rest.clear()
            if self._error is not None:
                raise self._error
            while self._waiting:
                await self._transport.wait_until_writable()
                if not self._write():
                    frame = self._waiting.popleft()
                    self._bytes -= frame.size
                    await self._transport.send(frame)
            self._is_scheduled = False

    def _has_room(self, size: int) -> bool:
        return len(self._waiting) < self._max_frames and self._bytes + size <= self._max_bytes

    def _write(self) -> bool:
        while self._waiting:
            if not self._transport.is_writable:
                return False
            frames, size = [], 0
            while self._waiting and size < _WRITE_BYTES:
                frames.append(frame := self._waiting.popleft())
                size += frame.size
            self._bytes -= size
            self._transport.write_frames(frames)
        return True
