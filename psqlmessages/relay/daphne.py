"""Transport: one WebSocket of the server; with Daphne, limited in both directions.

For the reasons see docs/adr/0005-daphne-limits-from-outside.md.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic, thread_time
from typing import Any, ClassVar, Final

from psqlmessages.relay.frames import EncodedFrame
from psqlmessages.retry import TokenBucket

# Direct writes to a plain TCP connection of Twisted: docs/adr/0013-one-write-per-socket-and-turn.md


def can_write_directly(transport: Any) -> bool:
    """Return whether Twisted's transport is a TCP connection without TLS, with known buffers."""
    tcp: Any = sys.modules.get("twisted.internet.tcp")
    is_plain = tcp is not None and isinstance(transport, tcp.Connection) and not transport.TLS
    return is_plain and hasattr(transport, "dataBuffer") and hasattr(transport, "_tempDataLen")


def write_directly(connection: Any, data: bytes) -> None:
    """Write immediately if Twisted's buffers are empty; Twisted sends the rest.

    Twisted itself registers for a write event of the operating system before each write, which
    costs more than the write.
    """
    if connection.connected and not (connection.dataBuffer or connection._tempDataLen):
        written = connection.writeSomeData(data)
        if written == len(data):
            return
        if isinstance(written, int):
            data = data[written:]
    # Also after an error: Twisted gets the same error again and closes the connection as usual.
    connection.write(data)


# Reading: a peer's bytes are processed in pieces, within a share of the event loop's time:
# docs/adr/0020-each-peer-has-a-cpu-share.md

# A piece of this size takes about 5 ms if it consists of empty frames.
PIECE_BYTES: Final = 4 * 1024
# After this time, other sockets are served before the next piece.
TURN_SECONDS: Final = 0.002
# Fraction of the event loop's time that each peer may use: about fifty usual frames a second.
OWN_SHARE: Final = 0.005
# Fraction of the event loop's time that all throttled peers may use together.
COMMON_SHARE: Final = 0.1
# CPU time that a peer may use in a burst.
BURST_SECONDS: Final = 0.05
MESSAGE_TOO_BIG: Final = 1009


class CpuShare:
    """A peer's token bucket of CPU seconds; a peer that overdraws it is throttled for a while.

    Throttled peers divide one common share: if each had a tenth, ten would take the whole loop.
    """

    _throttled_peers: ClassVar[int] = 0

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._bucket = TokenBucket(OWN_SHARE, BURST_SECONDS, clock=clock)
        self.is_throttled = False

    def charge(self, seconds: float) -> float:
        """Charge CPU time; return how long to throttle the peer: longer if others are throttled."""
        balance = self._bucket.refill() - seconds
        self._bucket.tokens = balance
        return max(0.0, -balance) / COMMON_SHARE * (1 + CpuShare._throttled_peers)

    def throttle(self) -> None:
        """Start a pause."""
        CpuShare._throttled_peers += 1
        self.is_throttled = True

    def resume(self) -> None:
        """End a pause. It pays the peer's debt, but adds no tokens."""
        CpuShare._throttled_peers -= 1
        self.is_throttled = False
        tokens = max(0.0, self._bucket.tokens)
        self._bucket.refill()
        self._bucket.tokens = tokens


