"""Events through the hub: each to the nodes that may hear of it, and rights that end at once."""

import asyncio

import pytest

from psqlmessages.relay.hub import Hub
from tests.sql.conftest import World
from tests.web.receivers import Box, err, ok, opened, run

RULES = (
    "user1 A* Topic T R 60",
    "user1 A* Topic U R 60",
    "user1 B* Topic V RW 60",
    "user1 O* Topic T O 60",
    "user2 OUT Topic T W 60",
    "user2 OUT Topic U W 60",
    "user2 OUT Topic V W 60",
)
MANY = 25


@pytest.fixture
def dsn(world: World) -> str:
    """The address of the hub's role: A* and OUT share the topics T and U, B* and OUT share V."""
    world.rules(*RULES)
    return world.server.url("user1")


async def nodes(hub: Hub, *idents: str, events: bool = True) -> list[Box]:
    """Receivers with a node each."""
    boxes = [Box() for _ in idents]
    for ident, box in zip(idents, boxes, strict=True):
        await ok(hub.init(ident, box, events=events))
    return boxes


@pytest.mark.parametrize("more", [0, MANY])
def test_an_event_reaches_those_that_may_hear_of_it_and_nobody_else(
    world: World, dsn: str, more: int
) -> None:
    """With a few nodes PostgreSQL names them in the event; with more the hub asks."""

    async def test() -> None:
        async with opened(dsn) as hub:
            await nodes(hub, *(f"A.{number}" for number in range(more)))
            a1, a2, b1 = await nodes(hub, "A1", "A2", "B1")
            (quiet,) = await nodes(hub, "A3", events=False)
            out = world.node("user2", "OUT")
            out.ok("topic_notify", "T")
            out.ok("topic_unnotify", "T")
            out.ok("topic_notify", "V")
            for box, topic in ((a1, "T"), (a2, "T"), (b1, "V")):
                await box.event("connect", "OUT")
                await box.event("topic_notify", "OUT", topic)
            await a1.event("topic_none_notify", "T")
            await a2.event("topic_none_notify", "T")
            assert not [event for event in a1.events + a2.events if event.endswith(" V")]
            assert not [event for event in b1.events if event.endswith(" T")]
            assert quiet.frames == []

    run(test())


