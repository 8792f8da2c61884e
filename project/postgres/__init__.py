"""Embedded PostgreSQL: a private server for users without a server, started on demand.

The settings of the example project, the tests and ``python -m project.postgres`` use it.
"""

from pathlib import Path

from project.postgres.binaries import binaries_of_wheel
from project.postgres.errors import ServerError
from project.postgres.server import Server

CLUSTERS = Path(__file__).resolve().parents[2] / ".postgres"

__all__ = ["CLUSTERS", "Server", "ServerError", "binaries_of_wheel", "embedded"]


def embedded() -> Server:
    """Return the server of the example project, without starting it."""
    return Server(CLUSTERS / "18", binaries_of_wheel(18))
