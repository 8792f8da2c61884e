"""The gateway: many nodes on one session, each call by the node it names."""

import asyncio

import pytest

from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_listening import GatewayListening
from psqlmessages.client.listening import Arrival
from psqlmessages.client.options import Options
from psqlmessages.exceptions import ConnectionLost
from tests.sql.conftest import World
from tests.web.receivers import QUICK, gateway_of, in_loop, ok


@pytest.fixture
def dsn(world: World) -> str:
    """The address of the gateway's role, whose nodes are A*."""
    world.rules("user1 A* Topic T* RW 60", "user1 A1 Rpc OUT W 60", "user2 OUT Topic T* RW 60")
    return world.server.url("user1")


async def arrivals(gateway: Gateway, number: int, kind: str = "Topic") -> list[Arrival]:
    """Wait for so many arrivals of a type."""
    found: list[Arrival] = []
    async with asyncio.timeout(60):
        async for batch in gateway.batches():
            found += [arrival for arrival in batch if arrival.header["Type"] == kind]
            if len(found) >= number:
                break
    return found


@in_loop
async def test_each_call_is_by_the_node_it_names_however_they_mix(world: World, dsn: str) -> None:
    async with gateway_of(dsn) as gateway:
        idents = [f"A{number}" for number in range(15)]
        for ident in idents:
            await ok(gateway.run(ident, "init"))
        for function in ("topic_listen", "topic_notify"):
            await asyncio.gather(*(ok(gateway.run(i, function, f"T.{i}")) for i in idents))
        sends = [
            gateway.run(ident, "topic_send", f"T.{other}", f"{ident} to {other}")
            for ident in idents
            for other in idents
        ]
        answers = [answer["Err"] for answer in await asyncio.gather(*sends)]
        assert answers == ["0" if i == other else "21" for i in idents for other in idents]
        came = await arrivals(gateway, len(idents))
        assert {(a.header["From"], a.header["To"], a.text) for a in came} == {
            (ident, f"T.{ident}", f"{ident} to {ident}") for ident in idents
        }
        assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 1


@in_loop
async def test_sends_of_different_nodes_share_round_trips_and_keep_their_order(
    world: World, dsn: str
) -> None:
    async with gateway_of(dsn) as gateway:
        for ident in ("A1", "A2"):
            await ok(gateway.run(ident, "init"))
            await ok(gateway.run(ident, "topic_notify", "T"))
        await ok(gateway.run("A1", "topic_listen", "T"))
        # Each transaction that notifies takes a number; statistics come late.
        number = "SELECT pg_current_xact_id()::text::bigint"
        before = world.watcher.query(number)
        await asyncio.gather(
            *(gateway.run(f"A{1 + n % 2}", "topic_send", "T", f"{n}") for n in range(1000))
        )
        came = await arrivals(gateway, 1000)
        assert [arrival.text for arrival in came] == [f"{n}" for n in range(1000)]
        assert [arrival.header["From"] for arrival in came] == ["A1", "A2"] * 500
        assert world.watcher.query(number) - before < 100


@in_loop
async def test_a_caller_that_is_cancelled_at_any_moment_breaks_nothing(dsn: str) -> None:
    told: list[tuple[str, str, str]] = []
    async with gateway_of(dsn) as gateway:
        gateway.on_ran(lambda *done: told.append(done))
        await ok(gateway.run("A1", "init"))
        for turns in range(20):
            topic = f"T.{turns}"
            task = asyncio.create_task(gateway.run("A1", "topic_listen", topic))
            await asyncio.wait({task}, timeout=turns / 4000)
            task.cancel()
            await asyncio.wait({task})
            is_listening = (await gateway.run("A1", "topic_status", topic)).get("Listeners")
            assert (("A1", "topic_listen", topic) in told) == bool(is_listening)
            assert gateway.has("A1", "topic_listen", topic) == bool(is_listening)


@in_loop
async def test_a_reader_that_falls_far_behind_is_told_that_messages_are_lost(
    world: World, dsn: str
) -> None:
    """The inbox has a limit; calls read what waits beyond it, so that has one too."""
    out = world.node("user2", "OUT")
    out.ok("topic_notify", "T")
    async with gateway_of(dsn, Options(inbox_limit=20)) as gateway:
        await ok(gateway.run("A1", "init"))
        await ok(gateway.run("A1", "topic_listen", "T"))
        async with asyncio.timeout(60):
            while not gateway.counters.lost_connections:
                out.ok("topic_send_many", "T", ["x"] * 20)
                try:
                    await gateway.run("A1", "topic_status", "T")
                except ConnectionLost:
                    continue
        events = [arrival.header["Evt"] for arrival in await arrivals(gateway, 2, "Sys")]
        assert events[:2] == ["connection_lost", "reconnected"]
        assert (await gateway.run("A1", "topic_status", "T"))["Listeners"] == ["A1"]


def test_topics_are_registered_again_in_the_order_of_their_names() -> None:
    """Two gateways that return at the same time would wait for each other otherwise."""
    listening = GatewayListening("gateway", QUICK)
    for ident in ("A", "B"):
        listening.registration.ran("init", ident)
        for topic in ("Z", "M"):
            listening.registration.ran("topic_listen", topic, ident)
            listening.registration.ran("topic_notify", topic, ident)
    script = listening.opening()
    answers = [None, (1, "now"), 0, [{"Err": "0", "Channel": "C"}] * 2]
    asked = [script.send(answer) for answer in answers]
    assert asked[-1].params[2] == ["M", "M", "M", "M", "Z", "Z", "Z", "Z"]
