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
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[TestedServer]:
    """A server of the module's own, migrated."""
    folder = tmp_path_factory.mktemp("own")
    with own_server(folder, pytestconfig.stash[SERVER].binaries) as tested:
        yield tested


@pytest.fixture
def own_world(own: TestedServer) -> Iterator[World]:
    """The module's own server, running and empty."""
    own.server.start()
    world = World(own)
    yield world
    for program in world.programs:
        program.close()
