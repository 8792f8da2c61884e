"""Limits that Daphne lacks: on the time for a request's header, and on the end of the process.

Imported only by a process of Daphne: it needs Twisted.
"""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.web.http import HTTPChannel, HTTPFactory

from psqlmessages.conf import get_settings
from psqlmessages.shutdown import end_within

# Typed Any: Twisted chooses the class of the reactor when it is imported.
_reactor: Any = reactor


def register() -> None:
    """Set the limits when the server runs; called once, when the app is ready."""
    # Daphne has opened its ports before the reactor runs.
    _reactor.addSystemEventTrigger("after", "startup", _limit_requests)
    _reactor.addSystemEventTrigger("before", "shutdown", _limit_end)


def _limit_end() -> None:
    """End the process in bounded time even if a thread hangs: Python waits for all threads."""
    end_within(get_settings().STOP_SECONDS)


def _limit_requests() -> None:
    """Limit the time that a client has for the header of its request, on all ports."""
    LimitedChannel.header_seconds = get_settings().REQUEST_SECONDS
    for port in _reactor.getReaders():
        factory = getattr(port, "factory", None)
        # With TLS it is wrapped in another factory.
        factory = getattr(factory, "wrappedFactory", factory)
        if isinstance(factory, HTTPFactory):
            _limit_headers(factory)


def _limit_headers(factory: Any) -> None:
    usual = factory.protocol

    def protocol() -> Any:
        made = usual()
        # The protocol chooses between HTTP/1.1 and HTTP/2 at the first bytes; it starts with 1.1.
        if type(getattr(made, "_channel", None)) is HTTPChannel:
            made._channel = LimitedChannel()
        return made

    factory.protocol = protocol


class LimitedChannel(HTTPChannel):
    """A connection of HTTP/1.1 that ends if the header of a request takes too long.

    Twisted alone waits as long as a byte comes every minute.
    """

    header_seconds: float
    _deadline: Any = None

    def connectionMade(self) -> None:  # noqa: N802
        """Wait for the first request."""
        self._wait_for_header()
        super().connectionMade()

    def lineReceived(self, line: bytes) -> None:  # noqa: N802
        """Handle a line of a header; the first line of a further request starts the limit."""
        if self._deadline is None:
            self._wait_for_header()
        super().lineReceived(line)

    def allHeadersReceived(self) -> None:  # noqa: N802
        """Wait no more."""
        self._forget_deadline()
        super().allHeadersReceived()

    def connectionLost(self, reason: Any) -> None:  # noqa: N802
        """Wait no more."""
        self._forget_deadline()
        super().connectionLost(reason)

    def _wait_for_header(self) -> None:
        self._deadline = _reactor.callLater(self.header_seconds, self._give_up)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abortConnection()
