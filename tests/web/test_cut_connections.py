"""A site whose connections a firewall has forgotten, and one that ends while pages are open."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from time import monotonic
from uuid import uuid4

import pytest
from django.conf import settings
from websockets.exceptions import WebSocketException

from project.postgres import Server
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.reliability.counts import report, size
from tests.rest.callers import Caller, bearer
from tests.sql.conftest import World
from tests.web.browser import MONITOR_RULE
from tests.web.conftest import RELAY_RULES
from tests.web.site import Site
from tests.web.sockets import Visitor, Watcher

FAULT = "a firewall drops connections"
RULES = (*RELAY_RULES, MONITOR_RULE, f"{Server.owner} web.* Queue orders RW 60")
# In the full size, the site has the default settings.
CUT_SECONDS = size(1, 15)
QUICK = {"ANSWER_SECONDS": 1, "STOP_SECONDS": 3}
MESSAGES = {"NODE": "example", "METRICS": True} | (QUICK if size(1, 0) else {})
PATCHED = {"psqlmessages.rest.pool.ANSWER_SECONDS": size(2, 10)}
BACK_SECONDS = 60
END_SECONDS = 10
# Time for a busy machine.
GRACE = 5


@pytest.fixture
def far_site(
    server: TestedServer, world: World, proxy: Proxy, tmp_path: Path, django_db_blocker
) -> Iterator[Site]:
    """A site that reaches PostgreSQL through a proxy."""
    world.rules(*RULES)
    kept = ("ENGINE", "NAME", "USER", "PASSWORD", "OPTIONS")
    far = {key: settings.DATABASES["default"][key] for key in kept}
    databases = {"default": {**far, "HOST": "127.0.0.1", "PORT": proxy.port}}
    given = {"DATABASES": databases, "PSQLMESSAGES": MESSAGES, "PATCHED": PATCHED}
    site = Site(server, tmp_path, given)
    with django_db_blocker.unblock():
        site.user("admin", is_staff=True, is_superuser=True, idents=["web.*"])
        site.start()
        try:
            yield site
        finally:
            site.process.kill()
            site.process.wait()
            site.forget_users()


AWAY = (OSError, TimeoutError, WebSocketException, AssertionError)


class Uses:
    """The uses of a site that need PostgreSQL; each method returns whether one works."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._caller = Caller(site, bearer(site, "admin"))
        self.cookie = site.login("admin")
        self.node = self._node("web.node")

    def rest(self) -> bool:
        return self._caller.call("POST", "q/default/orders", b"x", ident="web.1").status == 201

    def websocket(self) -> bool:
        with suppress(*AWAY):
            self._node(f"web.{uuid4()}").close()
            return True
        return False

    def _node(self, ident: str) -> Visitor:
        visitor = Visitor(self._site, cookie=self.cookie)
        try:
            visitor.ok("init", ident=ident)
            visitor.ok("topic_listen", topic="ROOM")
        except BaseException:
            visitor.close()
            raise
        return visitor

    def monitor(self) -> bool:
        with suppress(*AWAY), closing(Watcher(self._site, self.cookie)) as watcher:
            return watcher.read()["state"]["is"] == "live"
        return False

    def page(self) -> bool:
        return self._site.get("/admin/", cookie=self.cookie)[0] == 200

    def healthz(self) -> bool:
        return self._site.get("/healthz")[0] == 200

    def metrics(self) -> bool:
        return 'psqlmessages_database_up{namespace="default"} 1.0' in self._site.get("/metrics")[1]

    def close(self) -> None:
        self.node.close()
        self._caller.close()


WAYS = ("rest", "websocket", "monitor", "page", "healthz", "metrics")


def until_used(uses: Uses, way: str, since: float) -> float:
    """Return the seconds until it works."""
    wait_until(getattr(uses, way))
    return monotonic() - since


def test_all_that_a_site_does_returns_by_itself(far_site: Site, proxy: Proxy):
    uses = Uses(far_site)
    for way in WAYS:
        until_used(uses, way, monotonic())
    watcher = Watcher(far_site, uses.cookie).live()
    proxy.stall(new=True)
    cut_at = monotonic()
    with ThreadPoolExecutor() as pool:
        back = {way: pool.submit(until_used, uses, way, cut_at) for way in WAYS}
        Event().wait(CUT_SECONDS)
        proxy.forget()
        unsaid = 0
        while not all(future.done() for future in back.values()):
            # While the API fails, /healthz must fail too.
            unsaid += (uses.rest(), uses.healthz(), uses.rest()) == (False, True, False)
        took = {way: future.result() for way, future in back.items()}
    watcher.close()
    uses.close()
    report(
        FAULT, f"a site, cut off for {CUT_SECONDS} s: time until each part works again",
        **{f"{way}_seconds": seconds for way, seconds in took.items()},
    )  # fmt: skip
    assert max(took.values()) < BACK_SECONDS
    assert unsaid == 0


def test_it_ends_in_time_despite_hung_connections(far_site: Site, proxy: Proxy):
    uses = Uses(far_site)
    proxy.stall(new=True)
    process = far_site.process
    assert process is not None
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(getattr(uses, way)) for way in ("page", "rest", "healthz")]
        asked[2].result()
        process.terminate()
        began = monotonic()
        try:
            process.wait(BACK_SECONDS)
        finally:
            process.kill()
        seconds = monotonic() - began
        for future in asked:
            future.exception()
    uses.close()
    report(FAULT, "Daphne: time to end after SIGTERM, while all connections hang", seconds=seconds)
    assert seconds < END_SECONDS + GRACE
