"""The hub: many receivers on one session, each gets what is for its nodes, in order, once."""

import asyncio
from typing import Any

import pytest

from psqlmessages.relay.frames import Frame
from psqlmessages.relay.hub import Hub
from tests.sql.conftest import World
from tests.web.receivers import Box, err, ok, opened, run

RULES = (
    "user1 A* Topic T* RW 60",
    "user1 A* Topic U R 60",
    "user1 O* Topic T* O 60",
    "user1 A* Rpc A* W 60",
    "user1 A* Rpc OUT W 60",
    "user2 OUT Rpc A* W 60",
    "user2 OUT Topic T* RW 60",
    "user2 OUT Topic U W 60",
)


@pytest.fixture
def dsn(world: World) -> str:
    """The address of the hub's role, whose nodes are A*, and observers O*."""
    world.rules(*RULES)
    return world.server.url("user1")


async def joined(hub: Hub, ident: str, *topics: str, events: bool = True) -> Box:
    """A receiver with a node that listens to topics."""
    box = Box()
    await ok(hub.init(ident, box, events=events))
    for topic in topics:
        await ok(hub.run(ident, box, "topic_listen", topic))
    return box


def test_a_topic_message_goes_to_those_who_listen_and_to_nobody_else(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            a1, a2, a3 = [await joined(hub, ident, "T") for ident in ("A1", "A2", "A3")]
            await ok(hub.run("A2", a2, "topic_unlisten", "T"))
            out.ok("topic_send", "T", "one")
            out.ok("topic_send", "T", "two")
            for box in (a1, a3):
                assert [(await box.message()).body for _ in range(2)] == ["one", "two"]
            await ok(hub.run("A2", a2, "topic_listen", "T"))
            out.ok("topic_send", "T", "three")
            assert (await a2.message()).body == "three"
            assert a2.bodies == ["three"]

    run(test())


def test_all_receivers_share_one_frame_which_is_what_a_socket_sends(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            boxes = [await joined(hub, f"A{number}", "T") for number in range(5)]
            out.ok("topic_send", "T", '{"a": "é"}', "ask", "json")
            frames = [await box.message() for box in boxes]
            assert len({id(frame) for frame in frames}) == 1
            frame = frames[0]
            assert frame.json is frame.json
            number = frame.header["Id"]
            assert frame.header["Token"].endswith(" 60 ask")
            assert frame.json == (
                f'{{"Type":"Topic","Size":11,"To":"T","From":"OUT","Token":"{frame.header["Token"]}"'
                f',"Enc":"json","Id":{number},"Body":"{{\\"a\\": \\"é\\"}}"}}'
            )

    run(test())


def test_a_receiver_with_several_nodes_gets_a_message_once(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            box = Box()
            for ident in ("A1", "A2"):
                await ok(hub.init(ident, box))
                await ok(hub.run(ident, box, "topic_listen", "T"))
            await ok(hub.init("O1", box))
            await ok(hub.run("O1", box, "topic_observe", "T*"))
            for body in ("one", "two"):
                out.ok("topic_send", "T", body)
            while (await box.message()).body != "two":
                pass
            assert box.bodies == ["one", "two"]

    run(test())


def test_two_equal_messages_of_one_transaction_are_two(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            box = await joined(hub, "A1", "T")
            with out.connection.transaction():
                for body in ("x", "x", "end"):
                    out.ok("topic_send", "T", body)
            while (await box.message()).body != "end":
                pass
            assert box.bodies == ["x", "x", "end"]

    run(test())


def test_an_rpc_and_its_answer_go_to_the_node_they_name(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        async with opened(dsn) as hub:
            a1, a2 = await joined(hub, "A1"), await joined(hub, "A2")
            out.payloads()
            out.ok("rpc", "A1", "mine", "question")
            asked = await a1.message("A1")
            assert (asked.header["Type"], asked.header["From"], asked.body) == (
                "Rpc", "OUT", "question",
            )  # fmt: skip
            await ok(hub.run("A1", a1, "return", "OUT", asked.header["Token"], "answer"))
            answered = await asyncio.to_thread(out.headers, 1)
            assert (answered[0]["Token"], answered[0]["Body"]) == ("mine", "answer")
            await ok(hub.run("A2", a2, "rpc", "A1", "own", "again"))
            asked = await a1.message("A1")
            assert await err(hub.run("A2", a2, "return", "A2", asked.header["Token"], "")) == 20
            await ok(hub.run("A1", a1, "return_error", "A2", asked.header["Token"], "no"))
            answer = await a2.message("A2")
            assert (answer.header["Type"], answer.header["Err"], answer.body) == (
                "Return", "56", "no",
            )  # fmt: skip
            assert (len(a1.bodies), len(a2.bodies)) == (2, 1)

    run(test())


def test_an_ident_belongs_to_one_receiver(world: World, dsn: str) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            a1, other = await joined(hub, "A1", "T"), Box()
            taken = await hub.init("A1", other, events=False)
            pid = world.watcher.query("SELECT pid FROM psqlmessages_session")
            assert taken == {"Err": "8", "Errstr": f"Client A1 already exists with pid {pid}"}
            assert await err(hub.run("A1", other, "topic_listen", "T")) == 53
            assert await err(hub.run("A1", other, "topic_send", "T", "x")) == 53
            assert await hub.deinit("A1", other) == {"Err": "0", "Already": 1}
            await hub.leave(other)
            # Who was refused has not turned its events off.
            out = world.node("user2", "OUT")
            out.ok("topic_notify", "T")
            await a1.event("topic_notify", "OUT", "T")
            assert await hub.init("A1", a1) == {"Err": "0", "Already": 1}
            await ok(hub.deinit("A1", a1))
            await ok(hub.init("A1", other))
            assert await err(hub.run("A1", a1, "topic_listen", "T")) == 53

    run(test())


def test_a_name_that_another_session_has_is_refused_and_can_be_had_later(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        elsewhere = world.node("user1", "A1")
        async with opened(dsn) as hub:
            box = Box()
            assert await err(hub.init("A1", box)) == 8
            assert await err(hub.init("B1", box)) == 5
            assert hub.counters.nodes == 0
            elsewhere.ok("deinit", "A1")
            await ok(hub.init("A1", box))

    run(test())


def test_the_channel_is_told_to_nobody(dsn: str) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            assert await hub.init("A1", Box()) == {"Err": "0"}

    run(test())


def test_what_postgresql_cannot_hold_is_an_answer_and_harms_nobody(world: World, dsn: str) -> None:
    async def test() -> None:
        async with opened(dsn) as hub:
            box = await joined(hub, "A1", "T")
            await ok(hub.run("A1", box, "topic_notify", "T"))
            results = await asyncio.gather(
                hub.run("A1", box, "topic_send", "T", "one"),
                hub.run("A1", box, "topic_send", "T", "\0"),
                hub.run("A1", box, "topic_send", "T", "\ud800"),
                hub.run("A1", box, "topic_send", "T", "two"),
            )
            assert [answer["Err"] for answer in results] == ["0", "57", "57", "0"]
            assert [(await box.message()).body for _ in range(2)] == ["one", "two"]
            assert await err(hub.init("A\0", box)) == 57

    run(test())


def test_an_observer_gets_what_it_observes_and_counts_as_no_listener(
    world: World, dsn: str
) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T.1")
        out.ok("topic_notify", "U")
        async with opened(dsn) as hub:
            listener = await joined(hub, "A1", "U")
            await ok(hub.run("A1", listener, "topic_listen", "T.1"))
            out.ok("topic_send", "T.1", "before")
            assert (await listener.message("T.1")).body == "before"
            observer = await joined(hub, "O1")
            await ok(hub.run("O1", observer, "topic_observe", "T*"))
            assert (await hub.run("O1", observer, "topic_status", "T.1"))["Listeners"] == ["A1"]
            out.ok("topic_send", "T.1", "observed")
            out.ok("topic_send", "U", "not observed")
            assert (await observer.message("T.1")).body == "observed"
            assert (await listener.message("U")).body == "not observed"
            await ok(hub.run("O1", observer, "topic_unobserve", "T*"))
            out.ok("topic_send", "T.1", "no more")
            assert (await listener.message("T.1")).body == "no more"
            assert observer.bodies == ["observed"]

    run(test())


def test_leaving_is_a_disconnect_and_a_crash_a_crash_to_all_others(world: World, dsn: str) -> None:
    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            stays = await joined(hub, "A3", "T.1")
            out.ok("topic_notify", "T.1")
            for ident, crashed, word in (("A1", False, "disconnect"), ("A2", True, "crash")):
                box = await joined(hub, ident, "T", "T.1")
                out.ok("topic_send", "T.1", "before")
                await box.message("T.1")
                out.payloads()
                before = len(box.frames)
                await hub.leave(box, crashed=crashed)
                told = await asyncio.to_thread(out.events, 4)
                assert told == [
                    f"topic_unlisten {ident} T",
                    "topic_none_listen T",
                    f"topic_unlisten {ident} T.1",
                    f"{word} {ident}",
                ]
                await stays.event(word, ident)
                assert await err(hub.run(ident, box, "topic_listen", "T")) == 53
                out.ok("topic_send", "T.1", "after")
                while (await stays.message("T.1")).body != "after":
                    pass
                assert box.frames[before:] == []
            rest = "SELECT array_agg(ident ORDER BY ident) FROM psqlmessages_client"
            assert world.owner.query(rest) == ["A3", "OUT"]
            assert hub.counters.failures == 0

    run(test())


def test_one_session_serves_two_hundred_receivers(world: World, dsn: str) -> None:
    class Counting:
        def __init__(self) -> None:
            self.frames: list[Frame] = []

        def deliver(self, frame: Frame) -> None:
            if frame.header["Type"] == "Topic":
                self.frames.append(frame)

    async def test() -> None:
        out = world.node("user2", "OUT")
        out.ok("topic_notify", "T")
        async with opened(dsn) as hub:
            receivers: list[Any] = [Counting() for _ in range(200)]
            for number, receiver in enumerate(receivers):
                await ok(hub.init(f"A{number}", receiver, events=False))
                await ok(hub.run(f"A{number}", receiver, "topic_listen", "T"))
            last = await joined(hub, "A999", "T", events=False)
            out.ok("topic_send_many", "T", [f"{number}" for number in range(100)])
            while (await last.message()).body != "99":
                pass
            assert all(
                [frame.body for frame in receiver.frames] == [f"{n}" for n in range(100)]
                for receiver in receivers
            )
            assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 2
            counters = hub.counters
            assert (counters.receivers, counters.nodes) == (201, 201)
            assert counters.delivered >= 201 * 100

    run(test())
