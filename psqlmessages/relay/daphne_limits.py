"""Limits that Daphne lacks: for the header of a request, and for the time to stop the process.

Only a process that runs Daphne imports this module: it needs Twisted.
"""

from __future__ import annotations

import json
from typing import Any, Final

from twisted.internet import reactor
from twisted.web.http import HTTPChannel, HTTPFactory

from psqlmessages.conf import get_settings
from psqlmessages.shutdown import exit_after

# Typed Any: Twisted chooses the reactor's class at import.
_reactor: Any = reactor


def register() -> None:
    """Set the limits when the server starts; called once, when the app is ready."""
    # Daphne opens its ports before the reactor starts.
    _reactor.addSystemEventTrigger("after", "startup", _limit_requests)
    # The process must end even if a thread hangs: Python waits for all threads.
    _reactor.addSystemEventTrigger(
        "before", "shutdown", lambda: exit_after(get_settings().STOP_SECONDS)
    )


def _limit_requests() -> None:
    """Limit the header of a request and the time that a client has to send it, on all ports."""
    LimitedChannel.header_seconds = get_settings().REQUEST_SECONDS
    for port in _reactor.getReaders():
        factory = getattr(port, "factory", None)
        # With TLS, another factory wraps the HTTP factory.
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


# Continue to read for this long before closing: closing with unread data may lose the answer.
_LINGER_SECONDS: Final = 2.0


class LimitedChannel(HTTPChannel):
    """An HTTP/1.1 connection with limits for the size of a header and the time to send it.

    Twisted itself has no total time limit: the client only has to send a byte every minute. And if
    Twisted refuses a header, the answer does not contain the reason.
    """

    header_seconds: float
    _deadline: Any = None
    _header_bytes = 0
    _is_refused = False

    def connectionMade(self) -> None:  # noqa: N802
        """Start the time limit of the first request."""
        self._start_deadline()
        super().connectionMade()

    def lineReceived(self, line: bytes) -> None:  # noqa: N802
        """Handle a header line; the first line of the next request starts a new time limit."""
        if self._deadline is None:
            self._start_deadline()
        self._header_bytes += len(line)
        if self._header_bytes > self.totalHeadersSize:
            self._refuse_header()
        elif not self._is_refused:
            super().lineReceived(line)

    def lineLengthExceeded(self, line: bytes) -> None:  # noqa: N802
        """Refuse a line that is too long, even before it is complete."""
        self._refuse_header()

    def allHeadersReceived(self) -> None:  # noqa: N802
        """Cancel the time limit."""
        self._cancel_deadline()
        super().allHeadersReceived()

    def connectionLost(self, reason: Any) -> None:  # noqa: N802
        """Cancel the time limit."""
        self._cancel_deadline()
        super().connectionLost(reason)

    def _refuse_header(self) -> None:
        """Answer 431, ignore further data for two seconds, then close."""
        if self._is_refused:
            return
        self._is_refused = True
        detail = f"the header of the request exceeds {self.totalHeadersSize // 1024} KiB"
        content = json.dumps({"detail": detail, "err": None}).encode()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(content), content)
        )
        self._cancel_deadline()
        self._deadline = _reactor.callLater(_LINGER_SECONDS, self._on_timeout)

    def _start_deadline(self) -> None:
        self._header_bytes = 0
        self._deadline = _reactor.callLater(self.header_seconds, self._on_timeout)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_timeout(self) -> None:
        self._deadline = None
        self.transport.abortConnection()
