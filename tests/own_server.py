"""A PostgreSQL of a test's own, migrated, with the roles of the tests: to be stopped and killed."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg

from project.postgres import Server
from tests.conftest import TestedServer, make_roles

ROOT = Path(__file__).parents[1]


def migrated(server: Server) -> Server:
    """Install everything in the owner's database of a server that runs."""
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
        env={**os.environ, "DATABASE_URL": server.url()},
        cwd=ROOT,
        check=True,
    )
    return server


@contextmanager
def own_server(
    folder: Path, binaries: Path, *, rules: str = "", settings: Mapping[str, str] | None = None
) -> Iterator[TestedServer]:
    """Start it in a folder, and remove it at the end whatever became of it.

    `rules`: what follows VALUES in an INSERT: ``('role', 'ident', 'Topic', 'dest', 'RW', 5), ...``
    """
    folder.chmod(0o755)
    server = Server(folder / "server", binaries, settings)
    try:
        migrated(server.start())
        with psycopg.connect(server.superuser_url(Server.owner), autocommit=True) as superuser:
            make_roles(superuser, server)
            if rules:
                superuser.execute(
                    "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES "
                    + rules
                )
        yield TestedServer(server, Server.owner)
    finally:
        server.stop("immediate")
        server.home.remove()
