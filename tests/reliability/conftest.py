"""Servers that the tests of faults may stop, kill and fill."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.conftest import TestedServer
from tests.own_server import own_server
from tests.servers import SERVER
from tests.sql.conftest import World, world

__all__ = ["world"]

# Deadlocks are found soon.
QUICK = {"deadlock_timeout": "300ms"}
OWN = pytest.StashKey[dict[str, TestedServer]]()


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
    servers = pytestconfig.stash.setdefault(OWN, {})
    key = repr(sorted(settings.items()))
    if key not in servers:
        stack = ExitStack()
        pytestconfig.add_cleanup(stack.close)
        folder = tmp_path_factory.mktemp("own")
        servers[key] = stack.enter_context(own_server(folder, binaries, settings=settings))
    servers[key].server.start()
    return servers[key]


@pytest.fixture
def own_world(own: TestedServer) -> Iterator[World]:
    """The module's own server, running and empty."""
    own.server.start()
    world = World(own)
    yield world
    world.close()
