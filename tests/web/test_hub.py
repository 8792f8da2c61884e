"""The hub: many receivers on one session; each gets the frames for its nodes, in order, once."""

import asyncio
from typing import Any

import pytest

from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.options import Options
from psqlmessages.relay.hub import Hub
from tests.sql.conftest import Program, World
from tests.web.receivers import Box, crowd, err, in_loop, joined, ok

BIG = "big" * 10_000
MANY = 25


@pytest.fixture
def dsn(world: World) -> str:
    """The DSN of the hub's role with nodes A* and observers O*; OUT has another role."""
    world.rules(
        "user1 A* Topic T* RW 60", "user1 A* Topic U R 60", "user1 B* Topic V RW 60",
        "user1 C1 Topic C R 1", "user1 D1 Topic T R 60", "user1 D1 Topic W W 60",
        "user1 O* Topic T* O 60", "user2 OUT Rpc A* W 60", "user2 OUT Topic T* RW 60",
        "user2 OUT Topic V W 60", "user2 OUT Topic C W 1",
    )  # fmt: skip
    return world.server.url("user1")


@pytest.fixture
def out(world: World, dsn: str) -> Program:
    return world.node("user2", "OUT", notify="T")


@in_loop
async def test_a_message_reaches_each_listener_once_in_order(world: World, hub: Hub, out: Program):
    a1, a2 = [await joined(hub, ident, "T") for ident in ("A1", "A2")]
    # A receiver with several nodes.
    for ident, box in (("A3", a1), ("O1", a1)):
        await ok(hub.init(ident, box))
    await ok(hub.run("A3", a1, "topic_listen", "T"))
    await ok(hub.run("O1", a1, "topic_observe", "T*"))
    await ok(hub.run("A2", a2, "topic_unlisten", "T"))
    with out.connection.transaction():
        for body in ("x", "x", "end"):
            out.ok("topic_send", "T", body)
    assert [(await a1.message()).body for _ in range(3)] == ["x", "x", "end"]
    await ok(hub.run("A2", a2, "topic_listen", "T"))
    out.ok("topic_send", "T", '{"a": "é"}', "ask", "json")
    frame = await a2.message()
    assert await a1.message() is frame
    assert frame.frame.text == (
        f'{{"Type":"Topic","Size":11,"To":"T","From":"OUT","Token":"{frame.header["Token"]}"'
        f',"Enc":"json","Id":{frame.header["Id"]},"Body":"{{\\"a\\": \\"é\\"}}"}}'
    )
    assert frame.header["Token"].endswith(" 60 ask")
    assert (len(a1.bodies), len(a2.bodies)) == (4, 1)
    assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 2
    assert (hub.counters.receivers, hub.counters.nodes) == (2, 4)


@pytest.mark.parametrize("is_earlier", [False, True], ids=["message after", "revocation before"])
@in_loop
async def test_messages_and_revocations_that_arrive_with_the_answer_to_listen(
    world: World, hub: Hub, out: Program, monkeypatch, is_earlier: bool
):
    box = await joined(hub, "A1", "T", events=False)
    if not is_earlier:
        await ok(hub.run("A1", box, "topic_unlisten", "T"))
    execute = AsyncNodeSession._execute

    async def read_late(session: AsyncNodeSession, connection: Any, batch: Any) -> list[Any]:
        is_listen = "topic_listen" in batch[0].statement[0]
        if is_listen and is_earlier:
            world.execute("DELETE FROM messages.auth WHERE ident = 'A*' AND dest = 'T*'")
            world.rules("user1 A* Topic T* RW 60")
        answers = await execute(session, connection, batch)
        if is_listen and not is_earlier:
            out.ok("topic_send", "T", "at once")
        awaited = b"topic_unlisten" if is_earlier else b"at once"
        while is_listen and awaited not in b"".join(text for _, text in session._buffer._undecoded):
            session._buffer.read()
        return answers

    with monkeypatch.context() as patch:
        patch.setattr(AsyncNodeSession, "_execute", read_late)
        await ok(hub.run("A1", box, "topic_listen", "T"))
    out.ok("topic_send", "T", "later")
    expected = ["later"] if is_earlier else ["at once", "later"]
    assert [(await box.message()).body for _ in expected] == expected


@pytest.mark.parametrize("hub", [Options(inbox_limit=30)], indirect=True)
@in_loop
async def test_a_body_is_fetched_once_and_nothing_overtakes_it(hub: Hub, out: Program):
    boxes = [await joined(hub, f"A{number}", "T", events=False) for number in range(10)]
    out.ok("topic_send_many", "T", [BIG, "small"])
    for box in boxes:
        frame = await box.message()
        assert frame.body == BIG
        assert {"Dkey", "Err"}.isdisjoint(frame.header)
        assert (await box.message()).body == "small"
    assert hub.counters.fetched == 1
    # Large bodies are fetched although the inbox is full.
    bodies = [f"{number} {BIG}" for number in range(100)]
    out.ok("topic_send_many", "T", bodies)
    for body in bodies:
        assert (await boxes[0].message()).body == body


@in_loop
async def test_a_body_is_fetched_by_a_node_that_still_may(world: World, hub: Hub, out: Program):
    revoked, box = await joined(hub, "D1", "T"), await joined(hub, "A1", "T")
    # The hub reads nothing in between, because nothing is awaited.
    out.ok("topic_send", "T", BIG)
    world.execute("DELETE FROM messages.auth WHERE ident = 'D1'")
    assert (await box.message()).body == BIG
    await revoked.event("disconnect", "D1")
    assert hub.counters.lost_bodies == 0


