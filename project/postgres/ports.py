"""Ports for servers that go away and come back to the same one."""

import random
import socket

# Below what Linux gives to outgoing connections. Else one may take the port of a server that is
# down: even a client that tries to reach just that server, which then talks to itself.
PORTS = range(20_000, 32_768)
TRIES = 1_000


def is_free(port: int) -> bool:
    """Whether a server could have this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        # As PostgreSQL does: connections that have just ended do not occupy a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Choose a free port by chance; OSError where all that were tried are taken."""
    for _ in range(TRIES):
        port = random.choice(PORTS)  # noqa: S311  no secret
        if is_free(port):
            return port
    raise OSError(f"No free port was found from {PORTS.start} to {PORTS.stop - 1} of 127.0.0.1.")
