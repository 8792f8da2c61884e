"""Limits that Daphne lacks: on the time for a request's header, and on the end of the process.

Imported in a Daphne only: it needs Twisted.
"""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.web.http import HTTPChannel, HTTPFactory

from psqlmessages.conf import get_settings
from psqlmessages.stopping import end_within

# Twisted chooses its class when it is imported.
_reactor: Any = reactor


def register() -> None:
    """Set the limits when the server runs; called once, when the app is ready."""
    # Daphne listens before its reactor runs.
    _reactor.addSystemEventTrigger("after", "startup", _limit_requests)
    _reactor.addSystemEventTrigger("before", "shutdown", _limit_end)


def _limit_end() -> None:
    """End the process in time, though a thread of it may hang: Python waits for all threads."""
    end_within(get_settings().STOP_SECONDS)


def _limit_requests() -> None:
    """Limit the time that a client has for the header of its request, on all ports."""
    LimitedChannel.header_seconds = get_settings().REQUEST_SECONDS
    for port in _reactor.getReaders():
        factory = getattr(port, "factory", None)
        # With TLS it is within another.
        factory = getattr(factory, "wrappedFactory", factory)
        if isinstance(factory, HTTPFactory):
            _limit_headers(factory)


def _limit_headers(factory: Any) -> None:
    usual = factory.protocol

    def protocol() -> Any:
        made = usual()
        # What chooses between HTTP/1.1 and HTTP/2, when the first bytes come, starts with this.
        if type(getattr(made, "_channel", None)) is HTTPChannel:
            made._channel = LimitedChannel()
        return made

    factory.protocol = protocol


class LimitedChannel(HTTPChannel):
    """A connection of HTTP/1.1 that ends if the header of a request takes too long.

    By itself Twisted waits as long as a byte comes every minute.
    """

    header_seconds: float
    _deadline: Any = None

    def connectionMade(self) -> None:  # noqa: N802
        """Wait for the first request."""
        self._wait_for_header()
        super().connectionMade()

    def lineReceived(self, line: bytes) -> None:  # noqa: N802
        """Take a line of the header, perhaps the first one of a further request."""
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
