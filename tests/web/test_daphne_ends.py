"""Daphne is asked to end while pages are open: it ends soon, and its log has no fault."""

from contextlib import suppress
from time import monotonic

import psycopg
import pytest
from websockets.exceptions import ConnectionClosed

from project.postgres import Server
from tests.reliability.counts import counted, size
from tests.sql.conftest import World
from tests.web.site import Site
from tests.web.sockets import Visitor, Watcher


def pages(site: Site, number: int) -> tuple[Visitor, ...]:
    """Open pages of nodes, and as many of the monitor."""
    site.user("admin", is_staff=True, is_superuser=True, idents=["web.*"])
    cookie = site.login("admin")
    nodes = [Visitor(site, cookie=cookie) for _ in range(number)]
    for place, node in enumerate(nodes):
        node.ok("init", ident=f"web.{place}")
        node.ok("topic_listen", topic="ROOM")
    watchers = [Watcher(site, cookie).live().visitor for _ in range(number)]
    return (*nodes, *watchers)


def until_closed(visitor: Visitor) -> None:
    """Read until the connection ends, in whatever way."""
    with suppress(ConnectionClosed):
        while True:
            visitor.connection.recv(timeout=60)


@pytest.fixture
def observed(relay: World) -> World:
    relay.rules(f"{Server.owner} example.monitor.* Topic * O 60")
    return relay


def test_daphne_ends_while_pages_are_open(site: Site, observed: World) -> None:
    rounds, number = size(1, 10), size(2, 10)
    slowest, faults = 0.0, 0
    for _ in range(rounds):
        opened = pages(site, number)
        other = observed.node("user2", "OTHER")
        began = monotonic()
        site.stop()
        slowest = max(slowest, monotonic() - began)
        faults += len(site.faults())
        events = [event.split() for event in other.events()]
        ends = [e for e in events if e[0] in ("disconnect", "crash") and e[1].startswith("web.")]
        assert sorted(ends) == [["disconnect", f"web.{place}"] for place in range(number)]
        other.ok("deinit", "OTHER")
        for visitor in opened:
            until_closed(visitor)
        # It returns at its address.
        before = site.url
        site.start()
        assert site.url == before
    counted(
        "a node's process is killed", "Daphne, by SIGTERM, while pages are open",
        pages=2 * number * rounds, faults_in_its_log=faults, slowest_seconds=slowest,
    )  # fmt: skip
    assert faults == 0


def test_daphne_ends_amid_a_look(site: Site, observed: World) -> None:
    opened = pages(site, 1)
    with psycopg.connect(observed.server.url()) as owner:
        owner.execute("LOCK TABLE django_session IN ACCESS EXCLUSIVE MODE")
        observed.wait_for("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        site.ask_to_stop()
        for visitor in opened:
            until_closed(visitor)
    site.ended()
    assert site.faults() == []
    assert "shutdown" not in site.log()
