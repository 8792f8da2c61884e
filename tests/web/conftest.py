"""Fixtures of the web tests: sites, served by real Daphne processes on the test database."""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from project.postgres import Server
from psqlmessages.relay.hub import Hub
from tests.conftest import TestedServer
from tests.servers import STOP_SITES
from tests.sql.conftest import World, pair, world
from tests.web.browser import browser, visitors
from tests.web.pages import admin, database, impatient
from tests.web.receivers import QUICK
from tests.web.site import Site
from tests.web.sockets import Visitor

# Fixtures are found here by their names.
__all__ = ["admin", "browser", "database", "impatient", "pair", "visitors", "world"]

# The hub connects as the owner, as Django does.
RELAY_RULES = (
    f"{Server.owner} web.* Topic ROOM RW 60", f"{Server.owner} web.* Topic WEB.* RW 60",
    f"{Server.owner} web.* Rpc web.* W 60", f"{Server.owner} web.* Rpc OTHER W 60",
    "user2 OTHER Topic ROOM RW 60", "user2 OTHER Rpc web.* W 60",
)  # fmt: skip
# Timeouts for a machine that stands still for seconds.
PATIENT = {
    "psqlmessages.monitor.healthz._TIMEOUT_SECONDS": 60,
    "psqlmessages.monitor.metrics._TIMEOUT_SECONDS": 60,
    "psqlmessages.monitor.metrics._QUERY_TIMEOUT_SECONDS": 60,
    "psqlmessages.monitor.viewer.READ_TIMEOUT_SECONDS": 60,
}


class Sites:
    """The processes of this run, one for each set of settings."""

    def __init__(self, server: TestedServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._started: dict[str, Site] = {}
        self.of_this_test: list[Site] = []

    def get(self, **given: Any) -> Site:
        key = json.dumps(given, sort_keys=True)
        site = self._started.get(key)
        if site is None:
            site = self._started[key] = Site(self._server, self._folder, given)
        if site not in self.of_this_test:
            site.forget_log()
            self.of_this_test.append(site)
        if site.process is None or site.process.poll() is not None:
            site.start()
        return site

    def stop(self) -> None:
        for site in self._started.values():
            site.ask_to_stop()
        for site in self._started.values():
            site.ended()


@pytest.fixture(scope="session")
def sites(server: TestedServer, tmp_path_factory, pytestconfig) -> Iterator[Sites]:
    sites = Sites(server, tmp_path_factory.mktemp("sites"))
    # Each module that imports this fixture has its own sites.
    pytestconfig.stash.setdefault(STOP_SITES, []).append(sites.stop)
    yield sites
    sites.stop()


@pytest.fixture
def new_site(sites: Sites, world: World, django_db_blocker) -> Iterator[Callable[..., Site]]:
    """Start a site with Django settings, as in `new_site(PSQLMESSAGES={…})`; delete its users."""
    sites.of_this_test.clear()
    with django_db_blocker.unblock():
        yield sites.get
        used = sites.of_this_test
        faults = [fault for site in used for fault in site.faults()]
        for site in used:
            site.forget_users()
    assert not faults, f"the log of the site has {faults}"


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    """The example project, served by Daphne: `site.url`, `site.ws_url`, `site.login(username)`."""
    return new_site()


@pytest.fixture
def relay(world: World) -> World:
    """Rules for web users as web.*, and for OTHER of user2."""
    world.rules(*RELAY_RULES)
    return world


@pytest.fixture
def hub(dsn: str, request) -> Hub:
    """A hub of the module's `dsn`, for tests that run `in_loop`; a parameter is its options."""
    return Hub(dsn, options=getattr(request, "param", QUICK))


@pytest.fixture
def connect(site: Site) -> Iterator[Callable[..., Visitor]]:
    """Open a WebSocket with any cookie, token, origin and path."""
    with ExitStack() as opened:
        yield lambda **given: opened.enter_context(closing(Visitor(site, **given)))


@pytest.fixture
def enter(site: Site, relay: World) -> Iterator[Callable[..., Visitor]]:
    """Open a WebSocket as a user with the web identity web.*, and register a node."""
    opened = ExitStack()

    def open_one(username: str, ident: str = "", *, at: Site = site, **options: Any) -> Visitor:
        at.user(username, idents=["web.*"])
        visitor = Visitor(at, cookie=at.login(username), **options)
        opened.callback(visitor.close)
        if ident:
            visitor.ok("init", ident=ident)
        return visitor

    with opened:
        yield open_one
    relay.wait_for("SELECT NOT EXISTS (SELECT FROM psqlmessages_client WHERE ident LIKE 'web.%%')")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Show the logs of the sites where a test failed."""
    report = yield
    sites = getattr(item, "funcargs", {}).get("sites")
    if report.failed and isinstance(sites, Sites):
        report.sections += [(f"log of {site.url}", site.log()) for site in sites.of_this_test]
    return report