class ReadThrottle:
    """Passes data from a Daphne connection to its WebSocket protocol, at a limited rate.

    ``max_bytes`` limits a message. ``on_throttled`` is called when throttling begins or ends.
    """

    def __init__(self, protocol: Any, max_bytes: int, on_throttled: Callable[[], None]) -> None:
        self._protocol = protocol
        self._max_bytes = max_bytes
        self._on_throttled = on_throttled
        self._process: Callable[[bytes], None] = protocol.dataReceived
        self._buffer = b""
        self.cpu_share = CpuShare()
        protocol.dataReceived = self._on_data

    def _on_data(self, data: bytes) -> None:
        self._buffer += data
        if not self.cpu_share.is_throttled:
            self._process_buffer()

    def _process_buffer(self) -> None:
        cpu_seconds = 0.0
        while self._buffer and cpu_seconds < TURN_SECONDS:
            piece, self._buffer = self._buffer[:PIECE_BYTES], self._buffer[PIECE_BYTES:]
            # CPU time of this thread: on a busy machine, wall time includes other processes.
            began = thread_time()
            self._process(piece)
            cpu_seconds += thread_time() - began
            self._limit_parts()
        pause_seconds = self.cpu_share.charge(cpu_seconds)
        if pause_seconds or self._buffer:
            self.cpu_share.throttle()
            self._on_throttled()
            asyncio.get_running_loop().call_later(pause_seconds, self._resume)

    def _resume(self) -> None:
        self.cpu_share.resume()
        self._process_buffer()
        if not self.cpu_share.is_throttled:
            self._on_throttled()

    def _limit_parts(self) -> None:
        """Close if a message has more parts than it may have bytes: most parts are empty."""
        protocol = self._protocol
        parts = getattr(protocol, "message_data", None)
        if parts and len(parts) > self._max_bytes and protocol.state == protocol.STATE_OPEN:
            reason = f"received a WebSocket message in more than {self._max_bytes} parts"
            protocol.sendCloseFrame(code=MESSAGE_TOO_BIG, reasonUtf8=reason.encode())


Send = Callable[[dict[str, Any]], Awaitable[None]]

TRANSPORT_KEY: Final = "psqlmessages.transport"
# Time for the closing handshake: a slow reader must first read the buffered data.
CLOSE_SECONDS: Final = 30
# Maximum length of a close reason (RFC 6455, 5.5).
MAX_REASON_BYTES: Final = 123


class Transport:
    """A WebSocket of a server whose ``send`` waits while the reader is slow."""

    # The scheme of the request; "": the scheme in the scope.
    scheme = ""
    # Whether write_frames() may be called now; otherwise await send() for each frame.
    is_writable = False

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_accepted = False

    async def accept(self) -> None:
        """Answer the handshake."""
        self.is_accepted = True
        await self._send({"type": "websocket.accept"})

    async def send(self, frame: EncodedFrame) -> None:
        """Send one frame; no effect if the WebSocket is closed."""
        await self._send_unless_closed({"type": "websocket.send", "text": frame.text})

    def write_frames(self, frames: Sequence[EncodedFrame]) -> None:
        """Send frames without waiting; no effect if the WebSocket is closed."""

    async def close(self, code: int, reason: str) -> None:
        """Close the WebSocket from this side; no effect if it is closed."""
        await self._send_unless_closed({"type": "websocket.close", "code": code, "reason": reason})

    async def wait_until_writable(self) -> None:
        """Wait until the server can take more frames."""

    def pause_reading(self, *, is_paused: bool) -> None:
        """Stop reading frames from the peer, or continue."""

    @property
    def is_closed(self) -> bool:
        """Whether the WebSocket is closed. The peer may not have read all buffered data yet."""
        return False

    def abort(self) -> None:
        """Close the connection immediately and drop buffered data."""

    async def _send_unless_closed(self, message: dict[str, Any]) -> None:
        # ASGI: send raises a subclass of OSError after the peer has disconnected.
        with suppress(OSError):
            await self._send(message)


