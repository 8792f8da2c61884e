"""A pytest plugin: the tests' own PostgreSQL, there before Django's settings ask for a database.

POSTGRES_BIN=DIR   the programs of another PostgreSQL than the embedded one
KEEP_POSTGRES=1    leaves the server running at the end
"""

import fcntl
import os
import resource
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from project.postgres import CLUSTERS, Server, binaries_of_wheel
from project.postgres.binaries import major_version

SETTINGS = {"plpgsql.extra_errors": "all", "max_prepared_transactions": "5"}

SERVER = pytest.StashKey[Server]()


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Give pytest-django, which reads the settings in this hook, a server of the tests' own."""
    raise_limit_of_files()
    if early_config.known_args_namespace.numprocesses and "PYTEST_XDIST_WORKER" not in os.environ:
        # This process only hands out tests. Each worker comes here too, for its own server.
        os.environ["DATABASE_URL"] = "postgresql://127.0.0.1:1/no-server-here"
        return (yield)
    until_the_end = ExitStack()
    early_config.add_cleanup(until_the_end.close)
    server = until_the_end.enter_context(cluster_of_this_run())
    early_config.stash[SERVER] = server
    os.environ["DATABASE_URL"] = server.url()
    return (yield)


def raise_limit_of_files() -> None:
    """Let this process open as many files as it may: an ordinary user's soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class SparkOnce(LoadFileScheduling):
    """Give each file to one process, and all that share a Spark session to the same one.

    Spark takes ten seconds to start, and as long again until its code is compiled.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder, _, name = str(super()._split_scope(nodeid)).rpartition("/")
        is_sharing = folder == "tests/pipeline" and name != "test_faults.py"
        return folder if is_sharing else f"{folder}/{name}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SparkOnce | None:
    """Replace the scheduler of `--dist loadfile`."""
    return SparkOnce(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_report_header() -> str:
    """Say which PostgreSQL is tested."""
    return f"postgresql: {major_version(tested_binaries())}"


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
        with (server.home.requested_folder / "run.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            server.start()
            yield server
            if os.environ.get("KEEP_POSTGRES") != "1":
                server.stop()
            return
