"""AsyncPubSub on the real database: the same as PubSub, for asyncio."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from psqlmessages import AsyncPubSub, ConnectionLost, NodeClosed, Options, ServerUnreachable
from psqlmessages.pubsub import Event
from psqlmessages.pubsub.statements import Statement
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.pubsub.conftest import Listener, end_backend
from tests.pubsub.test_reconnect import QUICK

END_SLEEPERS = """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE query = 'SELECT pg_sleep(30)'
"""
NewBus = Callable[..., AsyncPubSub]


def run(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a test's coroutine; a task that is stuck fails it."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await coroutine

    asyncio.run(limited())


class Ear:
    """A handler that keeps what it is called with: a coroutine function."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[Event] = asyncio.Queue()

    async def __call__(self, event: Event) -> None:
        await self._heard.put(event)

    async def event(self) -> Event:
        async with asyncio.timeout(20):
            return await self._heard.get()

    async def payload(self) -> Any:
        return (await self.event()).payload


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, with turns of the loop between."""
    never = asyncio.Event()
    for _ in range(1000):
        if condition():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), 0.01)
    raise AssertionError("it never came to be")


@pytest.fixture
def new_bus(server: TestedServer) -> NewBus:
    """Make a bus with a connection of its own, or on one that is given."""

    def make(connection: psycopg.AsyncConnection | str = "", **settings: Any) -> AsyncPubSub:
        return AsyncPubSub(connection or server.url("user1"), **settings)

    return make


def test_what_is_published_is_heard(new_bus: NewBus, listener: Listener) -> None:
    payloads = [None, "", "text", {"a": 1}, "текст", "\0", "x" * 50_000, "я" * 5_000_000]

    async def test() -> None:
        ear, called = Ear(), []
        async with new_bus() as bus:
            assert await bus.subscribe("A")
            assert not await bus.subscribe("A")
            for handler in (ear, called.append):
                bus.on("A", handler)
            for payload in payloads:
                await bus.publish("A", payload)
            heard = [await ear.event() for _ in payloads]
            is_equal = [event.payload for event in heard] == payloads
            assert is_equal
            assert {event.process_id for event in heard} == {bus.connection.info.backend_pid}
            await until(lambda: called == heard)
            assert await bus.unsubscribe("A")
            assert not await bus.unsubscribe("A")

    run(test())
    assert listener.segments()[:5] == ["", "!", "!text", '@{"a":1}', "$IdGC0LXQutGB0YI="]


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_connection_that_is_given_is_used_with_its_transactions(
    server: TestedServer, new_bus: NewBus, listener: Listener, autocommit: bool
) -> None:
    async def test() -> None:
        given = await psycopg.AsyncConnection.connect(server.url("user2"), autocommit=autocommit)
        async with given:
            bus, ear = new_bus(given, interval=0.1), Ear()
            await bus.subscribe("A")
            bus.on("A", ear)
            await bus.publish("A", "at once")
            assert await ear.payload() == "at once"
            async with given.transaction():
                for _ in range(3):
                    await bus.publish("A", "x" * 20_000)
                assert listener.segments() == ["!at once"]
            assert [await ear.payload() for _ in range(3)] == ["x" * 20_000] * 3
            await asyncio.gather(*(given.execute("SELECT pg_sleep(0.01)") for _ in range(30)))
            await given.rollback()
            await bus.close()
            cursor = await given.execute("SELECT pg_listening_channels()")
            assert await cursor.fetchall() == []

    run(test())


def test_tasks_share_a_bus_and_each_keeps_its_order(new_bus: NewBus) -> None:
    async def test() -> None:
        ear = Ear()
        async with new_bus() as bus:
            await bus.subscribe("A")
            bus.on("A", ear)

            async def write(number: int) -> None:
                for count in range(20):
                    await bus.publish("A", [number, count, "я" * 5_000])

            writing = asyncio.gather(*(write(number) for number in range(10)))
            heard = [await ear.payload() for _ in range(200)]
            await writing
            for number in range(10):
                assert [count for n, count, _ in heard if n == number] == list(range(20))

    run(test())


def test_a_publish_that_is_cancelled_does_not_harm_the_connection(new_bus: NewBus) -> None:
    async def test() -> None:
        ear = Ear()
        async with new_bus() as bus:
            await bus.subscribe("A")
            bus.on("A", ear)
            for turn in range(10):
                task = asyncio.create_task(bus.publish("A", "я" * 200_000))
                await asyncio.wait({task}, timeout=turn / 1000)
                task.cancel()
                await asyncio.wait({task})
            await bus.publish("A", "last")
            payload = await ear.payload()
            while payload != "last":
                is_whole = payload == "я" * 200_000
                assert is_whole
                payload = await ear.payload()
            assert bus.counters.malformed == 0
            assert bus.counters.lost_connections == 0

    run(test())


def test_a_connection_that_was_cut_comes_back_and_listens(
    new_bus: NewBus, superuser: psycopg.Connection
) -> None:
    async def test() -> None:
        ear = Ear()
        async with new_bus(options=QUICK) as bus:
            await bus.subscribe("A")
            bus.on("A", ear)
            await asyncio.to_thread(end_backend, superuser, bus.connection)
            await until(lambda: bus.counters.reconnects == 1)
            await bus.publish("A", "again")
            assert await ear.payload() == "again"

    run(test())


def test_a_publisher_without_subscriptions_finds_a_cut_before_it_sends(
    new_bus: NewBus, superuser: psycopg.Connection, listener: Listener
) -> None:
    async def test() -> None:
        async with new_bus(options=QUICK) as bus:
            await bus.publish("A", 1)
            await asyncio.to_thread(end_backend, superuser, bus.connection)
            bus._line._used_at -= 2
            await bus.publish("A", 2)

    run(test())
    assert listener.segments() == ["@1", "@2"]


def test_a_connection_lost_amid_a_transaction_does_not_publish_outside_of_it(
    server: TestedServer, new_bus: NewBus, superuser: psycopg.Connection, listener: Listener
) -> None:
    async def test() -> None:
        async with await psycopg.AsyncConnection.connect(server.url("user2")) as given:
            bus = new_bus(given, options=QUICK)
            await bus.subscribe("B")
            await given.execute("SELECT 1")
            await asyncio.to_thread(end_backend, superuser, given)
            await until(lambda: bus.counters.lost_connections == 1)
            with pytest.raises(ConnectionLost, match="amid a transaction"):
                await bus.publish("A", "x")
            await bus.publish("A", "alone")
            await bus.close()

    run(test())
    assert listener.segments() == ["!alone"]


def test_a_stalled_network_is_found_and_close_ends_a_wait_at_once(
    server: TestedServer, new_bus: NewBus
) -> None:
    address = conninfo_to_dict(server.url("user1"))

    async def test(proxy: Proxy) -> None:
        dsn = make_conninfo(
            server.url("user1"), host="127.0.0.1", port=proxy.port, connect_timeout=2
        )
        bus = new_bus(dsn, interval=0.1, options=QUICK)
        await bus.subscribe("A")
        proxy.stall()
        await until(lambda: bus.counters.reconnects == 1)
        proxy.refuse()
        await until(lambda: not bus.is_healthy)
        waiting = asyncio.create_task(bus.publish("A"))
        await asyncio.wait({waiting}, timeout=0.2)
        started = monotonic()
        await bus.close()
        assert monotonic() - started < 1.5
        with pytest.raises((NodeClosed, ConnectionLost)):
            await waiting

    with Proxy(str(address["host"]), int(str(address["port"]))).serve() as proxy:
        run(test(proxy))


def test_a_call_that_finds_the_connection_lost_does_not_leave_the_bus_deaf(
    new_bus: NewBus, raw: Callable[[str], None], superuser: psycopg.Connection
) -> None:
    """The task of the bus waits meanwhile for a descriptor that is closed, and given away."""

    def long_one(_: object) -> Any:
        yield Statement("SELECT pg_sleep(30)")

    async def test() -> None:
        ear = Ear()
        async with new_bus(interval=600.0, options=QUICK) as bus:
            await bus.subscribe("A")
            bus.on("A", ear)
            for number in range(3):
                with pytest.raises(ConnectionLost, match="no answer"):
                    await bus._line.run(long_one)
                await until(lambda: bus.is_healthy)
                await asyncio.to_thread(raw, f"@{number}")
                assert await ear.payload() == number

    run(test())
    superuser.execute(END_SLEEPERS)


def test_close_does_not_wait_for_a_server_that_does_not_answer(
    server: TestedServer, new_bus: NewBus
) -> None:
    address = conninfo_to_dict(server.url("user1"))

    async def test(proxy: Proxy) -> None:
        dsn = make_conninfo(
            server.url("user1"), host="127.0.0.1", port=proxy.port, connect_timeout=10
        )
        bus = new_bus(dsn, interval=0.1, options=QUICK)
        await bus.subscribe("A")
        proxy.refuse()
        await until(lambda: not bus.is_healthy)
        with socket.create_server(("127.0.0.1", proxy.port)) as deaf:
            connection, _ = await asyncio.to_thread(deaf.accept)
            started = monotonic()
            await bus.close()
            assert monotonic() - started < 1
            connection.close()

    with Proxy(str(address["host"]), int(str(address["port"]))).serve() as proxy:
        run(test(proxy))


def test_handlers_that_fail_are_counted_and_the_bus_goes_on(new_bus: NewBus) -> None:
    async def fails(event: Event) -> None:
        raise ValueError(event.payload)

    async def test() -> None:
        ear = Ear()
        async with new_bus() as bus:
            await bus.subscribe("A")
            bus.on("A", fails)
            bus.on("A", ear)
            await bus.publish("A", 1)
            await bus.publish("A", 2)
            assert [await ear.payload(), await ear.payload()] == [1, 2]
            assert bus.counters.handler_failures == 2

    run(test())


def test_a_handler_may_use_the_bus_and_close_it(new_bus: NewBus) -> None:
    async def test() -> None:
        async with new_bus() as bus:

            async def answer(event: Event) -> None:
                await bus.publish("B", event.payload * 2)

            async def end(event: Event) -> None:
                assert event.payload == 4
                await bus.close()

            for channel, handler in (("A", answer), ("B", end)):
                await bus.subscribe(channel)
                bus.on(channel, handler)
            await bus.publish("A", 2)
            await bus.run()
            assert bus.connection is None
            assert bus.counters.handler_failures == 0

    run(test())


def test_a_bus_that_is_closed_or_cannot_be_opened_says_so(new_bus: NewBus) -> None:
    async def test() -> None:
        bus = new_bus()
        await bus.publish("A")
        await bus.close()
        await bus.close()
        for use in (bus.open(), bus.publish("A"), bus.subscribe("A")):
            with pytest.raises(NodeClosed, match="the bus is closed"):
                await use
        with pytest.raises(ServerUnreachable):
            await new_bus("host=127.0.0.1 port=1").open()
        with pytest.raises(TypeError, match=r"a psycopg\.AsyncConnection or a str is needed"):
            new_bus(object())

    run(test())


def test_a_connection_that_its_owner_closes_ends_the_bus(
    server: TestedServer, new_bus: NewBus
) -> None:
    async def test() -> None:
        given = await psycopg.AsyncConnection.connect(server.url("user2"))
        bus = new_bus(given)
        await bus.subscribe("A")
        await given.close()
        await bus.run()
        with pytest.raises(NodeClosed):
            await bus.publish("A")

    run(test())


def test_a_close_that_is_cancelled_leaves_no_connection_open(
    new_bus: NewBus, superuser: psycopg.Connection
) -> None:
    async def test() -> None:
        for turn in range(5):
            bus = new_bus()
            await bus.subscribe("A")
            connection = bus.connection
            closing = asyncio.create_task(bus.close())
            await asyncio.wait({closing}, timeout=turn / 5000)
            closing.cancel()
            await asyncio.wait({closing})
            assert connection.closed

    run(test())


def test_what_comes_from_another_thread_is_heard(
    server: TestedServer, new_bus: NewBus, connect: Callable[..., psycopg.Connection]
) -> None:
    async def test() -> None:
        ear, writer = Ear(), connect()
        async with new_bus(skip_self=True, options=Options()) as bus:
            await bus.subscribe("A")
            bus.on("A", ear)
            await bus.publish("A", "own")
            thread = threading.Thread(target=writer.execute, args=("NOTIFY \"A\", '!x'",))
            thread.start()
            assert await ear.payload() == "x"
            thread.join()
            assert bus.counters.skipped == 1

    run(test())


def test_an_interval_is_kept(new_bus: NewBus) -> None:
    """The keep-alive comes again and again without any traffic."""

    async def test() -> None:
        async with new_bus(interval=0.05) as bus:
            await bus.subscribe("A")
            for _ in range(3):
                due = bus._subscriptions._due_at
                await until(lambda due=due: bus._subscriptions._due_at > due)
            assert timedelta(seconds=bus._subscriptions._due_at - monotonic()) < timedelta(
                seconds=0.06
            )

    run(test())