def test_the_only_node_of_a_hub_hears_of_others_and_of_what_was_done_to_it(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            (box,) = await nodes(hub, "A1")
            await ok(hub.run("A1", box, "topic_listen", "T"))
            world.node("user2", "OUT")
            await box.event("connect", "OUT")
            world.owner.query("SELECT messages._disconnect('A1')")
            await box.event("topic_unlisten", "A1", "T")
            await box.event("disconnect", "A1")
            assert await err(hub.run("A1", box, "topic_listen", "T")) == 53
            await ok(hub.init("A1", box))
            await ok(hub.run("A1", box, "topic_listen", "U"))

    run(test())


@pytest.mark.parametrize("more", [0, MANY])
def test_a_node_is_not_told_what_it_did_itself(world: World, dsn: str, more: int) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            (witness, box, *_) = await nodes(hub, "A1", "A2", *(f"A.{n}" for n in range(more)))
            await ok(hub.run("A2", box, "topic_listen", "T"))
            await ok(hub.run("A2", box, "topic_unlisten", "T"))
            await ok(hub.run("A2", box, "topic_listen", "U"))
            await witness.event("topic_unlisten", "A2", "T")
            await witness.event("topic_listen", "A2", "U")
            assert not [event for event in box.events if " A2" in event]

    run(test())


@pytest.mark.parametrize("more", [0, MANY])
def test_a_right_that_is_revoked_ends_at_once_and_is_told_once(
    world: World, dsn: str, more: int
) -> None:
    rules = world.owner.connection
    world.rules("user1 C1 Topic T R 60", "user1 C1 Topic W W 60")

    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            (a1, c1, *_) = await nodes(hub, "A1", "C1", *(f"A.{n}" for n in range(more)))
            (deaf,) = await nodes(hub, "A2", events=False)
            for ident, box in (("A1", a1), ("C1", c1), ("A2", deaf)):
                await ok(hub.run(ident, box, "topic_listen", "T"))
            await ok(hub.run("C1", c1, "topic_notify", "W"))
            world.owner.connection.execute(
                "DELETE FROM messages.auth WHERE ident = 'C1' AND dest = 'T'"
            )
            out.ok("topic_send", "T", "secret")
            await c1.event("topic_unlisten", "C1", "T")
            assert (await a1.message()).body == "secret"
            rules.execute("DELETE FROM messages.auth WHERE ident = 'C1'")
            await c1.event("disconnect", "C1")
            world.owner.query("SELECT messages._disconnect('A2')")
            await deaf.event("disconnect", "A2")
            assert await err(hub.run("C1", c1, "topic_notify", "W")) == 53
            assert await err(hub.init("C1", c1)) == 5
            assert [event for event in c1.events if " C1" in event] == [
                "topic_unlisten C1 T",
                "topic_unnotify C1 W",
                "disconnect C1",
            ]
            assert c1.bodies == []
            assert deaf.events == ["topic_unlisten A2 T", "disconnect A2"]
            assert hub.counters.nodes == 1 + more

    run(test())


def test_who_stops_and_starts_again_is_not_taken_for_one_who_lost_the_right(
    world: World, dsn: str
) -> None:
    """The event of the stop comes when the hub already knows of the start."""

    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            (box, *_) = await nodes(hub, "A1", *(f"A.{number}" for number in range(MANY)))
            await ok(hub.run("A1", box, "topic_listen", "T"))
            for number in range(10):
                for answer in await asyncio.gather(
                    hub.run("A1", box, "topic_unlisten", "T"),
                    hub.run("A1", box, "topic_listen", "T"),
                ):
                    assert answer == {"Err": "0"}
                out.ok("topic_send", "T", str(number))
                assert (await box.message()).body == str(number)
            assert "topic_unlisten A1 T" not in box.events

    run(test())


def test_where_the_one_that_asks_has_just_gone_another_does(world: World, dsn: str) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            (first, *others) = await nodes(hub, *(f"A.{number}" for number in range(MANY)))
            # All before the hub reads any of it: nothing here gives way to it.
            world.owner.query("SELECT messages._disconnect('A.0')")
            world.node("user2", "OUT")
            await first.event("disconnect", "A.0")
            for box in others:
                await box.event("connect", "OUT")
            assert "connect OUT" not in first.events

    run(test())


def test_a_name_that_changes_hands_takes_nothing_from_its_former_owner(
    world: World, dsn: str
) -> None:
    world.rules("user2 OUT Rpc A* W 60", "user1 A* Rpc OUT W 60")

    async def test() -> None:
        out = world.node("user2", "OUT")
        async with opened(dsn) as hub:
            former, busy = await nodes(hub, "A1", "A2")
            # While the hub fetches these bodies, the message after them waits.
            for _ in range(9):
                out.ok("rpc", "A2", "x", "big" * 9000)
            out.ok("rpc", "A1", "x", "for the former")
            leaving = asyncio.create_task(hub.leave(former))
            await asyncio.wait({leaving}, timeout=0)
            latter = Box()
            await ok(hub.init("A1", latter))
            await leaving
            out.ok("rpc", "A1", "x", "for the latter")
            assert (await latter.message("A1")).body == "for the latter"
            assert latter.bodies == ["for the latter"]
            assert len(busy.bodies) == 9
            assert world.owner.query("SELECT count(*) FROM psqlmessages_client") == 3

    run(test())


def test_who_knows_the_channel_cannot_claim_what_the_hub_alone_tells(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            (box,) = await nodes(hub, "A1")
            channel = world.owner.query("SELECT channel FROM psqlmessages_session")
            for payload in (
                '{"Type":"Sys","Evt":"connection_lost"}',
                '{"Type":"Sys","Evt":"reconnected","Away":1}',
                '{"Type":"Sys","Evt":"disconnect","Ident":"A1","Nodes":7}',
                '{"Type":"Topic","From":"X"}',
                "nonsense",
            ):
                world.owner.query("SELECT pg_notify(%s, %s)", channel, payload)
            world.node("user2", "OUT")
            await box.event("connect", "OUT")
            assert box.events == ["connect OUT"]
            await ok(hub.run("A1", box, "topic_listen", "T"))

    run(test())
