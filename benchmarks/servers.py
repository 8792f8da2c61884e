"""Temporary PostgreSQL servers for benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from project.postgres import Server, binaries_of_wheel

ROOT = Path(__file__).parents[1]


@contextmanager
def temporary_server(settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start and migrate a server; remove it afterwards. POSTGRES_BIN may select its version."""
    binaries = Path(os.environ.get("POSTGRES_BIN") or binaries_of_wheel(18))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "server", binaries, settings)
        server.start()
        try:
            subprocess.run(
                [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
                env={**os.environ, "DATABASE_URL": server.url()},
                cwd=ROOT,
                check=True,
            )
            yield server
        finally:
            server.stop("fast")
            server.home.remove()
