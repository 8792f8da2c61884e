"""Common base of WebSockets: admission, limits in both directions, revalidation."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from time import monotonic
from typing import Any, ClassVar, Final

from psqlmessages.conf import get_settings
from psqlmessages.relay.daphne import SCOPE_KEY, Transport
from psqlmessages.relay.frames import EncodedFrame
from psqlmessages.relay.revalidation import Credentials, get_watch
from psqlmessages.relay.send_queue import SendQueue

# Intake: what came in through one WebSocket and was not worked yet, bounded by rate and size.

# So many seconds' worth of frames may come at once: a page that opens asks for much.
BURST_SECONDS: Final = 4
# Reading stops while more waits: what was read before that is bounded by the burst.
MOST_WAITING: Final = 64
# The same in bytes, counted in the longest frames there may be.
MOST_LONG_FRAMES: Final = 4


class TokenBucket:
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


class ReceiveQueue:
    """The frames of one peer, in order; the peer is not read while too much of it waits."""

    def __init__(self, transport: Transport, *, per_second: int, frame_bytes: int) -> None:
        self._transport = transport
        self._bucket = TokenBucket(per_second, per_second * BURST_SECONDS)
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
            self._pause_reading(is_held=True)
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
            self._pause_reading(is_held=False)
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

    def _pause_reading(self, *, is_held: bool) -> None:
        self._is_held = is_held
        self._transport.hold_reading(is_held=is_held)


logger = logging.getLogger("psqlmessages.relay")

Receive = Callable[[], Awaitable[dict[str, Any]]]

UNSUPPORTED: Final = 1003
INTERNAL_ERROR: Final = 1011
NOT_ALLOWED: Final = 4401
TRY_AGAIN_LATER: Final = 1013
TOO_SLOW: Final = 4408
TOO_MANY: Final = 4429

# By these, or by no code at all, the peer has said goodbye; any other end is a loss.
GOODBYES: Final = frozenset({1000, 1001, 1005, None})
# How long what is under way may go on when the WebSocket has ended. Daphne waits for 10 seconds.
_END_SECONDS: Final = 4

# What routing.py leaves in the scope: the expiry of a token, or why the caller is refused.
EXPIRY_KEY: Final = "psqlmessages.expires_at"
REFUSED_KEY: Final = "psqlmessages.refused"

_background: Final[set[asyncio.Task[Any]]] = set()


class Socket:
    """One WebSocket. Subclasses say what a frame means (:meth:`received`), and how to leave."""

    _open: ClassVar[Counter[Any]] = Counter()

    scope: dict[str, Any]
    user: Any
    credentials: Credentials
    ident: str | None = None
    _was_ending = False

    @classmethod
    def as_asgi(cls) -> Callable[..., Awaitable[None]]:
        """Return the ASGI application that makes one of these for each connection."""

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await cls()(scope, receive, send)

        return application

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        """Accept first and refuse then: browsers see close codes, and no status of HTTP."""
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
        get_watch().add(self)
        try:
            await self._serve(receive)
        finally:
            get_watch().discard(self)
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]

    # For subclasses

    def refusal(self) -> tuple[int, str] | None:
        """Say with which code and reason this user is refused; None where welcome."""
        return None

    def entered(self) -> None:
        """Begin: frames can be sent from now on."""

    async def received(self, text: str) -> None:
        """Work one frame; the next one waits."""
        raise TypeError(f"{type(self).__name__} does not say what a frame means")

    async def left(self, *, crashed: bool) -> None:
        """Clean up; ``crashed``: the peer has not said goodbye."""

    def permits(self, user: Any) -> bool:
        """Tell whether the user, read anew, may still be here; called in a thread."""
        return True

    def put(self, text: str) -> None:
        """Send a frame when it is its turn; who reads too slowly is closed with 4408."""
        self.put_packet(EncodedFrame(text))

    def put_packet(self, packet: EncodedFrame) -> None:
        """Send a frame that others get, too."""
        if not self._is_over and not self._send_queue.put(packet):
            self.close(TOO_SLOW, "frames are read too slowly")

    def close(self, code: int, reason: str) -> None:
        """Close from this side; what waits to be sent is dropped."""
        self._is_over = True
        if not self._closing.done():
            self._closing.set_result((code, reason))

    def spawn(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that goes on by itself, even where this socket ends meanwhile."""
        task = asyncio.create_task(what)
        _background.add(task)
        task.add_done_callback(_ended)
        return task

    # Called by the watch

    def revoked(self, reason: str) -> None:
        """Close: the user may not be here any more."""
        self.close(NOT_ALLOWED, reason)

    def ident_revoked(self, ident: str) -> None:
        """End a node; sockets without nodes have none to end."""

    def unchecked(self) -> None:
        """For too long it could not be told who may be here; sockets may withhold instead."""

    def reap(self) -> None:
        """Let go of a connection that has ended, but whose peer does not take what waits."""
        if self._transport.is_ending and self._was_ending:
            self._transport.abort()
        self._was_ending = self._transport.is_ending

    # The life of a socket

    def _refusal(self) -> tuple[int, str] | None:
        if reason := self.scope.get(REFUSED_KEY):
            return NOT_ALLOWED, reason
        # Whoever is anonymous is never active.
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
        receiving = asyncio.create_task(self._receive(receive))
        working = asyncio.create_task(self._work())
        sending = asyncio.create_task(self._send_queue.run())
        try:
            self.entered()
            await asyncio.wait(
                {receiving, working, sending, self._closing}, return_when=asyncio.FIRST_COMPLETED
            )
            await self._end(receiving, working, sending)
            await receiving
        finally:
            self._is_over = True
            for task in (receiving, working, sending):
                task.cancel()

    async def _end(
        self,
        receiving: asyncio.Task[int | None],
        working: asyncio.Task[None],
        sending: asyncio.Task[None],
    ) -> None:
        """Let nothing more in or out, close, and clean up."""
        self._is_over = True
        self._receive_queue.end()
        self._send_queue.clear()
        sending.cancel()
        for task in (working, sending):
            if task.done() and not task.cancelled() and (problem := task.exception()):
                logger.error("a WebSocket ends by a fault", exc_info=problem)
                self.close(INTERNAL_ERROR, "a fault of the server")
        is_goodbye = receiving.done() and receiving.result() in GOODBYES
        if self._closing.done():
            await self._transport.close(*self._closing.result())
        leaving = self.spawn(self._leave(working, crashed=not is_goodbye))
        await asyncio.wait({leaving}, timeout=2 * _END_SECONDS)

    async def _leave(self, working: asyncio.Task[None], *, crashed: bool) -> None:
        # What the socket asked for last is done or refused before the socket leaves.
        await asyncio.wait({working}, timeout=_END_SECONDS)
        working.cancel()
        await self.left(crashed=crashed)

    async def _receive(self, receive: Receive) -> int | None:
        """Take in frames until the end, whose code it returns; it never waits for their work."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return message.get("code", 1005)  # type: ignore[no-any-return]
            if message["type"] == "websocket.receive" and not self._is_over:
                self._came(message.get("text"))

    def _came(self, text: str | None) -> None:
        if text is None:
            self.close(UNSUPPORTED, "frames are text")
        elif not self._receive_queue.put(text):
            most = get_settings().RELAY_FRAMES_PER_SECOND
            self.close(TOO_MANY, f"more than {most} frames a second")

    async def _work(self) -> None:
        while (text := await self._receive_queue.get()) is not None:
            await self.received(text)


def _ended(task: asyncio.Task[Any]) -> None:
    _background.discard(task)
    if not task.cancelled() and (problem := task.exception()):
        logger.error("a WebSocket was not left in order", exc_info=problem)
