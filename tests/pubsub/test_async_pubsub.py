"""AsyncPubSub on the real database: the same as PubSub, for asyncio."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

import psycopg
import pytest

from psqlmessages import NodeClosed, Options, ServerUnreachable
from psqlmessages.pubsub import Event, async_line
from tests.client.programs import PROMPTLY
from tests.conftest import TestedServer
from tests.pubsub.asynchronous import AsyncEar, NewAsyncBus, run, until
from tests.pubsub.conftest import Listener


def test_what_is_published_is_heard(new_async_bus: NewAsyncBus, listener: Listener) -> None:
    payloads = [None, "", "text", {"a": 1}, "текст", "\0", "x" * 50_000, "я" * 5_000_000]

    async def test() -> None:
        ear, called = AsyncEar(), []
        async with new_async_bus() as bus:
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
    server: TestedServer, new_async_bus: NewAsyncBus, listener: Listener, autocommit: bool
) -> None:
    async def test() -> None:
        given = await psycopg.AsyncConnection.connect(server.url("user2"), autocommit=autocommit)
        async with given:
            bus, ear = new_async_bus(given, interval=0.1), AsyncEar()
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


def test_tasks_share_a_bus_and_each_keeps_its_order(new_async_bus: NewAsyncBus) -> None:
    async def test() -> None:
        ear = AsyncEar()
        async with new_async_bus() as bus:
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


def test_a_publish_that_is_cancelled_does_not_harm_the_connection(
    new_async_bus: NewAsyncBus,
) -> None:
    async def test() -> None:
        ear = AsyncEar()
        async with new_async_bus() as bus:
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


def test_handlers_that_fail_are_counted_and_the_bus_goes_on(new_async_bus: NewAsyncBus) -> None:
    async def fails(event: Event) -> None:
        raise ValueError(event.payload)

    async def test() -> None:
        ear = AsyncEar()
        async with new_async_bus() as bus:
            await bus.subscribe("A")
            bus.on("A", fails)
            bus.on("A", ear)
            await bus.publish("A", 1)
            await bus.publish("A", 2)
            assert [await ear.payload(), await ear.payload()] == [1, 2]
            assert bus.counters.handler_failures == 2

    run(test())


def test_a_handler_that_awaits_what_was_cancelled_does_not_end_the_bus(
    new_async_bus: NewAsyncBus,
) -> None:
    async def cancels(event: Event) -> None:
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    async def test() -> None:
        ear = AsyncEar()
        async with new_async_bus() as bus:
            await bus.subscribe("A")
            bus.on("A", cancels)
            bus.on("A", ear)
            for number in range(2):
                await bus.publish("A", number)
                assert await ear.payload() == number
            assert bus.counters.handler_failures == 2

    run(test())


def test_a_handler_may_use_the_bus_and_close_it(new_async_bus: NewAsyncBus) -> None:
    async def test() -> None:
        async with new_async_bus() as bus:

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


def test_a_bus_that_is_closed_or_cannot_be_opened_says_so(new_async_bus: NewAsyncBus) -> None:
    async def test() -> None:
        bus = new_async_bus()
        await bus.publish("A")
        await bus.close()
        await bus.close()
        for use in (bus.open(), bus.publish("A"), bus.subscribe("A")):
            with pytest.raises(NodeClosed, match="the bus is closed"):
                await use
        with pytest.raises(ServerUnreachable):
            await new_async_bus("host=127.0.0.1 port=1").open()
        with pytest.raises(TypeError, match=r"a psycopg\.AsyncConnection or a str is needed"):
            new_async_bus(object())

    run(test())


def test_a_connection_that_its_owner_closes_ends_the_bus(
    server: TestedServer, new_async_bus: NewAsyncBus
) -> None:
    async def test() -> None:
        given = await psycopg.AsyncConnection.connect(server.url("user2"))
        bus = new_async_bus(given)
        await bus.subscribe("A")
        await given.close()
        await bus.run()
        with pytest.raises(NodeClosed):
            await bus.publish("A")

    run(test())


def test_a_bus_is_closed_though_the_owner_of_its_connection_is_busy(
    server: TestedServer, new_async_bus: NewAsyncBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_line, "_CLOSING_SECONDS", 0.2)

    async def test() -> None:
        async with await psycopg.AsyncConnection.connect(server.url("user2")) as given:
            bus = new_async_bus(given)
            await bus.subscribe("A")
            async with asyncio.timeout(PROMPTLY), given.lock:
                await bus.close()
            await given.execute("SELECT 1")

    run(test())


def test_a_close_that_is_cancelled_leaves_no_connection_open(
    new_async_bus: NewAsyncBus, superuser: psycopg.Connection
) -> None:
    async def test() -> None:
        for turn in range(5):
            bus = new_async_bus()
            await bus.subscribe("A")
            connection = bus.connection
            closing = asyncio.create_task(bus.close())
            await asyncio.wait({closing}, timeout=turn / 5000)
            closing.cancel()
            await asyncio.wait({closing})
            assert connection.closed

    run(test())


def test_what_comes_from_another_thread_is_heard(
    server: TestedServer, new_async_bus: NewAsyncBus, connect: Callable[..., psycopg.Connection]
) -> None:
    async def test() -> None:
        ear, writer = AsyncEar(), connect()
        async with new_async_bus(skip_self=True, options=Options()) as bus:
            await bus.subscribe("A")
            bus.on("A", ear)
            await bus.publish("A", "own")
            thread = threading.Thread(target=writer.execute, args=("NOTIFY \"A\", '!x'",))
            thread.start()
            assert await ear.payload() == "x"
            thread.join()
            assert bus.counters.skipped == 1

    run(test())


def test_an_interval_is_kept(new_async_bus: NewAsyncBus) -> None:
    """The keep-alive comes again and again without any traffic."""

    async def test() -> None:
        async with new_async_bus(interval=0.05) as bus:
            await bus.subscribe("A")
            for _ in range(3):
                due = bus._subscriptions._due_at
                await until(lambda due=due: bus._subscriptions._due_at > due)
            assert timedelta(seconds=bus._subscriptions._due_at - monotonic()) < timedelta(
                seconds=0.06
            )

    run(test())
