"""The life of a hub: one for each event loop, there when it is needed, gone without a trace."""

import asyncio
import os
import subprocess
import sys
from datetime import timedelta

import psycopg
import pytest
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.client import async_link
from psqlmessages.client.patience import Patience
from psqlmessages.relay.hub import Hub, get_hub
from tests.sql.conftest import World
from tests.web.receivers import Box, ok, opened, run

# A server's loop that is stopped and never closed, as that of Twisted is.
LIKE_DAPHNE = """
import asyncio, django
django.setup()
from psqlmessages.relay.hub import get_hub

class Socket:
    def deliver(self, frame): pass

async def serve():
    assert (await get_hub().init("A1", Socket()))["Err"] == "0"
    assert (await get_hub().init("A2", Socket()))["Err"] == "0"

loop = asyncio.new_event_loop()
# A turn that takes long is said in the mode for developers; a machine may be busy.
loop.slow_callback_duration = float("inf")
asyncio.set_event_loop(loop)
loop.run_until_complete(serve())
print("served", flush=True)
"""
FORKED = """
import os, sys
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
socket = Socket()

async def go_on():
    print(await get_hub().init("A3", socket), flush=True)

loop.run_until_complete(go_on())
"""


@pytest.fixture
def dsn(world: World) -> str:
    """The address of the hub's role."""
    world.rules(
        "user1 A* Topic T RW 60", f"{Server.owner} A* Topic T RW 60", "user2 OUT Topic T RW 60"
    )
    return world.server.url("user1")


@pytest.fixture
def our_hub(transactional_db: None, settings: Settings, dsn: str) -> None:
    """The hub that get_hub gives is of the test database, and of the node "shop"."""
    settings.PSQLMESSAGES = {"NODE": "shop"}


def finished(world: World, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the test database to its end."""
    return subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", program],
        env={
            **os.environ,
            "DATABASE_URL": world.server.url(),
            "DJANGO_SETTINGS_MODULE": "project.settings",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


ONE_SESSION = (
    "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'psqlmessages shop.hub'"
)


@pytest.mark.usefixtures("our_hub")
def test_a_loop_has_one_hub_and_another_loop_another(world: World) -> None:
    hubs: list[Hub] = []

    async def use(ident: str) -> None:
        assert get_hub() is get_hub()
        hubs.append(get_hub())
        box = Box()
        await ok(get_hub().init(ident, box))
        await ok(get_hub().run(ident, box, "topic_listen", "T"))
        if ident == "A1":
            assert not hubs[0].counters.received
            await asyncio.to_thread(lambda: asyncio.run(use("A2")))
            assert await get_hub().run("A1", box, "topic_status", "T") == {
                "Err": "0", "Notifiers": [], "Listeners": ["A1"],
            }  # fmt: skip
            await asyncio.to_thread(world.wait_for, ONE_SESSION)

    run(use("A1"))
    assert hubs[0] is not hubs[1]


@pytest.mark.usefixtures("our_hub")
def test_a_loop_that_ends_takes_its_hub_along_and_deregisters_its_nodes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings are errors here: no connection is left open, and no task is pending."""
    monkeypatch.setattr(async_link, "_CLOSING_SECONDS", 60.0)
    out = world.node("user2", "OUT")

    async def use() -> None:
        box = Box()
        for number in range(60):
            await ok(get_hub().init(f"A{number}", box))

    run(use())
    out_of = "SELECT count(*) FROM psqlmessages_client WHERE ident <> 'OUT'"
    assert world.owner.query(out_of) == 0
    assert {event.split()[0] for event in out.events()} == {"connect", "disconnect"}


@pytest.mark.usefixtures("our_hub")
def test_a_process_whose_loop_was_stopped_deregisters_its_nodes_and_says_nothing(
    world: World,
) -> None:
    out = world.node("user2", "OUT")
    done = finished(world, LIKE_DAPHNE, "-X", "dev")
    assert (done.stdout, done.stderr, done.returncode) == ("served\n", "", 0)
    assert out.events() == ["connect A1", "connect A2", "disconnect A1", "disconnect A2"]


@pytest.mark.usefixtures("our_hub")
def test_a_forked_process_leaves_the_hub_of_its_parent_alone(world: World) -> None:
    out = world.node("user2", "OUT")
    done = finished(world, LIKE_DAPHNE + FORKED)
    assert (done.stdout, done.stderr) == ("served\n{'Err': '0'}\n", "")
    names = ("A1", "A2", "A3")
    assert out.events() == [
        f"{word} {name}" for word in ("connect", "disconnect") for name in names
    ]


def test_a_hub_without_nodes_disconnects_after_a_while_and_connects_when_used(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn, idle=timedelta(milliseconds=200)) as hub:
            box = Box()
            for turn in range(3):
                await ok(hub.init("A1", box))
                await ok(hub.run("A1", box, "topic_listen", "T"))
                await hub.leave(box)
                if turn:
                    # Used again in time, it stays connected.
                    await ok(hub.init("A1", box))
                    gone = "SELECT pg_sleep(0.4) IS NOT NULL"
                    await asyncio.to_thread(world.watcher.query, gone)
                    assert hub.is_connected
                    await hub.leave(box)
                gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE usename = 'user1')"
                await asyncio.to_thread(world.wait_for, gone)
                assert not hub.is_connected
            assert hub.counters.receivers == hub.counters.nodes == 0

    run(test())


def test_a_receiver_that_goes_in_the_midst_of_its_init_leaves_nothing_behind(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            stays = Box()
            await ok(hub.init("A0", stays))
            for turns in range(20):
                box = Box()
                task = asyncio.create_task(hub.init("A1", box))
                await asyncio.wait({task}, timeout=turns / 2000)
                task.cancel()
                leaving = asyncio.create_task(hub.leave(box, crashed=True))
                await asyncio.wait({leaving}, timeout=turns / 4000)
                # It is done although who asked for it is gone.
                leaving.cancel()
                again = Box()
                assert await hub.init("A1", again) == {"Err": "0"}
                await hub.leave(again)
            rest = "SELECT array_agg(ident) FROM psqlmessages_client"
            assert world.owner.query(rest) == ["A0"]
            assert hub.counters.nodes == 1

    run(test())


def test_an_end_that_the_server_aborts_is_tried_again(
    world: World, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = Patience.waited

    async def test() -> None:
        async with opened(dsn) as hub:
            box = Box()
            await ok(hub.init("A1", box))
            await ok(hub.run("A1", box, "topic_listen", "T"))
            with psycopg.connect(world.server.url()) as owner:
                owner.execute("SELECT FROM psqlmessages_topic WHERE name = 'T' FOR UPDATE")
                aborted: list[float] = []

                def let_go(patience: Patience, seconds: float, subject: str | None = None) -> None:
                    """Once the first try has failed, the topic is free."""
                    owner.rollback()
                    aborted.append(seconds)
                    waited(patience, seconds, subject)

                monkeypatch.setattr(Patience, "waited", let_go)
                # Nothing is left to a later round.
                monkeypatch.setattr(Hub, "_linger", lambda *_: None)
                leaving = asyncio.create_task(hub.leave(box))
                await asyncio.wait({leaving}, timeout=0)
                # A new node of the name waits for the end of the earlier one.
                assert await hub.init("A1", Box()) == {"Err": "0"}
                assert leaving.done()
            assert len(aborted) == 1
            assert world.owner.query("SELECT count(*) FROM psqlmessages_membership") == 0

    run(test())
