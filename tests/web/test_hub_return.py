"""A hub whose connection is lost: everything comes back as it was, and what cannot is told."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from project.postgres import Server
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.options import Options
from psqlmessages.client.patience import Patience
from psqlmessages.relay import answers
from psqlmessages.relay.hub import Hub
from tests.client.proxy import Proxy
from tests.client.test_restart import restarted
from tests.sql.conftest import World
from tests.web.receivers import QUICK, WATCHFUL, Box, err, ok, opened, run

__all__ = ["restarted"]

MANY = 120


@pytest.fixture
def dsn(world: World) -> str:
    """The address of the hub's role."""
    world.rules(
        "user1 A* Topic T* RW 60",
        "user1 A* Topic U R 60",
        "user1 B* Topic T RW 60",
        "user1 O* Topic T* O 60",
        "user2 OUT Topic T* RW 60",
    )
    return world.server.url("user1")


def kill(world: World) -> None:
    """End the hub's backend, and wait for its end; nothing here gives way to the hub."""
    (pid,) = world.watcher.query(
        "SELECT array_agg(pid) FROM psqlmessages_session WHERE role = 'user1'"
    )
    assert world.watcher.query("SELECT pg_terminate_backend(%s, 60000)", pid)


async def nodes(hub: Hub, *idents: str) -> list[Box]:
    """Receivers with a node each that listens to T, but for observers, which observe T*."""
    boxes = [Box() for _ in idents]
    for ident, box in zip(idents, boxes, strict=True):
        await ok(hub.init(ident, box))
        if ident.startswith("O"):
            await ok(hub.run(ident, box, "topic_observe", "T*"))
        else:
            await ok(hub.run(ident, box, "topic_listen", "T"))
    return boxes


async def back(*boxes: Box) -> None:
    """Wait until all have heard that the hub is back."""
    for box in boxes:
        await box.event("connection_lost")
        frame = await box.event("reconnected")
        assert 0 < frame.header["Away"] < 100


def test_all_nodes_return_and_are_told(world: World, dsn: str) -> None:
    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            boxes = await nodes(hub, *(f"A{number}" for number in range(MANY)), "O1")
            await ok(hub.run("A1", boxes[1], "topic_notify", "T.1"))
            kill(world)
            await back(*boxes)
            assert hub.is_connected
            out = world.node("user2", "OUT")
            out.ok("topic_notify", "T")
            out.ok("topic_send", "T", "again")
            for box in boxes:
                assert (await box.message()).body == "again"
            out.ok("topic_listen", "T.1")
            await ok(hub.run("A1", boxes[1], "topic_send", "T.1", "there"))
            counters = hub.counters
            assert (counters.lost_connections, counters.reconnects) == (1, 1)
            assert counters.nodes == MANY + 1

    run(test())


