"""Temporary PostgreSQL servers, which tests may stop and kill."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg

from project.postgres import Server
from tests.conftest import TestedServer, create_roles

ROOT = Path(__file__).parents[1]


def migrate(server: Server) -> None:
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
        env={**os.environ, "DATABASE_URL": server.url()}, cwd=ROOT, check=True,
    )  # fmt: skip


@contextmanager
def temporary_server(
    folder: Path, binaries: Path, *, settings: Mapping[str, str] | None = None
) -> Iterator[TestedServer]:
    """Start and migrate a server in a folder, create the tests' roles; remove it at the end."""
    folder.chmod(0o755)
    server = Server(folder / "server", binaries, settings)
    try:
        migrate(server.start())
        with psycopg.connect(server.superuser_url(Server.owner), autocommit=True) as superuser:
            create_roles(superuser, server)
        yield TestedServer(server, Server.owner)
    finally:
        server.stop("immediate")
        server.home.remove()
