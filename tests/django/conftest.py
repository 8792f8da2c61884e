"""Fixtures of the Django tests: a project whose node is "shop", and programs of other roles."""

from collections.abc import Iterator

import pytest
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.calling import close_callers
from tests.conftest import TestedServer
from tests.sql.conftest import World

RULES = (
    f"{Server.owner} shop Topic ORDERS RW 60",
    f"{Server.owner} shop.* Rpc PRICES W 60",
    f"{Server.owner} worker* Topic ORDERS* RW 60",
    f"{Server.owner} PRICES Rpc NOBODY W 60",
    "user2 LISTENER Topic ORDERS* RW 60",
    "user2 ASKER Rpc worker* W 60",
    "user2 ASKER Topic ORDERS W 60",
)


@pytest.fixture
def shop(transactional_db: None, settings: Settings, server: TestedServer) -> Iterator[World]:
    """The project's node may send to ORDERS and ask PRICES, in an else empty message system."""
    settings.PSQLMESSAGES = {"NODE": "shop"}
    world = World(server)
    world.rules(*RULES)
    yield world
    close_callers()
    world.close()
