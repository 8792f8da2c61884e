"""A pytest plugin that starts a PostgreSQL for the tests, before Django reads its settings.

POSTGRES_BIN=DIR   use the programs of another PostgreSQL than the embedded one
"""

import fcntl
import gc
import os
import resource
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from project.postgres import CLUSTERS, Server, binaries_of_wheel
from tests.migrated_cluster import copy_cluster, major_version

# Tests kill servers but not the machine, so written data survive without fsync.
SETTINGS = {"plpgsql.extra_errors": "all", "max_prepared_transactions": "5", "fsync": "off"}

SERVER = pytest.StashKey[Server]()
STOP_SITES = pytest.StashKey[list[Callable[[], None]]]()


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Start a server before pytest-django reads the settings, which it does in this hook."""
    # This process may open more files: the usual soft limit is 1,024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if early_config.known_args_namespace.numprocesses and "PYTEST_XDIST_WORKER" not in os.environ:
        # This process only distributes tests. Each worker calls this hook and starts a server.
        os.environ["DATABASE_URL"] = "postgresql://127.0.0.1:1/no-server-here"
        return (yield)
    stack = ExitStack()
    early_config.add_cleanup(stack.close)
    server = stack.enter_context(exclusive_server())
    early_config.stash[SERVER] = server
    os.environ["DATABASE_URL"] = server.url()
    return (yield)


# What takes a minute or more starts first: these tests, apart from the others of their files, then
# these files. If it started last, one process would still run it when the others have finished.
LONG_TESTS = (
    "tests/django/test_pages.py::test_the_pages_lead_a_newcomer_through_the_order_flow[3]",
    "tests/web/test_browser.py::test_pages_are_accessible_and_show_names_as_text",
)
LONG_FILES = ("tests/pipeline/test_archive.py", "tests/web/test_browser.py")


class SuiteScheduling(LoadFileScheduling):
    """Give each file to one process, and all files that share a Spark session to the same one.

    Spark takes ten seconds to start, and ten more until its code is compiled.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid in LONG_TESTS:
            return nodeid
        file = str(super()._split_scope(nodeid))
        return "tests/pipeline" if file.startswith("tests/pipeline/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SuiteScheduling | None:
    """Replace the scheduler of `--dist loadfile`."""
    config.option.loadscopereorder = False  # it would start files with few tests last
    return SuiteScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Let no garbage collection look through all that was imported and collected."""
    gc.collect()
    gc.freeze()


def uses(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start what is long first, then the files with the most tests, last those with sites.

    In a file, tests with a site come last, so that it need not start again, and behind them those
    with a browser: once it has started, `asyncio.run` is refused.
    """
    files = list(dict.fromkeys(item.path for item in items))
    if not config.getoption("random_order_enabled", False):
        tests_of = Counter(item.path for item in items)
        with_sites = {item.path for item in items if uses(item, "sites")}
        long = {config.rootpath / file for file in LONG_FILES}
        files.sort(key=lambda path: (path not in long, path in with_sites, -tests_of[path]))
    places = {path: place for place, path in enumerate(files)}
    items.sort(key=lambda item: (
        item.nodeid not in LONG_TESTS, places[item.path], uses(item, "sites"),
        uses(item, "browser"),
    ))  # fmt: skip


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop the sites of earlier tests: they would do the housekeeping that other tests expect.

    They stay if the test has no database.
    """
    is_beside = uses(item, "sites") or not any(uses(item, each) for each in ("server", "db"))
    for stop in [] if is_beside else item.config.stash.get(STOP_SITES, []):
        stop()


def pytest_report_header() -> str:
    return f"postgresql: {major_version(binaries_under_test())}"


def binaries_under_test() -> Path:
    return Path(os.environ.get("POSTGRES_BIN") or binaries_of_wheel(18))


@contextmanager
def exclusive_server() -> Iterator[Server]:
    """Start a server that no other run of the tests uses, and stop it at the end."""
    binaries = binaries_under_test()
    name = f"test-{major_version(binaries)}"
    for number in count(1):
        folder = CLUSTERS / (name if number == 1 else f"{name}-{number}")
        server = Server(folder, binaries, SETTINGS)
        server.home.prepare()
        with (server.home.requested_folder / "run.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            copy_cluster(server)
            server.start()
            yield server
            server.stop()
            return
