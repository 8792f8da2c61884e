"""Direct: writes to a plain TCP connection of Twisted without waiting for its reactor.

docs/adr/0013-frames-of-a-moment-leave-in-one-write.md says why.
"""

from __future__ import annotations

import sys
from typing import Any, Final

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
