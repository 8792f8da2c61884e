"""Temporary PostgreSQL servers, which tests may stop and kill."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from project.postgres import Server
from tests.conftest import TestedServer
from tests.migrated_cluster import copy_cluster


@contextmanager
def temporary_server(
    folder: Path, binaries: Path, *, settings: Mapping[str, str] | None = None
) -> Iterator[TestedServer]:
    """Start a migrated server with the tests' roles in a folder; remove it at the end."""
    folder.chmod(0o755)
    server = Server(folder / "server", binaries, settings)
    try:
        copy_cluster(server)
        yield TestedServer(server.start(), Server.owner)
    finally:
        server.stop("immediate")
        server.home.remove()
