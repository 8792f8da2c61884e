"""Common base of WebSockets: admission, sockets per user, receive queue and send queue."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from time import monotonic
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

from psqlmessages.conf import get_settings
from psqlmessages.relay.daphne import TRANSPORT_KEY, Transport
from psqlmessages.relay.frames import EncodedFrame
from psqlmessages.relay.revalidation import Credentials, MonitoredSocket, get_credential_monitor
from psqlmessages.retry import TokenBucket

# Receive queue: frames of one WebSocket that are not yet executed, limited in rate and size.

# A peer may use the rate of this many seconds in a burst: a page that opens sends many requests.
BURST_SECONDS: Final = 4
# Reading pauses at this queue length. The burst limits the frames that were already read.
MAX_WAITING_FRAMES: Final = 64
# Reading also pauses if the queue has more characters than this many frames of maximum length.
MAX_LONG_FRAMES: Final = 4


class ReceiveQueue:
    """The frames of one peer, in order. Reading from the peer stops while the queue is full."""

    def __init__(self, transport: Transport, *, per_second: int, frame_bytes: int) -> None:
        self._transport = transport
        self._bucket = TokenBucket(per_second, per_second * BURST_SECONDS)
        self._max_characters = frame_bytes * MAX_LONG_FRAMES
        self._frames: deque[str] = deque()
        self._characters = 0
        self._arrived = asyncio.Event()
        self._is_paused = False
        self._is_ended = False

    def put(self, text: str) -> bool:
        """Append a frame; False if the peer sends more frames per second than allowed."""
        if self._bucket.refill() < 1:
            return False
        self._bucket.tokens -= 1
        self._frames.append(text)
        self._characters += len(text)
        self._arrived.set()
        self._pause_or_resume_reading()
        return True

    async def get(self) -> str | None:
        """Wait for the oldest frame and remove it; None after the end."""
        while not self._frames:
            if self._is_ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        text = self._frames.popleft()
        self._characters -= len(text)
        self._pause_or_resume_reading()
        return text

    def end(self) -> None:
        """Drop all waiting frames and end the queue."""
        self._frames.clear()
        self._characters = 0
        self._is_ended = True
        self._arrived.set()

    def _pause_or_resume_reading(self) -> None:
        is_full = len(self._frames) >= MAX_WAITING_FRAMES or self._characters > self._max_characters
        if is_full != self._is_paused:
            self._is_paused = is_full
            self._transport.pause_reading(is_paused=is_full)


# Send queue: frames to one reader, limited in number and bytes.

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
        while self._frames and self._transport.is_writable:
            frames, size = [], 0
            while self._frames and size < _WRITE_BYTES:
                frames.append(frame := self._frames.popleft())
                size += frame.size
            self._bytes -= size
            self._transport.write_frames(frames)
        return not self._frames


logger = logging.getLogger("psqlmessages.relay")

Receive = Callable[[], Awaitable[dict[str, Any]]]

# Close codes.
UNSUPPORTED: Final = 1003
INTERNAL_ERROR: Final = 1011
NOT_ALLOWED: Final = 4401
TRY_AGAIN_LATER: Final = 1013
TOO_SLOW: Final = 4408
TOO_MANY: Final = 4429

# A peer that closes with another code, or whose connection breaks, has crashed. None: no code.
NORMAL_CLOSE_CODES: Final = frozenset({1000, 1001, 1005, None})
# Time for the running request after the WebSocket has ended, and again for the clean-up. Daphne
# allows 10 seconds for both.
_LAST_REQUEST_SECONDS: Final = 4

# Keys that relay/asgi.py adds to the scope: the expiry of a token, the reason of a refusal.
EXPIRY_KEY: Final = "psqlmessages.expires_at"
REFUSED_KEY: Final = "psqlmessages.refused"

_background_tasks: Final[set[asyncio.Task[Any]]] = set()


class Socket(MonitoredSocket):
    """One WebSocket. Subclasses implement :meth:`on_frame` and :meth:`on_closed`."""

    # The number of open WebSockets of each user. The keys are primary keys.
    _open_counts: ClassVar[Counter[Any]] = Counter()

    scope: dict[str, Any]
    user: Any
    ident: str | None = None
    # Whether the transport was closed at the last check.
    _was_closed = False

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        """Serve one WebSocket until it is closed."""
        if (await receive())["type"] != "websocket.connect":
            return
        self.scope = scope
        self.user = scope.get("user")
        self._transport: Transport = scope.get(TRANSPORT_KEY) or Transport(send)
        self._is_closed = False
        # The close code and reason, if this side closes.
        self._closing: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        # Accept also before a refusal: browsers pass close codes to the page, but no HTTP status.
        await self._transport.accept()
        if (refusal := self._check_admission()) is not None:
            self._is_closed = True
            await self._transport.close(*refusal)
            # The peer may send frames until it has answered the close: drop them, so that they do
            # not wait in the server.
            await self._receive(receive)
            return
        user = self.credentials.user
        self._open_counts[user] += 1
        get_credential_monitor().add(self)
        try:
            await self._serve(receive)
        finally:
            get_credential_monitor().discard(self)
            self._open_counts[user] -= 1
            if not self._open_counts[user]:
                del self._open_counts[user]

    # For subclasses

    def check_access(self) -> tuple[int, str] | None:
        """Return the close code and reason if this user is refused, else None."""
        return None

    def on_accepted(self) -> None:
        """Start the work of a subclass: frames can be sent from now on."""

    async def on_frame(self, text: str) -> None:
        """Execute one frame; the next frame waits until this method returns."""
        raise TypeError(f"{type(self).__name__} must implement on_frame()")

    async def on_closed(self, *, has_crashed: bool) -> None:
        """Clean up; ``has_crashed``: the peer did not close normally, or this side has closed."""

    def put(self, text: str) -> None:
        """Queue a frame to be sent; close with 4408 if the reader is too slow."""
        self.put_frame(EncodedFrame(text))

    def put_frame(self, frame: EncodedFrame) -> None:
        """Queue a frame, which other receivers may share; see :meth:`put`."""
        if not self._is_closed and not self._send_queue.put(frame):
            self.close(TOO_SLOW, "frames are read too slowly")

    def close(self, code: int, reason: str) -> None:
        """Close from this side and drop waiting frames."""
        self._is_closed = True
        if not self._closing.done():
            self._closing.set_result((code, reason))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background, even after this socket has ended."""
        task = asyncio.create_task(coroutine)
        _background_tasks.add(task)
        task.add_done_callback(_on_task_done)
        return task

    # Called by the credential monitor

    def on_access_revoked(self, reason: str) -> None:
        """Close the WebSocket: the user has lost access."""
        self.close(NOT_ALLOWED, reason)

    def abort_if_stuck(self) -> None:
        """Abort the connection if the WebSocket was closed at the last call and still is."""
        if self._transport.is_closed and self._was_closed:
            self._transport.abort()
        self._was_closed = self._transport.is_closed

    # Connection

    def _check_admission(self) -> tuple[int, str] | None:
        """Return the close code and reason of a refusal, else None; set the credentials."""
        if reason := self.scope.get(REFUSED_KEY):
            return NOT_ALLOWED, reason
        # An anonymous user is never active.
        if self.user is None or not self.user.is_active:
            return NOT_ALLOWED, "log in first"
        expires_at = self.scope.get(EXPIRY_KEY)
        session = None if expires_at else self.scope["session"].session_key
        self.credentials = Credentials(
            self.user.pk, self.user.get_session_auth_hash(), session, expires_at
        )
        limit = get_settings().RELAY_SOCKETS
        if self._open_counts[self.user.pk] >= limit:
            return TOO_MANY, f"more than {limit} WebSockets of one user"
        return self.check_access()

    async def _serve(self, receive: Receive) -> None:
        limits = get_settings()
        self._send_queue = SendQueue(
            self._transport,
            max_frames=limits.RELAY_QUEUE_FRAMES,
            max_bytes=limits.RELAY_QUEUE_BYTES,
        )
        self._receive_queue = ReceiveQueue(
            self._transport,
            per_second=limits.RELAY_FRAMES_PER_SECOND,
            frame_bytes=limits.RELAY_FRAME_BYTES,
        )
        receiving = asyncio.create_task(self._receive(receive))
        working = asyncio.create_task(self._work())
        sending = asyncio.create_task(self._send_queue.run())
        tasks: tuple[asyncio.Task[Any], ...] = (receiving, working, sending)
        try:
            self.on_accepted()
            await asyncio.wait((*tasks, self._closing), return_when=asyncio.FIRST_COMPLETED)
            self._is_closed = True
            self._receive_queue.end()
            self._send_queue.clear()
            sending.cancel()
            for task in (working, sending):
                if task.done() and not task.cancelled() and (error := task.exception()):
                    logger.error("closing a WebSocket after an unexpected error", exc_info=error)
                    self.close(INTERNAL_ERROR, "internal server error")
            is_normal = receiving.done() and receiving.result() in NORMAL_CLOSE_CODES
            if self._closing.done():
                await self._transport.close(*self._closing.result())
            leaving = self.spawn(self._leave(working, has_crashed=not is_normal))
            # Once for the running request, and once for the clean-up.
            await asyncio.wait({leaving}, timeout=2 * _LAST_REQUEST_SECONDS)
            await receiving
        finally:
            self._is_closed = True
            for task in tasks:
                task.cancel()

    async def _leave(self, working: asyncio.Task[None], *, has_crashed: bool) -> None:
        # Let the last request end first.
        await asyncio.wait({working}, timeout=_LAST_REQUEST_SECONDS)
        working.cancel()
        await self.on_closed(has_crashed=has_crashed)

    async def _receive(self, receive: Receive) -> int | None:
        """Queue received frames until the peer disconnects; return the close code."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return message.get("code", 1005)  # type: ignore[no-any-return]
            if message["type"] != "websocket.receive" or self._is_closed:
                continue
            if (text := message.get("text")) is None:
                self.close(UNSUPPORTED, "binary frames are not supported: send text")
            elif not self._receive_queue.put(text):
                limit = get_settings().RELAY_FRAMES_PER_SECOND
                self.close(TOO_MANY, f"more than {limit} frames a second")

    async def _work(self) -> None:
        while (text := await self._receive_queue.get()) is not None:
            await self.on_frame(text)


def _on_task_done(task: asyncio.Task[Any]) -> None:
    _background_tasks.discard(task)
    if not task.cancelled() and (error := task.exception()):
        logger.error("a background task of a WebSocket failed", exc_info=error)