class DaphneTransport(Transport):
    """A WebSocket of Daphne, whose ``send`` never waits, however slow the reader is."""

    def __init__(self, send: Send, protocol: Any, max_bytes: int) -> None:
        super().__init__(send)
        self._protocol = protocol
        # Whether Twisted's buffer has room: the reader is not too slow.
        self.is_writable = True
        self._became_writable = asyncio.Event()
        self._is_paused = False
        self._max_bytes = max_bytes
        protocol.maxMessagePayloadSize = protocol.maxFramePayloadSize = max_bytes
        self._has_extensions = False
        self._can_write_directly = False
        # By default a frame that is too long drops the connection, without close code 1009.
        protocol.failByDrop = False
        protocol.closeHandshakeTimeout = CLOSE_SECONDS
        self._throttle = ReadThrottle(protocol, max_bytes, self._pause_or_resume_reading)
        interfaces: Any = sys.modules["twisted.internet.interfaces"]
        # With --proxy-headers, the proxy determines the scheme.
        is_tls = interfaces.ISSLTransport.providedBy(protocol.transport) or (
            getattr(protocol, "client_scheme", "") == "https"
        )
        self.scheme = "wss" if is_tls else "ws"
        # Daphne would pass a request body of any length to the WebSocket as frames.
        protocol.data = b""
        # Do not read yet: before the handshake is answered, data is buffered without limit.
        self._pause_or_resume_reading()

    async def accept(self) -> None:
        """Answer the handshake, and register as the producer that Twisted pauses and resumes."""
        await super().accept()
        self._pause_or_resume_reading()
        if self._is_open:
            # The HTTP connection is still registered as the producer.
            self._protocol.unregisterProducer()
            self._protocol.registerProducer(self, True)
            self._has_extensions = bool(self._protocol.websocket_extensions_in_use)
            self._can_write_directly = can_write_directly(self._protocol.transport)

    async def send(self, frame: EncodedFrame) -> None:
        """Send one frame; no effect if the WebSocket is closed."""
        self.write_frames((frame,))

    def write_frames(self, frames: Sequence[EncodedFrame]) -> None:
        """Send frames without waiting; no effect if the WebSocket is closed."""
        protocol = self._protocol
        if protocol.state != protocol.STATE_OPEN:
            return
        if self._has_extensions or protocol.send_queue:
            # autobahn applies the limit for incoming messages to outgoing ones too.
            protocol.maxMessagePayloadSize = 0
            try:
                for frame in frames:
                    protocol.sendMessage(frame.text.encode(), False)
            finally:
                protocol.maxMessagePayloadSize = self._max_bytes
            return
        data = b"".join([frame.data for frame in frames])
        if self._can_write_directly:
            write_directly(protocol.transport, data)
        else:
            protocol.transport.write(data)

    async def close(self, code: int, reason: str) -> None:
        """Close the WebSocket, with the reason, which Daphne itself omits."""
        if self._is_open:
            # Cut the reason at a character boundary.
            text = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
            self._protocol.sendCloseFrame(code=code, reasonUtf8=text.encode())
        # The peer's close frame must be read, even if the peer floods us.
        self.pause_reading(is_paused=False)

    async def wait_until_writable(self) -> None:
        """Wait until Twisted's buffer has room."""
        while not self.is_writable:
            self._became_writable.clear()
            await self._became_writable.wait()

    def pause_reading(self, *, is_paused: bool) -> None:
        """Stop reading frames from the peer, or continue."""
        self._is_paused = is_paused
        self._pause_or_resume_reading()

    @property
    def is_closed(self) -> bool:
        """Whether the WebSocket is closed. The peer may not have read all buffered data yet."""
        return bool(self._protocol.state == self._protocol.STATE_CLOSED)

    def abort(self) -> None:
        """Close the connection immediately and drop buffered data."""
        self._protocol.transport.abortConnection()

    # Twisted calls these methods of a push producer.

    def pauseProducing(self) -> None:  # noqa: N802
        """Stop sending: Twisted's buffer is full."""
        self.is_writable = False
        self._pause_or_resume_reading()

    def resumeProducing(self) -> None:  # noqa: N802
        """Continue sending: Twisted's buffer is empty, or the connection has ended."""
        self.is_writable = True
        self._became_writable.set()
        self._pause_or_resume_reading()

    stopProducing = resumeProducing  # noqa: N815

    @property
    def _is_open(self) -> bool:
        return bool(self._protocol.state == self._protocol.STATE_OPEN)

    def _pause_or_resume_reading(self) -> None:
        # Each ping read adds a pong to the buffer, so nothing is read while the buffer is full.
        may_read = self.is_accepted and not self._throttle.cpu_share.is_throttled
        if self._is_open:
            may_read = may_read and self.is_writable and not self._is_paused
        if not self.is_closed:
            transport = self._protocol.transport
            if may_read:
                transport.resumeProducing()
            else:
                transport.pauseProducing()


def make_transport(send: Send, max_bytes: int) -> Transport:
    """Make the transport for the ``send`` that the server passes to the outermost application.

    ``max_bytes`` limits an incoming message.
    """
    daphne: Any = sys.modules.get("daphne.server")
    if (
        daphne is not None
        and isinstance(send, functools.partial)
        and isinstance(getattr(send.func, "__self__", None), daphne.Server)
        and hasattr(send.args[0], "sendCloseFrame")
    ):
        return DaphneTransport(send, send.args[0], max_bytes)
    return Transport(send)
