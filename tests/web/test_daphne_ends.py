"""Daphne is asked to end while pages are open: it ends soon, and its log has no fault."""

import os
import subprocess
import sys
from contextlib import suppress
from time import monotonic

import psycopg
import pytest
from websockets.exceptions import ConnectionClosed

from project.postgres import Server
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.sql.conftest import World
from tests.web.site import ROOT, Site
from tests.web.sockets import Visitor
from tests.web.watchers import Watcher

# A loop that has stopped while it watched, and a hub that is closed as Python ends.
WATCHING = """
import asyncio
import django
django.setup()
from psqlmessages.relay import watch
from psqlmessages.relay.hub import get_hub

class Watched:
    credentials = watch.Credentials(1, "")
    ident = None
    def reap(self): pass
    def revoked(self, reason): pass
    def unchecked(self): pass

async def main():
    watch.INTERVAL_SECONDS = 0
    watch.get_watch().add(Watched())
    print((await get_hub().init("web.alice", Watched()))["Err"])

asyncio.new_event_loop().run_until_complete(main())
"""


def test_a_process_that_ends_looks_no_more(relay: World, server: TestedServer) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WATCHING],
        env={
            **os.environ,
            "DATABASE_URL": server.url(),
            "DJANGO_SETTINGS_MODULE": "project.settings",
        },
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


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
