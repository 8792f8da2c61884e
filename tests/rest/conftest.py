"""Fixtures of the API's tests: a site, users with tokens, and rules for their nodes."""

from collections.abc import Callable, Iterator

import pytest

from project.postgres import Server
from tests.rest.callers import Caller, bearer
from tests.sql.conftest import World
from tests.web.conftest import new_site, pytest_runtest_makereport, site, sites, world
from tests.web.site import Site

__all__ = ["new_site", "pytest_runtest_makereport", "site", "sites", "world"]

RULES = (
    "worker Queue orders* RW", "other Queue orders* RW", "pusher Queue orders* W",
    "taker Queue orders* R", "worker Topic ROOM* RW",
)  # fmt: skip


@pytest.fixture
def rest(world: World, site: Site) -> World:
    world.rules(*(f"{Server.owner} {rule} 60" for rule in RULES))
    return world


@pytest.fixture
def caller(site: Site, rest: World) -> Iterator[Callable[..., Caller]]:
    made: list[Caller] = []

    def make(username: str, *idents: str, **fields: object) -> Caller:
        made.append(Caller(site, bearer(site, username, *idents, **fields)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def worker(caller: Callable[..., Caller]) -> Caller:
    return caller("wanda", "worker")
