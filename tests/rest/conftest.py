"""Fixtures of the API's tests: a site, users with tokens, and rules for their nodes."""

from collections.abc import Callable, Iterator

import pytest

from project.postgres import Server
from tests.rest.callers import Caller, bearer
from tests.sql.conftest import World
from tests.web.conftest import new_site, pytest_runtest_makereport, site, sites, world
from tests.web.site import Site

# Fixtures are found here by their names.
__all__ = ["new_site", "pytest_runtest_makereport", "site", "sites", "world"]

RULES = (
    f"{Server.owner} worker Queue orders* RW 60",
    f"{Server.owner} other Queue orders* RW 60",
    f"{Server.owner} pusher Queue orders* W 60",
    f"{Server.owner} taker Queue orders* R 60",
    f"{Server.owner} worker Topic ROOM* RW 60",
)


@pytest.fixture
def rest(world: World, site: Site) -> World:
    """A message system with rules for the nodes of web users."""
    world.rules(*RULES)
    return world


@pytest.fixture
def caller(site: Site, rest: World) -> Iterator[Callable[..., Caller]]:
    """Make a caller for a user who may be some nodes."""
    made: list[Caller] = []

    def make(username: str, *idents: str, **fields: object) -> Caller:
        made.append(Caller(site, bearer(site, username, *idents, **fields)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def worker(caller: Callable[..., Caller]) -> Caller:
    """The user Wanda, who may be the node worker alone."""
    return caller("wanda", "worker")
