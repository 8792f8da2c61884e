"""Common base of WebSockets: admission, sockets per user, limits both ways, revalidation."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Final

from psqlmessages.conf import get_settings
from psqlmessages.relay.daphne import SCOPE_KEY, Transport
from psqlmessages.relay.frames import EncodedFrame
from psqlmessages.relay.revalidation import Credentials, MonitoredSocket, get_credential_monitor
from psqlmessages.relay.send_queue import SendQueue
from psqlmessages.retry import TokenBucket

# Receive queue: frames of one WebSocket that are not yet executed, limited in rate and size.

# This many seconds' worth of frames may arrive together: a page that opens sends many requests.
BURST_SECONDS: Final = 4
# Reading stops at this queue length. Frames that were already read are limited by the burst.
MOST_WAITING: Final = 64
# The same limit in bytes, as a number of frames of maximum length.
MOST_LONG_FRAMES: Final = 4


class ReceiveQueue:
    """The frames of one peer, in order. Reading from the peer stops while the queue is full."""

    def __init__(self, transport: Transport, *, per_second: int, frame_bytes: int) -> None:
        self._transport = transport
        self._bucket = TokenBucket(per_second, per_second * BURST_SECONDS)
        self._most_bytes = frame_bytes * MOST_LONG_FRAMES
        self._waiting: deque[str] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._is_paused = False
        self._is_ended = False

    def put(self, text: str) -> bool:
        """Append a frame; False if the peer sends more frames per second than allowed."""
        if self._bucket.refill() < 1:
            return False
        self._bucket.tokens -= 1
        self._waiting.append(text)
        self._bytes += len(text)
        self._arrived.set()
        self._pause_or_resume_reading()
        return True

    async def get(self) -> str | None:
        """Wait for the oldest frame and remove it; None after the end."""
        while not self._waiting:
            if self._is_ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        text = self._waiting.popleft()
        self._bytes -= len(text)
        self._pause_or_resume_reading()
        return text

    def end(self) -> None:
        """Drop all waiting frames and end the queue."""
        self._waiting.clear()
        self._bytes = 0
        self._is_ended = True
        self._arrived.set()

    def _pause_or_resume_reading(self) -> None:
        is_full = len(self._waiting) >= MOST_WAITING or self._bytes > self._most_bytes
        if is_full != self._is_paused:
            self._is_paused = is_full
            self._transport.pause_reading(is_paused=is_full)


logger = logging.getLogger("psqlmessages.relay")

Receive = Callable[[], Awaitable[dict[str, Any]]]

UNSUPPORTED: Final = 1003
INTERNAL_ERROR: Final = 1011
NOT_ALLOWED: Final = 4401
TRY_AGAIN_LATER: Final = 1013
TOO_SLOW: Final = 4408
TOO_MANY: Final = 4429

# Codes of a normal close by the peer; None: no code. Any other end is a crash.
GOODBYES: Final = frozenset({1000, 1001, 1005, None})
# Time for the running operation after the WebSocket has ended. Daphne allows 10 seconds.
_END_SECONDS: Final = 4

# Keys that relay/asgi.py adds to the scope: the expiry of a token, the reason of a refusal.
EXPIRY_KEY: Final = "psqlmessages.expires_at"
REFUSED_KEY: Final = "psqlmessages.refused"

_background: Final[set[asyncio.Task[Any]]] = set()


class Socket(MonitoredSocket):
    """One WebSocket. Subclasses implement :meth:`received` and :meth:`left`."""

    _open: ClassVar[Counter[Any]] = Counter()

    scope: dict[str, Any]
    user: Any
    _was_ending = False

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        """Accept before refusing: browsers pass close codes to the page, but no HTTP status."""
        if (await receive())["type"] != "websocket.connect":
            return
        self.scope = scope
        self.user = scope.get("user")
        self._transport: Transport = scope.get(SCOPE_KEY) or Transport(send)
        self._is_over = False
        self._closing: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        await self._transport.accept()
        if refusal := self._refusal():
            self._is_over = True
            await self._transport.close(*refusal)
            await self._receive(receive)
            return
        user = self.credentials.user
        self._open[user] += 1
        get_credential_monitor().add(self)
        try:
            await self._serve(receive)
        finally:
            get_credential_monitor().discard(self)
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]

    # For subclasses

    def refusal(self) -> tuple[int, str] | None:
        """Return the close code and reason if this user is refused, else None."""
        return None

    def entered(self) -> None:
        """Start: frames can be sent from now on."""

    async def received(self, text: str) -> None:
        """Execute one frame; the next one waits."""
        raise TypeError(f"{type(self).__name__} must implement received()")

    async def left(self, *, crashed: bool) -> None:
        """Clean up; ``crashed``: the peer did not close normally."""

    def put(self, text: str) -> None:
        """Queue a frame to be sent; a reader that is too slow is closed with 4408."""
        self.put_packet(EncodedFrame(text))

    def put_packet(self, packet: EncodedFrame) -> None:
        """Queue a frame that is shared with other receivers."""
        if not self._is_over and not self._send_queue.put(packet):
            self.close(TOO_SLOW, "frames are read too slowly")

    def close(self, code: int, reason: str) -> None:
        """Close from this side and drop waiting frames."""
        self._is_over = True
        if not self._closing.done():
            self._closing.set_result((code, reason))

    def spawn(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background, even after this socket has ended."""
        task = asyncio.create_task(what)
        _background.add(task)
        task.add_done_callback(_ended)
        return task

    # Called by the credential monitor

    def revoked(self, reason: str) -> None:
        """Close the WebSocket: the user has lost access."""
        self.close(NOT_ALLOWED, reason)

    def reap(self) -> None:
        """Drop a connection that has ended while its peer does not read the buffered data."""
        if self._transport.is_ending and self._was_ending:
            self._transport.abort()
        self._was_ending = self._transport.is_ending

    # Connection

    def _refusal(self) -> tuple[int, str] | None:
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
        most = get_settings().RELAY_SOCKETS
        if self._open[self.user.pk] >= most:
            return TOO_MANY, f"more than {most} WebSockets of one user"
        return self.refusal()

    async def _serve(self, receive: Receive) -> None:
        limits = get_settings()
        self._send_queue = SendQueue(
            self._transport, frames=limits.RELAY_QUEUE_FRAMES, size=limits.RELAY_QUEUE_BYTES
        )
        self._receive_queue = ReceiveQueue(
            self._transport,
            per_second=limits.RELAY_FRAMES_PER_SECOND,
            frame_bytes=limits.RELAY_FRAME_BYTES,
        )
        receiving, working, sending = tasks = [
            asyncio.create_task(each)
            for each in (self._receive(receive), self._work(), self._send_queue.run())
        ]
        try:
            self.entered()
            await asyncio.wait({*tasks, self._closing}, return_when=asyncio.FIRST_COMPLETED)
            self._is_over = True
            self._receive_queue.end()
            self._send_queue.clear()
            sending.cancel()
            for task in (working, sending):
                if task.done() and not task.cancelled() and (problem := task.exception()):
                    logger.error("closing a WebSocket after an unexpected error", exc_info=problem)
                    self.close(INTERNAL_ERROR, "internal server error")
            is_goodbye = receiving.done() and receiving.result() in GOODBYES
            if self._closing.done():
                await self._transport.close(*self._closing.result())
            leaving = self.spawn(self._leave(working, crashed=not is_goodbye))
            await asyncio.wait({leaving}, timeout=2 * _END_SECONDS)
            await receiving
        finally:
            self._is_over = True
            for task in tasks:
                task.cancel()

    async def _leave(self, working: asyncio.Task[None], *, crashed: bool) -> None:
        # The last request is executed or refused before the socket leaves.
        await asyncio.wait({working}, timeout=_END_SECONDS)
        working.cancel()
        await self.left(crashed=crashed)

    async def _receive(self, receive: Receive) -> int | None:
        """Receive frames until the end; return the close code. Never waits for their execution."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return message.get("code", 1005)  # type: ignore[no-any-return]
            if message["type"] != "websocket.receive" or self._is_over:
                continue
            if (text := message.get("text")) is None:
                self.close(UNSUPPORTED, "binary frames are not supported: send text")
            elif not self._receive_queue.put(text):
                most = get_settings().RELAY_FRAMES_PER_SECOND
                self.close(TOO_MANY, f"more than {most} frames a second")

    async def _work(self) -> None:
        while (text := await self._receive_queue.get()) is not None:
            await self.received(text)


def _ended(task: asyncio.Task[Any]) -> None:
    _background.discard(task)
    if not task.cancelled() and (problem := task.exception()):
        logger.error("cleaning up a closed WebSocket failed", exc_info=problem)
