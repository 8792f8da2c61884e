"""Large bodies through the hub: fetched once, in order, and never by who may not."""

import asyncio

import pytest

from psqlmessages.client.options import Options
from psqlmessages.relay.frames import Frame
from psqlmessages.relay.hub import Hub
from tests.sql.conftest import World
from tests.web.receivers import Box, ok, opened, run

BIG = "big" * 10_000


@pytest.fixture
def dsn(world: World) -> str:
    """The address of the hub's role; OUT sends, A*, B* and C1 listen."""
    world.rules(
        "user1 A* Topic T R 60",
        "user1 B* Topic T R 60",
        "user1 C1 Topic C R 1",
        "user1 A* Rpc OUT W 60",
        "user2 OUT Rpc A* W 60",
        "user2 OUT Topic T W 60",
        "user2 OUT Topic C W 1",
    )
    return world.server.url("user1")


def test_a_body_is_fetched_once_however_many_receive_it_and_nothing_overtakes_it(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            boxes = [Box() for _ in range(30)]
            for number, box in enumerate(boxes):
                await ok(hub.init(f"A{number}", box, events=False))
                await ok(hub.run(f"A{number}", box, "topic_listen", "T"))
            out.ok("topic_send", "T", BIG)
            out.ok("topic_send", "T", "small")
            for box in boxes:
                frame = await box.message()
                assert frame.body == BIG
                assert {"Dkey", "Err"}.isdisjoint(frame.header)
                assert (await box.message()).body == "small"
            assert hub.counters.fetched == 1

    run(test())


def test_the_body_of_a_question_and_of_its_answer_come_whole(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        async with opened(dsn) as hub:
            box = Box()
            await ok(hub.init("A1", box))
            out.payloads()
            out.ok("rpc", "A1", "x", BIG)
            asked = await box.message("A1")
            assert (asked.header["Type"], asked.body) == ("Rpc", BIG)
            await ok(hub.run("A1", box, "rpc", "OUT", "own", "?"))
            question = out.headers(1)[0]
            out.ok("return", "A1", question["Token"], BIG)
            answer = await box.message("A1")
            assert (answer.header["Type"], answer.header["Token"], answer.body) == (
                "Return", "own", BIG,
            )  # fmt: skip

    run(test())


def test_where_one_node_may_not_fetch_any_more_another_does(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            revoked, box = Box(), Box()
            for ident, receiver in (("A1", revoked), ("B1", box)):
                await ok(hub.init(ident, receiver))
                await ok(hub.run(ident, receiver, "topic_listen", "T"))
            # Both before the hub reads either: nothing here gives way to it.
            out.ok("topic_send", "T", BIG)
            world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'A*'")
            assert (await box.message()).body == BIG
            await revoked.event("disconnect", "A1")
            assert hub.counters.lost_bodies == 0

    run(test())


def test_who_leaves_while_a_body_is_fetched_does_not_get_it(world: World, dsn: str) -> None:
    class Leaving(Box):
        hub: Hub
        leaving: asyncio.Task[None]

        def deliver(self, frame: Frame) -> None:
            super().deliver(frame)
            if frame.body == "small":
                self.leaving = asyncio.create_task(self.hub.leave(self))

    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            leaves, box = Leaving(), Box()
            leaves.hub = hub
            for ident, receiver in (("B1", box), ("A1", leaves)):
                await ok(hub.init(ident, receiver))
                await ok(hub.run(ident, receiver, "topic_listen", "T"))
            out.ok("topic_send", "T", "small")
            out.ok("topic_send", "T", BIG)
            assert [(await box.message()).body for _ in range(2)] == ["small", BIG]
            await leaves.leaving
            assert leaves.bodies == ["small"]

    run(test())


def test_a_body_that_has_expired_is_told_as_such(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "C")
        async with opened(dsn) as hub:
            box = Box()
            await ok(hub.init("C1", box))
            await ok(hub.run("C1", box, "topic_listen", "C"))
            out.ok("topic_send", "C", BIG)
            out.query("SELECT pg_sleep(1.1)")
            out.ok("topic_send", "C", "next")
            lost = await box.message("C")
            assert lost.body is None
            assert (lost.header["Err"], lost.header["Size"]) == ("12", len(BIG))
            assert lost.header["Errstr"].endswith("expired")
            assert "Body" not in lost.json
            assert (await box.message("C")).body == "next"
            assert hub.counters.lost_bodies == 1

    run(test())


def test_a_full_inbox_does_not_stop_what_empties_it(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn, Options(inbox_limit=30)) as hub:
            box = Box()
            await ok(hub.init("A1", box))
            await ok(hub.run("A1", box, "topic_listen", "T"))
            with out.connection.transaction():
                for number in range(100):
                    out.ok("topic_send", "T", f"{number} {BIG}")
            for number in range(100):
                body = (await box.message()).body
                assert body is not None
                assert body.startswith(f"{number} ")

    run(test())
