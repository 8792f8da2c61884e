"""A full disk under the relay: users are told with a frame, WebSockets stay, and all go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_django

from project.postgres import Server
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.own_server import own_server
from tests.reliability.counts import counted, size
from tests.reliability.disk import Disk, disk, move_tables
from tests.reliability.own_sites import own_site
from tests.servers import SERVER
from tests.sql.conftest import World
from tests.web.sockets import Visitor

MEGABYTES = 64
# What autovacuum gives back, and takes, would make the counts depend on the time.
SETTINGS = {"autovacuum": "off", "max_wal_size": "64MB", "min_wal_size": "32MB"}
RULES = (f"{Server.owner} web.* Topic T* RW 60",)
# Kept in a table until it is fetched; PostgreSQL cannot make it shorter.
LONG = "".join(map(chr, range(0x4E00, 0x4E00 + 12_000)))


@pytest.fixture(scope="module")
def small_disk(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[tuple[TestedServer, Disk]]:
    """A server whose tables are on a disk that can be filled."""
    folder: Path = tmp_path_factory.mktemp("disk")
    binaries = pytestconfig.stash[SERVER].binaries
    with (
        own_server(folder, binaries, settings=SETTINGS) as own,
        disk(own.server.home.folder / "small", MEGABYTES) as small,
    ):
        move_tables(own, small)
        yield own, small


def until_refused(visitor: Visitor) -> tuple[int, str]:
    """Send long bodies until one is refused: by which error."""
    for _ in range(1000):
        answer = visitor.call("topic_send", topic="T", body=LONG)
        if answer["Err"] != "0":
            return int(answer["Err"]), answer["Errstr"]
    raise AssertionError("the disk is never full")


def message(visitor: Visitor, wanted: str) -> None:
    """Read until a body has come."""
    while visitor.message().get("Body") != wanted:
        pass


def test_websockets_are_told_and_go_on(
    small_disk: tuple[TestedServer, Disk],
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    own, small = small_disk
    world = World(own)
    world.rules(*RULES)
    world.close()
    rounds, told, short = size(3, 20), set(), 0
    with own_site(own, tmp_path_factory.mktemp("site"), django_db_blocker) as site:
        site.user("alice", idents=["web.*"])
        cookie = site.login("alice")
        alice, bob, late = (Visitor(site, cookie=cookie) for _ in range(3))
        for name, visitor in (("alice", alice), ("bob", bob)):
            visitor.ok("init", ident=f"web.{name}")
        bob.ok("topic_listen", topic="T")
        alice.ok("topic_notify", topic="T")
        for number in range(rounds):
            small.fill()
            for _ in range(3):
                told.add(until_refused(alice))
            # What needs no room goes on meanwhile.
            short += alice.call("topic_send", topic="T", body=f"short {number}")["Err"] == "0"
            message(bob, f"short {number}")
            late.call("init", ident="web.late")
            small.clear()
            wait_until(lambda: alice.call("topic_send", topic="T", body=LONG)["Err"] == "0")
            message(bob, LONG)
            late.ok("init", ident="web.late")
            late.ok("deinit")
        alice.ok("topic_listen", topic="T.other")
        for visitor in (alice, bob, late):
            visitor.close()
    counted(
        "disk full", "WebSockets that send long bodies", refused=3 * rounds, refused_with=56,
        short_ones_sent_meanwhile=short, closed=0,
    )  # fmt: skip
    assert told == {(56, "the request failed")}
    assert short == rounds
