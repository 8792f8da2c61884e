"""Free TCP ports for servers that use the same port again after a restart."""

import random
import socket

# Below Linux's range for outgoing connections. Otherwise an outgoing connection may occupy the port
# of a stopped server, and a client that reconnects to that port may connect to itself.
PORTS = range(20_000, 32_768)
MAX_ATTEMPTS = 1_000


def is_free(port: int) -> bool:
    """Return whether a server can listen on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        # PostgreSQL also sets this option, so connections in TIME_WAIT do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Choose a random free port; raise OSError if none is found."""
    for _ in range(MAX_ATTEMPTS):
        port = random.choice(PORTS)  # noqa: S311 - not a secret
        if is_free(port):
            return port
    raise OSError(f"There is no free port from {PORTS.start} to {PORTS.stop - 1} of 127.0.0.1.")
