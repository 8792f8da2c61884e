"""The embedded PostgreSQL: its own server for who has none, started on demand.

Who may want it: the settings of the example project, the tests, and ``python -m project.postgres``.
"""

from pathlib import Path

from project.postgres.binaries import binaries_of_wheel
from project.postgres.errors import ServerError
from project.postgres.server import Server

CLUSTERS = Path(__file__).resolve().parents[2] / ".postgres"

__all__ = ["CLUSTERS", "Server", "ServerError", "binaries_of_wheel", "embedded"]


def embedded() -> Server:
    """Return the server of the example project; it is not started here."""
    return Server(CLUSTERS / "18", binaries_of_wheel(18))