def test_nodes_that_return_together_do_not_hear_of_each_others_earlier_end(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            boxes = await nodes(hub, *(f"A{number}" for number in range(60)))
            kill(world)
            await back(*boxes)
            # All that happens before is told before.
            world.node("user2", "OUT").ok("topic_listen", "T")
            for box in boxes:
                await box.event("topic_listen", "OUT", "T")
                after = box.events[box.events.index("connection_lost") :]
                assert [text for text in after if text.startswith(("crash", "topic_un"))] == []

    run(test())


def test_what_was_revoked_while_it_was_away_is_told_and_the_others_return(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            a1, a2, b1, o1 = await nodes(hub, "A1", "A2", "B1", "O1")
            await ok(hub.run("A1", a1, "topic_notify", "T.1"))
            await ok(hub.run("A1", a1, "topic_listen", "U"))
            kill(world)
            rules = world.owner.connection
            rules.execute(
                "DELETE FROM messages.auth WHERE ident IN ('A*', 'B*') AND dest LIKE 'T%'"
            )
            rules.execute("UPDATE messages.auth SET dest = 'X' WHERE ident = 'O*'")
            await back(a1, a2, b1, o1)
            await b1.event("disconnect", "B1")
            await a1.event("topic_unlisten", "A1", "T")
            await a1.event("topic_unnotify", "A1", "T.1")
            await a2.event("topic_unlisten", "A2", "T")
            await o1.event("topic_unobserve", "O1", "T*")
            assert await err(hub.run("B1", b1, "topic_listen", "T")) == 53
            assert hub.counters.nodes == 3
            world.rules("user2 OUT Topic U W 60")
            out = world.node("user2", "OUT")
            out.ok("topic_notify", "U")
            out.ok("topic_send", "U", "x")
            assert (await a1.message("U")).body == "x"
            assert a2.bodies == o1.bodies == []

    run(test())


def test_what_was_revoked_before_is_not_asked_for_again_and_what_was_begun_anew_is(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            a1, a2 = await nodes(hub, "A1", "A2")
            rules = world.owner.connection
            rules.execute("DELETE FROM messages.auth WHERE ident = 'A*' AND dest = 'T*'")
            await a1.event("topic_unlisten", "A1", "T")
            await a2.event("topic_unlisten", "A2", "T")
            world.rules("user1 A* Topic T* RW 60")
            await ok(hub.run("A2", a2, "topic_listen", "T"))
            for _ in range(5):
                await asyncio.gather(
                    ok(hub.run("A2", a2, "topic_unlisten", "T")),
                    ok(hub.run("A2", a2, "topic_listen", "T")),
                )
            kill(world)
            await back(a1, a2)
            status = await ok(hub.run("A1", a1, "topic_status", "T"))
            assert status["Listeners"] == ["A2"]

    run(test())


def test_who_leaves_amid_its_init_does_not_return_though_the_server_kept_it(
    world: World, dsn: str
) -> None:
    owner = world.owner.connection
    owner.execute(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'kept'; END $$;"
        "CREATE TRIGGER keep BEFORE DELETE ON psqlmessages_client"
        " FOR EACH ROW WHEN (OLD.ident = 'A2') EXECUTE FUNCTION keep()"
    )

    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            (stays,) = await nodes(hub, "A1")
            leaves = Box()
            beginning = asyncio.create_task(hub.init("A2", leaves))
            await asyncio.wait({beginning}, timeout=0)
            await hub.leave(leaves)
            await beginning
            owner.execute("DROP FUNCTION keep() CASCADE")
            kill(world)
            await back(stays)
            rest = "SELECT array_agg(ident) FROM psqlmessages_client"
            assert world.owner.query(rest) == ["A1"]

    try:
        run(test())
    finally:
        owner.execute("DROP FUNCTION IF EXISTS keep() CASCADE")


def test_a_name_that_another_took_meanwhile_is_lost_and_holds_up_nobody(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            a1, a2 = await nodes(hub, "A1", "A2")
            kill(world)
            thief = world.node("user1", "A1")
            await back(a1, a2)
            await a1.event("disconnect", "A1")
            thief.ok("topic_notify", "T")
            thief.ok("topic_send", "T", "from the thief")
            assert (await a2.message()).body == "from the thief"
            assert a1.bodies == []

    run(test())


def test_who_leaves_while_it_is_away_does_not_return(world: World, dsn: str) -> None:
    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            stays, leaves, ends = await nodes(hub, "A1", "A2", "A3")
            kill(world)
            leaving = asyncio.create_task(hub.leave(leaves))
            # Which connection it ran on it cannot know; the node is gone in either case.
            assert (await hub.deinit("A3", ends))["Err"] in ("0", "59")
            await leaving
            await back(stays)
            rest = "SELECT array_agg(ident ORDER BY ident) FROM psqlmessages_client"
            assert world.owner.query(rest) == ["A1"]
            assert not [event for event in leaves.events + ends.events if "reconnected" in event]

    run(test())


def test_one_node_that_the_server_cannot_register_does_not_keep_the_others_away(
    world: World, dsn: str
) -> None:
    owner = world.owner.connection
    owner.execute(
        "CREATE FUNCTION refuse_a7() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'not A7'; END $$"
    )

    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            boxes = await nodes(hub, *(f"A{number}" for number in range(60)))
            kill(world)
            owner.execute(
                "CREATE TRIGGER refuse_a7 BEFORE INSERT ON psqlmessages_client"
                " FOR EACH ROW WHEN (NEW.ident = 'A7') EXECUTE FUNCTION refuse_a7()"
            )
            await back(*boxes)
            await boxes[7].event("disconnect", "A7")
            assert world.owner.query("SELECT count(*) FROM psqlmessages_membership") == 59
            assert await hub.init("A7", boxes[7]) == {"Err": "56", "Errstr": "the request failed"}
            assert hub.counters.nodes == 59

    try:
        run(test())
    finally:
        owner.execute("DROP FUNCTION refuse_a7() CASCADE")


def test_a_call_that_is_under_way_as_the_connection_breaks_is_answered(
    world: World, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits for the lock until the connection breaks, however late that is.
    monkeypatch.setattr(Patience, "seconds", lambda *_: 60.0)

    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            a1, a2 = await nodes(hub, "A1", "A2")
            with world.owner.connection.transaction():
                world.owner.query("SELECT FROM psqlmessages_topic WHERE name = 'T' FOR UPDATE")
                waiting = asyncio.create_task(hub.run("A1", a1, "topic_unlisten", "T"))
                queued = asyncio.create_task(hub.run("A2", a2, "topic_status", "T"))
                locked = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
                await asyncio.to_thread(world.wait_for, locked)
                kill(world)
                assert (await waiting) == {
                    "Err": "59", "Errstr": "the relay has no connection to PostgreSQL",
                }  # fmt: skip
            assert (await queued)["Listeners"] == ["A1", "A2"]

    run(test())


def test_a_stalled_network_is_found_and_the_earlier_session_is_ended(
    world: World, dsn: str, proxy: Proxy
) -> None:
    async def test() -> None:
        through = make_conninfo(dsn, host="127.0.0.1", port=proxy.port)
        async with opened(through, WATCHFUL) as hub:
            boxes = await nodes(hub, "A1", "A2", "O1")
            proxy.stall()
            await back(*boxes)
            assert (await ok(hub.run("A1", boxes[0], "topic_status", "T")))["Listeners"] == [
                "A1", "A2",
            ]  # fmt: skip
            assert hub.echo_seconds is None or hub.echo_seconds < 8
            assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 1

    run(test())


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_twenty_nodes_return_after_a_restart_of_postgresql(restarted: Server, how: str) -> None:
    with psycopg.connect(restarted.url(), autocommit=True) as owner:
        owner.execute(
            "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
            " VALUES ('psqlmessages', 'A*', 'Topic', 'T', 'RW', 5)"
        )

    async def test() -> None:
        async with opened(restarted.url(), Options()) as hub:
            boxes = await nodes(hub, *(f"A{number}" for number in range(20)))
            await ok(hub.run("A1", boxes[1], "topic_notify", "T"))
            restarted.stop(how)
            for box in boxes:
                await box.event("connection_lost")
            assert not hub.is_connected
            restarted.start()
            for box in boxes:
                await box.event("reconnected")
            await ok(hub.run("A1", boxes[1], "topic_send", "T", "after"))
            for box in boxes:
                assert (await box.message()).body == "after"

    run(test())


def test_however_many_changes_are_asked_for_while_it_is_away_each_waits_for_itself(
    world: World, dsn: str, proxy: Proxy
) -> None:
    through = make_conninfo(dsn, host="127.0.0.1", port=proxy.port)
    options = replace(WATCHFUL, reconnect_wait=timedelta(seconds=1))

    async def test() -> None:
        async with opened(through, options) as hub:
            (stays,) = await nodes(hub, "A1")
            proxy.refuse()
            await stays.event("connection_lost")
            changes = [hub.init(f"A.{number}", Box()) for number in range(MANY)]
            # One after the other they would take two minutes.
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*changes)
            assert {answer["Err"] for answer in answers} == {"59"}

    run(test())


@pytest.mark.parametrize("event", ["topic_unlisten", "disconnect"])
def test_what_cannot_be_asked_as_the_connection_is_lost_is_not_taken_for_over(
    world: World, dsn: str, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """A return tells of what the session before it did; it may be lost before that is read."""
    asked = []

    async def away(_: Gateway, ident: str, function: str, *arguments: str) -> Answer:
        asked.append(function)
        return answers.away()

    monkeypatch.setattr("psqlmessages.relay.delivery.answered", away)

    async def test() -> None:
        async with opened(dsn, QUICK) as hub:
            (a1,) = await nodes(hub, "A1")
            told = f'{{"Type":"Sys","Evt":"{event}","Ident":"A1","Topic":"T","Id":1}}'
            channel = world.owner.query("SELECT channel FROM psqlmessages_session")
            world.owner.query("SELECT pg_notify(%s, %s)", channel, told)
            out = world.node("user2", "OUT")
            out.ok("topic_notify", "T")
            out.ok("topic_send", "T", "still there")
            assert (await a1.message()).body == "still there"
            assert {"topic_status", "use"} & set(asked)

    run(test())


def test_without_a_server_calls_are_refused_until_there_is_one(restarted: Server) -> None:
    url = restarted.url()
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(
            "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
            " VALUES ('psqlmessages', 'A*', 'Topic', 'T', 'RW', 5)"
        )
    restarted.stop()

    async def test() -> None:
        async with opened(url) as hub:
            boxes = [Box() for _ in range(50)]
            answers = [hub.init(f"A{number}", box) for number, box in enumerate(boxes)]
            assert {answer["Err"] for answer in await asyncio.gather(*answers)} == {"59"}
            assert not hub.is_connected
            restarted.start()
            async with asyncio.timeout(60):
                while (await hub.init("A1", boxes[1]))["Err"] == "59":
                    pass
            await ok(hub.run("A1", boxes[1], "topic_listen", "T"))

    run(test())
