"""AsyncPubSub: a lost connection comes back and listens as before."""

import asyncio
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from psqlmessages import ConnectionLost, NodeClosed
from psqlmessages.pubsub.statements import Statement
from tests.client.programs import PROMPTLY
from tests.client.proxy import Proxy
from tests.conftest import TestedServer
from tests.pubsub.asynchronous import AsyncEar, NewAsyncBus, run, until
from tests.pubsub.conftest import Listener, end_backend
from tests.pubsub.test_reconnect import QUICK, WATCHFUL

END_SLEEPERS = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
    WHERE query = 'SELECT pg_sleep(30)'
"""


def test_a_connection_that_was_cut_comes_back_and_listens(
    new_async_bus: NewAsyncBus, superuser: psycopg.Connection
) -> None:
    async def test() -> None:
        ear = AsyncEar()
        async with new_async_bus(options=QUICK) as bus:
            await bus.subscribe("A")
            bus.on("A", ear)
            await asyncio.to_thread(end_backend, superuser, bus.connection)
            await until(lambda: bus.counters.reconnects == 1)
            await bus.publish("A", "again")
            assert await ear.payload() == "again"

    run(test())


def test_a_publisher_without_subscriptions_finds_a_cut_before_it_sends(
    new_async_bus: NewAsyncBus, superuser: psycopg.Connection, listener: Listener
) -> None:
    async def test() -> None:
        async with new_async_bus(options=QUICK) as bus:
            await bus.publish("A", 1)
            await asyncio.to_thread(end_backend, superuser, bus.connection)
            bus._line._used_at -= 2
            await bus.publish("A", 2)

    run(test())
    assert listener.segments() == ["@1", "@2"]


def test_a_connection_lost_amid_a_transaction_does_not_publish_outside_of_it(
    server: TestedServer,
    new_async_bus: NewAsyncBus,
    superuser: psycopg.Connection,
    listener: Listener,
) -> None:
    async def test() -> None:
        async with await psycopg.AsyncConnection.connect(server.url("user2")) as given:
            bus = new_async_bus(given, options=QUICK)
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
    server: TestedServer, new_async_bus: NewAsyncBus
) -> None:
    address = conninfo_to_dict(server.url("user1"))

    async def test(proxy: Proxy) -> None:
        dsn = make_conninfo(
            server.url("user1"), host="127.0.0.1", port=proxy.port, connect_timeout=90
        )
        bus = new_async_bus(dsn, interval=0.1, options=WATCHFUL)
        await bus.subscribe("A")
        proxy.stall()
        await until(lambda: bus.counters.reconnects == 1)
        proxy.refuse()
        await until(lambda: not bus.is_healthy)
        waiting = asyncio.create_task(bus.publish("A"))
        await asyncio.wait({waiting}, timeout=0.2)
        started = monotonic()
        await bus.close()
        assert monotonic() - started < PROMPTLY
        with pytest.raises((NodeClosed, ConnectionLost)):
            await waiting

    with Proxy(str(address["host"]), int(str(address["port"]))).serve() as proxy:
        run(test(proxy))


def test_a_call_that_finds_the_connection_lost_does_not_leave_the_bus_deaf(
    new_async_bus: NewAsyncBus, raw: Callable[[str], None], superuser: psycopg.Connection
) -> None:
    """The task of the bus waits meanwhile for a descriptor that is closed, and given away."""

    def long_one(_: object) -> Any:
        yield Statement("SELECT pg_sleep(30)")

    async def test() -> None:
        ear = AsyncEar()
        async with new_async_bus(interval=600.0, options=WATCHFUL) as bus:
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
    server: TestedServer, new_async_bus: NewAsyncBus
) -> None:
    address = conninfo_to_dict(server.url("user1"))

    async def test(proxy: Proxy) -> None:
        dsn = make_conninfo(
            server.url("user1"), host="127.0.0.1", port=proxy.port, connect_timeout=90
        )
        bus = new_async_bus(dsn, interval=0.1, options=WATCHFUL)
        await bus.subscribe("A")
        proxy.refuse()
        await until(lambda: not bus.is_healthy)
        with socket.create_server(("127.0.0.1", proxy.port)) as deaf:
            connection, _ = await asyncio.to_thread(deaf.accept)
            started = monotonic()
            await bus.close()
            assert monotonic() - started < PROMPTLY
            connection.close()

    with Proxy(str(address["host"]), int(str(address["port"]))).serve() as proxy:
        run(test(proxy))
