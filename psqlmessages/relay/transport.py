"""Transport: one WebSocket as its server offers it; with Daphne, bounded in both directions.

docs/adr/0005-daphne-is-bounded-from-outside.md says why.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from psqlmessages.relay import direct
from psqlmessages.relay.packets import Packet
from psqlmessages.relay.reading import Reading

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

    async def send(self, packet: Packet) -> None:
        """Send one frame; nothing happens where the WebSocket is closed."""
        await self._unless_closed({"type": "websocket.send", "text": packet.text})

    @property
    def takes_now(self) -> bool:
        """Whether frames can be given at once; else each has to be sent, and waited for."""
        return False

    def give(self, framed: bytes, packets: Sequence[Packet]) -> None:
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
        self._reading = Reading(protocol, limit, self._read_or_not)
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
            self._connection = direct.connection_of(self._protocol.transport)

    async def send(self, packet: Packet) -> None:
        """Send one frame; nothing happens where the WebSocket is closed."""
        self.give(packet.framed, (packet,))

    @property
    def takes_now(self) -> bool:
        """Whether the reader has taken enough of what was given before."""
        return self._can_write.is_set()

    def give(self, framed: bytes, packets: Sequence[Packet]) -> None:
        """Send frames at once; ``framed`` is all of them. Nothing happens where it is closed."""
        protocol = self._protocol
        if protocol.state != protocol.STATE_OPEN:
            return
        if self._has_extensions or protocol.send_queue:
            for packet in packets:
                self._send_by_autobahn(packet.text)
        elif self._connection is not None:
            direct.write(self._connection, framed)
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
