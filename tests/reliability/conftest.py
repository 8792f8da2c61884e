"""Servers that the reliability tests may stop, kill and fill."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.conftest import TestedServer
from tests.servers import SERVER
from tests.sql.conftest import World, world
from tests.temporary_server import temporary_server

__all__ = ["world"]

# PostgreSQL then detects deadlocks sooner.
SETTINGS = {"deadlock_timeout": "300ms"}
CREATED = pytest.StashKey[dict[str, Any]]()


def create_once(config: pytest.Config, key: str, create: Callable[[ExitStack], Any]) -> Any:
    """Create something once for all tests of a run; the stack is closed at the end of the run."""
    created = config.stash.setdefault(CREATED, {})
    if key not in created:
        stack = ExitStack()
        config.add_cleanup(stack.close)
        created[key] = create(stack)
    return created[key]


@pytest.fixture(scope="module")
def own_server(request, tmp_path_factory, pytestconfig) -> TestedServer:
    """A migrated server with the module's `SERVER_SETTINGS`; modules with equal settings share it.

    If the module has a function `need_server`, it skips tests on unsuitable versions.
    """
    binaries = pytestconfig.stash[SERVER].binaries
    if (need := getattr(request.module, "need_server", None)) is not None:
        need(binaries)
    settings = SETTINGS | getattr(request.module, "SERVER_SETTINGS", {})

    def create(stack: ExitStack) -> TestedServer:
        folder = tmp_path_factory.mktemp("own")
        return stack.enter_context(temporary_server(folder, binaries, settings=settings))

    tested: TestedServer = create_once(pytestconfig, repr(sorted(settings.items())), create)
    tested.server.start()
    return tested


@pytest.fixture
def own_world(own_server: TestedServer) -> Iterator[World]:
    """The world of `own_server`, which is running and empty."""
    own_server.server.start()
    world = World(own_server)
    yield world
    world.close()
