"""Transport: one WebSocket as its server offers it; with Daphne, bounded in both directions.

docs/adr/0005-daphne-limits-from-outside.md says why.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic, thread_time
from typing import Any, ClassVar, Final

from psqlmessages.relay.frames import EncodedFrame

# Direct: writes to a plain TCP connection of Twisted without waiting for its reactor.
#
# docs/adr/0013-one-write-per-socket-and-turn.md says why.

# What Twisted has not handed to the system yet lies in these two.
_BUFFERS: Final = ("dataBuffer", "_tempDataLen")


def connection_of(transport: Any) -> Any:
    """Return the connection below a WebSocket, or None where it cannot be written to directly.

    With TLS that is so, and with a Twisted that keeps its buffers elsewhere.
    """
    tcp: Any = sys.modules.get("twisted.internet.tcp")
    is_plain = tcp is not None and isinstance(transport, tcp.Connection) and not transport.TLS
    return transport if is_plain and all(hasattr(transport, name) for name in _BUFFERS) else None


def write(connection: Any, data: bytes) -> None:
    """Write at once where nothing waits before it; Twisted sends what the system does not take.

    By itself Twisted asks the system first, for each write, to be told when it may write: that
    costs more than the writing.
    """
    if connection.connected and not (connection.dataBuffer or connection._tempDataLen):
        written = connection.writeSomeData(data)
        if written == len(data):
            return
        if isinstance(written, int):
            data = data[written:]
    # After an error, too: Twisted meets it again, and ends the connection as it always does.
    connection.write(data)


# Reading: the bytes of one peer, taken in by pieces, and for a share of the loop's time only.
#
# docs/adr/0020-each-peer-has-a-cpu-share.md says why.

# Full of empty frames a piece takes some 5 ms; then it is the others' turn.
PIECE_BYTES: Final = 4 * 1024
TURN_SECONDS: Final = 0.002
# What each peer gets of the loop's time: fifty usual frames a second take about that.
LEAST: Final = 0.005
# What all those together get who ask for more than that.
SHARE: Final = 0.1
BURST_SECONDS: Final = 0.05
TOO_LONG: Final = 1009


class CpuShare:
    """A token bucket of seconds: who has taken too many rests until what is owed is earned.

    Otherwise each earns little: some who take a tenth each would have the whole loop.
    """

    _resting: ClassVar[int] = 0

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._left = BURST_SECONDS
        self._at = clock()
        self.is_resting = False

    def delay_after(self, seconds: float) -> float:
        """Note what was taken; return for how long to rest: the longer, the more others rest."""
        now = self._clock()
        earned = (now - self._at) * LEAST
        self._left, self._at = min(BURST_SECONDS, self._left + earned) - seconds, now
        if self._left >= 0:
            return 0.0
        return -self._left / SHARE * (1 + CpuShare._resting)

    def rest(self, *, is_resting: bool) -> None:
        """Begin to rest, or end it; then what was owed is paid, and nothing else is earned."""
        CpuShare._resting += is_resting - self.is_resting
        if self.is_resting and not is_resting:
            self._left, self._at = max(0.0, self._left), self._clock()
        self.is_resting = is_resting


class ReadThrottle:
    """What a connection of Daphne's hands to its WebSocket; ``on_resting`` is called where that rests."""

    def __init__(self, protocol: Any, limit: int, on_resting: Callable[[], None]) -> None:
        self._protocol = protocol
        self._limit = limit
        self._on_resting = on_resting
        self._taken_in: Callable[[bytes], None] = protocol.dataReceived
        self._waiting = b""
        self._cpu_share = CpuShare()
        protocol.dataReceived = self._came

    @property
    def is_resting(self) -> bool:
        """Whether the peer is not to be read now."""
        return self._cpu_share.is_resting

    def _came(self, data: bytes) -> None:
        self._waiting += data
        if not self.is_resting:
            self._take_in()

    def _take_in(self) -> None:
        taken = 0.0
        while self._waiting and taken < TURN_SECONDS:
            piece, self._waiting = self._waiting[:PIECE_BYTES], self._waiting[PIECE_BYTES:]
            # The time of this thread, not of the clock: on a busy machine others had the rest.
            began = thread_time()
            self._taken_in(piece)
            taken += thread_time() - began
            self._bound_parts()
        seconds = self._cpu_share.delay_after(taken)
        if seconds or self._waiting:
            self._cpu_share.rest(is_resting=True)
            self._on_resting()
            asyncio.get_running_loop().call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._cpu_share.rest(is_resting=False)
        self._take_in()
        if not self.is_resting:
            self._on_resting()

    def _bound_parts(self) -> None:
        """Close where a message has more parts than it may have bytes: most of them are empty."""
        protocol = self._protocol
        parts = getattr(protocol, "message_data", None)
        if parts and len(parts) > self._limit and protocol.state == protocol.STATE_OPEN:
            reason = f"received a WebSocket message in more than {self._limit} parts"
            protocol.sendCloseFrame(code=TOO_LONG, reasonUtf8=reason.encode())


