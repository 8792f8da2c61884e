"""The gateway: many nodes on one session, each call by the node it names."""

import asyncio
import json
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode
from psqlmessages.client import async_link, gateway_calls
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_listening import GatewayListening
from psqlmessages.client.listening import Arrival
from psqlmessages.client.options import Options
from psqlmessages.client.registration import Registration
from psqlmessages.exceptions import ConnectionLost, NodeClosed, ServerUnreachable
from tests.sql.conftest import World
from tests.web.receivers import QUICK, err, gateway_of, ok, run


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


def test_each_call_is_by_the_node_it_names_however_they_mix(world: World, dsn: str) -> None:
    async def test() -> None:
        async with gateway_of(dsn) as gateway:
            idents = [f"A{number}" for number in range(30)]
            for ident in idents:
                await ok(gateway.run(ident, "init"))
            for function in ("topic_listen", "topic_notify"):
                await asyncio.gather(*(ok(gateway.run(i, function, f"T.{i}")) for i in idents))
            sends = [
                gateway.run(ident, "topic_send", f"T.{other}", f"{ident} to {other}")
                for ident in idents
                for other in idents
            ]
            answers = await asyncio.gather(*sends)
            right = [answer["Err"] == "0" for answer in answers]
            assert right == [ident == other for ident in idents for other in idents]
            assert {answer["Err"] for answer in answers} == {"0", "21"}
            came = await arrivals(gateway, len(idents))
            assert {(a.header["From"], a.header["To"], a.text) for a in came} == {
                (ident, f"T.{ident}", f"{ident} to {ident}") for ident in idents
            }
            assert world.owner.query("SELECT count(*) FROM psqlmessages_session") == 1

    run(test())


def test_answers_are_those_of_sql_and_a_refusal_is_one(world: World, dsn: str) -> None:
    async def test() -> None:
        async with gateway_of(dsn) as gateway:
            assert await gateway.run("A1", "topic_listen", "T") == {
                "Err": "50", "Errstr": "call messages.init first",
            }  # fmt: skip
            channel = (await gateway.run("A1", "init"))["Channel"]
            again = await gateway.run("A1", "init")
            assert again == {"Err": "0", "Channel": channel, "Already": 1}
            assert await gateway.run("A2", "topic_listen", "T") == {
                "Err": "53", "Errstr": "A2 is not a node of this session",
            }  # fmt: skip
            assert await gateway.run("A1", "topic_notify", "X") == {
                "Err": "9", "Errstr": "Topic X is not existent",
            }  # fmt: skip
            assert await gateway.run("A1", "topic_listen", "T") == {"Err": "0"}
            assert await gateway.run("A1", "topic_listen", "T") == {"Err": "0", "Already": 1}
            status = await gateway.run("A1", "topic_status", "T")
            assert status == {"Err": "0", "Notifiers": [], "Listeners": ["A1"]}
            assert (await gateway.run("A1", "topic_auth", "T"))["Listeners"] == ["A*", "OUT"]
            assert await err(gateway.run("A1", "get_data", "x")) == 52
            assert await err(gateway.run("A1", "audience", "{}")) == 52
            assert await err(gateway.run("A1", "rpc", "OUT", "token", "body", "zip")) == 17
            with pytest.raises(TypeError, match="no function"):
                await gateway.run("A1", "pg_sleep", "1")
            with pytest.raises(TypeError, match="takes 1 arguments"):
                await gateway.run("A1", "topic_listen", "T", "U")
            with pytest.raises(ValueError, match="NUL"):
                await gateway.run("A1", "topic_listen", "\0")

    run(test())


def test_sends_of_different_nodes_share_round_trips_and_keep_their_order(
    world: World, dsn: str
) -> None:
    async def test() -> None:
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

    run(test())


def test_a_caller_that_is_cancelled_at_any_moment_breaks_nothing(world: World, dsn: str) -> None:
    async def test() -> None:
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

    run(test())


