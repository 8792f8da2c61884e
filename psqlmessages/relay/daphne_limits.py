"""Limits that Daphne lacks: the time for a request's header, and the time for the process to end.

Only a process that runs Daphne imports this module: it needs Twisted.
"""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.web.http import HTTPChannel, HTTPFactory

from psqlmessages.conf import get_settings
from psqlmessages.shutdown import end_within

# Typed Any: Twisted chooses the reactor's class at import.
_reactor: Any = reactor


def register() -> None:
    """Set the limits when the server starts; called once, when the app is ready."""
    # Daphne opens its ports before the reactor starts.
    _reactor.addSystemEventTrigger("after", "startup", _limit_requests)
    # The process must end even if a thread hangs: Python waits for all threads.
    _reactor.addSystemEventTrigger(
        "before", "shutdown", lambda: end_within(get_settings().STOP_SECONDS)
    )


def _limit_requests() -> None:
    """Limit the time that a client has to send the header of a request, on all ports."""
    LimitedChannel.header_seconds = get_settings().REQUEST_SECONDS
    for port in _reactor.getReaders():
        factory = getattr(port, "factory", None)
        # With TLS, another factory wraps it.
        factory = getattr(factory, "wrappedFactory", factory)
        if isinstance(factory, HTTPFactory):
            _limit_headers(factory)


def _limit_headers(factory: Any) -> None:
    make_protocol = factory.protocol

    def make_limited_protocol() -> Any:
        protocol = make_protocol()
        # The protocol chooses between HTTP/1.1 and HTTP/2 at the first bytes; it starts with 1.1.
        if type(getattr(protocol, "_channel", None)) is HTTPChannel:
            protocol._channel = LimitedChannel()
        return protocol

    factory.protocol = make_limited_protocol


class LimitedChannel(HTTPChannel):
    """An HTTP/1.1 connection that closes if the header of a request takes too long.

    Twisted alone waits as long as a byte arrives every minute.
    """

    header_seconds: float
    _deadline: Any = None

    def connectionMade(self) -> None:  # noqa: N802
        """Start the time limit of the first request."""
        self._start_deadline()
        super().connectionMade()

    def lineReceived(self, line: bytes) -> None:  # noqa: N802
        """Handle a header line; the first line of another request starts its time limit."""
        if self._deadline is None:
            self._start_deadline()
        super().lineReceived(line)

    def allHeadersReceived(self) -> None:  # noqa: N802
        """Cancel the time limit."""
        self._cancel_deadline()
        super().allHeadersReceived()

    def connectionLost(self, reason: Any) -> None:  # noqa: N802
        """Cancel the time limit."""
        self._cancel_deadline()
        super().connectionLost(reason)

    def _start_deadline(self) -> None:
        self._deadline = _reactor.callLater(self.header_seconds, self._on_timeout)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_timeout(self) -> None:
        self._deadline = None
        self.transport.abortConnection()
