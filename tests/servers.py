"""A pytest plugin: the tests' own PostgreSQL, there before Django's settings ask for a database.

POSTGRES_BIN=DIR   the programs of another PostgreSQL than the embedded one
KEEP_POSTGRES=1    leaves the server running at the end
"""

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from project.postgres import CLUSTERS, Server, binaries_of_wheel
from project.postgres.binaries import major_version

SETTINGS = {"plpgsql.extra_errors": "all", "max_prepared_transactions": "5"}

SERVER = pytest.StashKey[Server]()


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Give pytest-django, which reads the settings in this hook, a server of the tests' own."""
    until_the_end = ExitStack()
    early_config.add_cleanup(until_the_end.close)
    server = until_the_end.enter_context(cluster_of_this_run())
    early_config.stash[SERVER] = server
    os.environ["DATABASE_URL"] = server.url()
    return (yield)


def pytest_report_header(config: pytest.Config) -> str:
    """Say which PostgreSQL is tested."""
    server = config.stash[SERVER]
    return f"postgresql: {major_version(server.binaries)}, {server.home.folder}"


def tested_binaries() -> Path:
    """Return the folder of the PostgreSQL that is tested."""
    return Path(os.environ.get("POSTGRES_BIN") or binaries_of_wheel(18))


@contextmanager
def cluster_of_this_run() -> Iterator[Server]:
    """Start a server that no other run of the tests uses; runs at the same time get their own."""
    binaries = tested_binaries()
    name = f"test-{major_version(binaries)}"
    for number in count(1):
        server = Server(
            CLUSTERS / (name if number == 1 else f"{name}-{number}"), binaries, SETTINGS
        )
        server.home.prepare()
        with (server.home.asked_folder / "run.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            server.start()
            yield server
            if os.environ.get("KEEP_POSTGRES") != "1":
                server.stop()
            return