def test_the_session_ends_with_the_last_node_and_begins_anew_with_the_next(
    world: World, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes go on only while there is a channel: the connection is not taken for dead."""
    probing = Options(
        evaluate_interval=timedelta(milliseconds=20),
        probe_interval=timedelta(milliseconds=20),
        probe_timeout=timedelta(seconds=60),
    )
    skipped = 0.0
    monkeypatch.setattr(async_link, "monotonic", lambda: monotonic() + skipped)

    async def test() -> None:
        nonlocal skipped
        async with gateway_of(dsn, probing) as gateway:
            for turn in range(3):
                # Of the server's own time, while the gateway goes on.
                await asyncio.to_thread(world.watcher.query, "SELECT pg_sleep(0.4)")
                # A probe that was sent meanwhile would be overdue.
                skipped += 100.0
                answer = await ok(gateway.run("A1", "init"))
                await ok(gateway.run("A1", "topic_listen", "T"))
                await ok(gateway.run("A1", "topic_notify", "T"))
                await ok(gateway.run("A1", "topic_send", "T", f"{turn}"))
                assert [arrival.text for arrival in await arrivals(gateway, 1)] == [f"{turn}"]
                async with asyncio.timeout(60):
                    while gateway.echo_seconds is None:
                        await gateway.run("A1", "topic_status", "T")
                assert (
                    world.owner.query("SELECT channel FROM psqlmessages_session")
                    == (answer["Channel"])
                )
                await ok(gateway.run("A1", "deinit" if turn else "crash"))
                assert gateway.idents == ()
            assert gateway.counters.lost_connections == 0
            assert gateway.counters.foreign == gateway.counters.malformed == 0

    run(test())


def test_a_node_that_was_disconnected_and_registers_again_receives_again(
    world: World, dsn: str
) -> None:
    """Its channel is another one then."""

    async def test() -> None:
        async with AsyncNode("A1", dsn) as node:
            world.owner.query("SELECT messages._disconnect('A1')")
            await node.init("A1")
            await node.topic_listen("T")
            await node.topic_notify("T")
            await node.topic_send("T", "again")
            bodies = (message.body async for message in node.messages(timeout=timedelta(minutes=1)))
            while await anext(bodies) != "again":
                pass

    run(test())


def test_closing_deregisters_all_nodes_and_ends_what_waits(
    world: World, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_link, "_CLOSING_SECONDS", 60.0)

    async def test() -> None:
        out = world.node("user2", "OUT")
        async with gateway_of(dsn) as gateway:
            reading = asyncio.create_task(arrivals(gateway, 1))
            for number in range(60):
                await ok(gateway.run(f"A{number}", "init"))
            out.payloads()
            await gateway.close()
            assert await reading == []
            assert sorted(out.events()) == sorted(f"disconnect A{n}" for n in range(60))
            with pytest.raises(NodeClosed):
                await gateway.run("A1", "init")

    run(test())


def test_a_gateway_that_cannot_connect_says_so() -> None:
    async def test() -> None:
        gateway = Gateway("gateway", "host=127.0.0.1 port=1")
        with pytest.raises(ServerUnreachable):
            await gateway.open()
        await gateway.close()

    run(test())


def test_a_reader_that_falls_far_behind_is_told_that_messages_are_lost(
    world: World, dsn: str
) -> None:
    """The inbox has a limit; calls read what waits beyond it, so that has one too."""

    async def test() -> None:
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

    run(test())


def test_topics_are_registered_again_in_the_order_of_their_names() -> None:
    """Two gateways that return at once would wait for each other otherwise."""
    listening = GatewayListening("gateway", QUICK)
    registration: Registration = listening.registration
    for ident in ("A", "B"):
        registration.ran("init", ident)
        for topic in ("Z", "M"):
            registration.ran("topic_listen", topic, ident)
            registration.ran("topic_notify", topic, ident)
        registration.ran("topic_observe", "A*", ident)
    script = listening.opening()
    answers: list[Any] = [
        None,
        (1, "now"),
        0,
        [{"Err": "0", "Channel": "C"}] * 2,
        [{"Err": "0"}] * 8,
        [{"Err": "0"}],
    ]
    asked = [script.send(answer) for answer in answers]
    with pytest.raises(StopIteration):
        script.send([{"Err": "0"}])
    assert [call.params[2] for call in asked[3:]] == [
        ["M", "M", "M", "M", "Z", "Z", "Z", "Z"], ["A*"], ["A*"],
    ]  # fmt: skip


def test_calls_of_one_function_are_of_the_same_sql() -> None:
    short = gateway_calls.acting("A", "topic_send", "T", "x")
    whole = gateway_calls.acting("B", "topic_send", "T", json.dumps([]), "token", "json")
    assert short.sql == whole.sql
    assert short.is_send
    assert short.registers is None


def test_what_the_server_aborts_raises_and_harms_no_other_call(world: World, dsn: str) -> None:
    impatient = make_conninfo(dsn, options="-c lock_timeout=100")

    async def test() -> None:
        async with gateway_of(impatient) as gateway:
            for ident in ("A1", "A2"):
                await ok(gateway.run(ident, "init"))
            await ok(gateway.run("A1", "topic_listen", "T"))
            with world.owner.connection.transaction():
                world.owner.query("SELECT FROM psqlmessages_topic WHERE name = 'T' FOR UPDATE")
                results = await asyncio.gather(
                    gateway.run("A1", "topic_unlisten", "T"),
                    gateway.run("A2", "topic_listen", "T.2"),
                    return_exceptions=True,
                )
            assert isinstance(results[0], psycopg.errors.LockNotAvailable)
            assert results[1] == {"Err": "0"}
            assert gateway.has("A1", "topic_listen", "T")

    run(test())
