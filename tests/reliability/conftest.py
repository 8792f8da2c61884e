"""Servers that the tests of faults may stop, kill and fill."""

from collections.abc import Iterator

import pytest

from tests.conftest import TestedServer
from tests.own_server import own_server
from tests.servers import SERVER
from tests.sql.conftest import World, world

__all__ = ["world"]


@pytest.fixture(scope="module")
def own(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Iterator[TestedServer]:
    """A server of the module's own, migrated, with the module's `SERVER_SETTINGS`, if any.

    The module's `need_server`, if any, skips where these programs of PostgreSQL cannot do.
    """
    folder, binaries = tmp_path_factory.mktemp("own"), pytestconfig.stash[SERVER].binaries
    if (need := getattr(request.module, "need_server", None)) is not None:
        need(binaries)
    settings = getattr(request.module, "SERVER_SETTINGS", None)
    with own_server(folder, binaries, settings=settings) as tested:
        yield tested


@pytest.fixture
def own_world(own: TestedServer) -> Iterator[World]:
    """The module's own server, running and empty."""
    own.server.start()
    world = World(own)
    yield world
    world.close()
