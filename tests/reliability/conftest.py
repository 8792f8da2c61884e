"""Servers that the tests of faults may stop, kill and fill."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.conftest import TestedServer
from tests.own_server import own_server
from tests.servers import SERVER
from tests.sql.conftest import World, world

__all__ = ["world"]

# Deadlocks are found soon.
QUICK = {"deadlock_timeout": "300ms"}
KEPT = pytest.StashKey[dict[str, Any]]()


def kept(config: pytest.Config, key: str, make: Callable[[ExitStack], Any]) -> Any:
    """Make something once for all tests, whatever their order; the stack is closed at the end."""
    made = config.stash.setdefault(KEPT, {})
    if key not in made:
        stack = ExitStack()
        config.add_cleanup(stack.close)
        made[key] = make(stack)
    return made[key]


@pytest.fixture(scope="module")
def own(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> TestedServer:
    """A migrated server with the module's `SERVER_SETTINGS`, which modules of the same ones share.

    The module's `need_server`, if any, skips where these programs of PostgreSQL cannot do.
    """
    binaries = pytestconfig.stash[SERVER].binaries
    if (need := getattr(request.module, "need_server", None)) is not None:
        need(binaries)
    settings = QUICK | getattr(request.module, "SERVER_SETTINGS", {})

    def make(stack: ExitStack) -> TestedServer:
        folder = tmp_path_factory.mktemp("own")
        return stack.enter_context(own_server(folder, binaries, settings=settings))

    tested: TestedServer = kept(pytestconfig, repr(sorted(settings.items())), make)
    tested.server.start()
    return tested


@pytest.fixture
def own_world(own: TestedServer) -> Iterator[World]:
    """The module's own server, running and empty."""
    own.server.start()
    world = World(own)
    yield world
    world.close()