@in_loop
async def test_an_expired_body_is_reported_as_expired(world: World, hub: Hub):
    out = world.node("user2", "OUT", notify="C")
    box = await joined(hub, "C1", "C")
    out.ok("topic_send", "C", BIG)
    out.query("SELECT pg_sleep(1.1)")
    out.ok("topic_send", "C", "next")
    lost = await box.message("C")
    assert (lost.body, lost.header["Err"], lost.header["Size"]) == (None, "12", len(BIG))
    assert lost.header["Errstr"].endswith("expired")
    assert "Body" not in lost.frame.text
    assert (await box.message("C")).body == "next"
    assert hub.counters.lost_bodies == 1


# Events. With a few nodes PostgreSQL names them in the event; with more the hub asks.


@pytest.mark.parametrize("more", [0, MANY])
@in_loop
async def test_an_event_reaches_only_the_nodes_that_may_know(world: World, hub: Hub, more: int):
    await crowd(hub, more)
    a1, a2, b1 = [await joined(hub, ident) for ident in ("A1", "A2", "B1")]
    quiet = await joined(hub, "A3", events=False)
    out = world.node("user2", "OUT", notify="T")
    out.ok("topic_unnotify", "T")
    out.ok("topic_notify", "V")
    for box, topic in ((a1, "T"), (a2, "T"), (b1, "V")):
        await box.event("connect", "OUT")
        await box.event("topic_notify", "OUT", topic)
    await a1.event("topic_none_notify", "T")
    for function, topic in (("listen", "T"), ("unlisten", "T"), ("listen", "U")):
        await ok(hub.run("A2", a2, f"topic_{function}", topic))
    await a1.event("topic_unlisten", "A2", "T")
    await a1.event("topic_listen", "A2", "U")
    # A node is not told of its own calls.
    assert not [event for event in a2.events if " A2" in event]
    assert not [event for event in a1.events + a2.events if event.endswith(" V")]
    assert not [event for event in b1.events if event.endswith(" T")]
    assert quiet.frames == []


@pytest.mark.parametrize("more", [0, MANY])
@in_loop
async def test_a_revoked_right_is_reported_once(world: World, hub: Hub, more: int, out: Program):
    rules = world.owner.connection
    await crowd(hub, more)
    a1, d1 = await joined(hub, "A1", "T"), await joined(hub, "D1", "T")
    deaf = await joined(hub, "A2", "T", events=False)
    await ok(hub.run("D1", d1, "topic_notify", "W"))
    rules.execute("DELETE FROM messages.auth WHERE ident = 'D1' AND dest = 'T'")
    out.ok("topic_send", "T", "secret")
    await d1.event("topic_unlisten", "D1", "T")
    assert (await a1.message()).body == "secret"
    rules.execute("DELETE FROM messages.auth WHERE ident = 'D1'")
    await d1.event("disconnect", "D1")
    # A disconnected node may return; a revoked one may not.
    world.owner.query("SELECT messages._disconnect('A2')")
    await deaf.event("disconnect", "A2")
    assert hub.counters.nodes == 1 + more
    assert await err(hub.run("A2", deaf, "topic_listen", "T")) == 53
    await ok(hub.init("A2", deaf))
    await ok(hub.run("A2", deaf, "topic_listen", "T"))
    out.ok("topic_send", "T", "again")
    while (await deaf.message()).body != "again":
        pass
    assert await err(hub.run("D1", d1, "topic_notify", "W")) == 53
    assert await err(hub.init("D1", d1)) == 5
    ended = [event for event in d1.events if " D1" in event]
    assert ended == ["topic_unlisten D1 T", "topic_unnotify D1 W", "disconnect D1"]
    assert d1.bodies == []
    assert deaf.events == ["topic_unlisten A2 T", "disconnect A2"]


@in_loop
async def test_a_node_name_reused_by_another_role_gets_only_own_messages(world: World, hub: Hub):
    out = world.node("user2", "OUT")
    former, busy = await joined(hub, "A1"), await joined(hub, "A2")
    # While the hub fetches these bodies, the message after them waits.
    for _ in range(9):
        out.ok("rpc", "A2", "x", BIG)
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


@in_loop
async def test_a_role_that_knows_the_channel_cannot_forge_hub_events(world: World, hub: Hub):
    box = await joined(hub, "A1")
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


@in_loop
async def test_each_call_is_by_the_node_it_names_however_they_mix(hub: Hub):
    idents = [f"A{number}" for number in range(15)]
    boxes = {ident: await joined(hub, ident, f"T.{ident}") for ident in idents}
    await asyncio.gather(*(ok(hub.run(i, boxes[i], "topic_notify", f"T.{i}")) for i in idents))
    pairs = [(ident, other) for ident in idents for other in idents]
    sends = [hub.run(i, boxes[i], "topic_send", f"T.{to}", f"{i} to {to}") for i, to in pairs]
    answers = [answer["Err"] for answer in await asyncio.gather(*sends)]
    assert answers == ["0" if i == other else "21" for i, other in pairs]
    for ident in idents:
        assert (await boxes[ident].message(f"T.{ident}")).body == f"{ident} to {ident}"