Send = Callable[[dict[str, Any]], Awaitable[None]]

SCOPE_KEY: Final = "psqlmessages.transport"
# A reader so slow that it was closed has to read what waits before the reason.
CLOSE_SECONDS: Final = 30
REASON_BYTES: Final = 123


class Transport:
    """A WebSocket of a server whose ``send`` waits by itself while the reader is slow."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_accepted = False

    @property
    def scheme(self) -> str:
        """The scheme of the request if the server leaves it out of the scope, else ""."""
        return ""

    async def accept(self) -> None:
        """Answer the handshake."""
        self.is_accepted = True
        await self._send({"type": "websocket.accept"})

    async def send(self, packet: EncodedFrame) -> None:
        """Send one frame; nothing happens where the WebSocket is closed."""
        await self._unless_closed({"type": "websocket.send", "text": packet.text})

    @property
    def takes_now(self) -> bool:
        """Whether frames can be given at once; else each has to be sent, and waited for."""
        return False

    def give(self, framed: bytes, packets: Sequence[EncodedFrame]) -> None:
        """Send frames at once; ``framed`` is all of them. Nothing happens where it is closed."""
        raise TypeError("this transport has to be waited for")

    async def close(self, code: int, reason: str) -> None:
        """Close it, from this side; nothing happens where it is closed."""
        await self._unless_closed({"type": "websocket.close", "code": code, "reason": reason})

    async def writable(self) -> None:
        """Wait until the server can take more."""

    def hold_reading(self, *, is_held: bool) -> None:
        """Stop taking frames in from the peer, or go on."""

    @property
    def is_ending(self) -> bool:
        """Whether the WebSocket has ended, but bytes still wait for a peer to take them."""
        return False

    def abort(self) -> None:
        """End the connection at once, whatever waits."""

    async def _unless_closed(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError:
            # ASGI: send raises a subclass of it once the peer has gone.
            return


class DaphneTransport(Transport):
    """A WebSocket of Daphne, whose ``send`` never waits, however much the reader leaves."""

    def __init__(self, send: Send, protocol: Any, limit: int) -> None:
        super().__init__(send)
        self._protocol = protocol
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_held = False
        self._limit = protocol.maxMessagePayloadSize = protocol.maxFramePayloadSize = limit
        self._has_extensions = False
        self._connection: Any = None
        # Else a frame that is too long just ends the connection: nobody learns of 1009.
        protocol.failByDrop = False
        protocol.closeHandshakeTimeout = CLOSE_SECONDS
        self._reading = ReadThrottle(protocol, limit, self._read_or_not)
        # A body of the request, of whatever length, would be taken in at once, as frames.
        protocol.data = b""
        # What comes before the handshake is answered would be kept, without limit.
        self._read_or_not()

    @property
    def scheme(self) -> str:
        """The scheme of the request, which Daphne leaves out of the scope."""
        interfaces: Any = sys.modules["twisted.internet.interfaces"]
        if interfaces.ISSLTransport.providedBy(self._protocol.transport):
            return "wss"
        # With --proxy-headers, as the proxy says.
        return "wss" if getattr(self._protocol, "client_scheme", "") == "https" else "ws"

    async def accept(self) -> None:
        """Answer the handshake, and learn from now on when the buffer is full."""
        await super().accept()
        self._read_or_not()
        if self._is_open:
            # The HTTP connection that this was before is still registered.
            self._protocol.unregisterProducer()
            self._protocol.registerProducer(_Producer(self), True)
            self._has_extensions = bool(self._protocol.websocket_extensions_in_use)
            self._connection = connection_of(self._protocol.transport)

    async def send(self, packet: EncodedFrame) -> None:
        """Send one frame; nothing happens where the WebSocket is closed."""
        self.give(packet.framed, (packet,))

    @property
    def takes_now(self) -> bool:
        """Whether the reader has taken enough of what was given before."""
        return self._can_write.is_set()

    def give(self, framed: bytes, packets: Sequence[EncodedFrame]) -> None:
        """Send frames at once; ``framed`` is all of them. Nothing happens where it is closed."""
        protocol = self._protocol
        if protocol.state != protocol.STATE_OPEN:
            return
        if self._has_extensions or protocol.send_queue:
            for packet in packets:
                self._send_by_autobahn(packet.text)
        elif self._connection is not None:
            write(self._connection, framed)
        else:
            protocol.transport.write(framed)

    def _send_by_autobahn(self, text: str) -> None:
        # autobahn refuses to send, too, what exceeds the limit of what comes in.
        self._protocol.maxMessagePayloadSize = 0
        try:
            self._protocol.sendMessage(text.encode(), False)
        finally:
            self._protocol.maxMessagePayloadSize = self._limit

    async def close(self, code: int, reason: str) -> None:
        """Close it, with the reason, which Daphne itself would leave out."""
        if self._is_open:
            self._protocol.sendCloseFrame(code=code, reasonUtf8=_cut(reason))
        # The peer's answer has to be read, even where it floods.
        self.hold_reading(is_held=False)

    async def writable(self) -> None:
        """Wait until what was sent has left."""
        await self._can_write.wait()

    def hold_reading(self, *, is_held: bool) -> None:
        """Stop taking frames in from the peer, or go on."""
        self._is_held = is_held
        self._read_or_not()

    @property
    def is_ending(self) -> bool:
        """Whether the WebSocket has ended, but bytes still wait for a peer to take them."""
        return bool(self._protocol.state == self._protocol.STATE_CLOSED)

    def abort(self) -> None:
        """End the connection at once, whatever waits."""
        self._protocol.transport.abortConnection()

    def is_full(self, is_full: bool) -> None:
        """Take note of the buffer's state, told by Twisted."""
        if is_full:
            self._can_write.clear()
        else:
            self._can_write.set()
        self._read_or_not()

    @property
    def _is_open(self) -> bool:
        return bool(self._protocol.state == self._protocol.STATE_OPEN)

    def _read_or_not(self) -> None:
        # Each ping read is a pong in the buffer, so who does not read is not read.
        may_read = self.is_accepted and not self._reading.is_resting
        if self._is_open:
            may_read = may_read and self._can_write.is_set() and not self._is_held
        if not self.is_ending:
            transport = self._protocol.transport
            (transport.resumeProducing if may_read else transport.pauseProducing)()


class _Producer:
    """What Twisted tells that a connection's buffer is full, and is empty."""

    def __init__(self, transport: DaphneTransport) -> None:
        self._transport = transport

    def pauseProducing(self) -> None:  # noqa: N802
        self._transport.is_full(True)

    def resumeProducing(self) -> None:  # noqa: N802
        self._transport.is_full(False)

    def stopProducing(self) -> None:  # noqa: N802
        self._transport.is_full(False)


def transport_of(send: Send, limit: int) -> Transport:
    """Find out which server an ASGI ``send`` belongs to; ``limit``: bytes of a frame coming in.

    ``send`` is the one that the server gave to the outermost application.
    """
    daphne: Any = sys.modules.get("daphne.server")
    if (
        daphne is not None
        and isinstance(send, functools.partial)
        and isinstance(getattr(send.func, "__self__", None), daphne.Server)
        and hasattr(send.args[0], "sendCloseFrame")
    ):
        return DaphneTransport(send, send.args[0], limit)
    return Transport(send)


def _cut(reason: str) -> bytes:
    """Cut a reason to what a close frame holds, at the end of a character."""
    return reason.encode()[:REASON_BYTES].decode(errors="ignore").encode()
