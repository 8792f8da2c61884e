"""Temporary PostgreSQL servers, which tests may stop and kill."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psycopg

from project.postgres import Server
from project.postgres.home import Home
from tests.conftest import TestedServer, create_roles

ROOT = Path(__file__).parents[1]


def migrate(server: Server) -> None:
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
        env={**os.environ, "DATABASE_URL": server.url()}, cwd=ROOT, check=True,
    )  # fmt: skip


@cache
def migrated_home(binaries: Path) -> Home:
    """Create a cluster with our tables and the tests' roles; temporary servers start as its copies.

    Creating one takes seven times as long as copying it.
    """
    folder = Path(tempfile.mkdtemp(prefix="migrated-"))
    folder.chmod(0o755)
    server = Server(folder / "server", binaries)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.home.remove)
    try:
        migrate(server.start())
        with psycopg.connect(server.superuser_url(Server.owner), autocommit=True) as superuser:
            create_roles(superuser, server)
    finally:
        server.stop()
    return server.home


@contextmanager
def temporary_server(
    folder: Path, binaries: Path, *, settings: Mapping[str, str] | None = None
) -> Iterator[TestedServer]:
    """Start a migrated server with the tests' roles in a folder; remove it at the end."""
    folder.chmod(0o755)
    server = Server(folder / "server", binaries, settings)
    server.home.prepare()
    try:
        for name in ("data", "passwords"):
            source = migrated_home(binaries).folder / name
            subprocess.run(["cp", "-a", source, server.home.folder / name], check=True)
        yield TestedServer(server.start(), Server.owner)
    finally:
        server.stop("immediate")
        server.home.remove()
