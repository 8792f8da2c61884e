"""AsyncPubSub: coroutines, and cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from psqlmessages import AsyncPubSub
from psqlmessages.pubsub import Event
from tests.client.nodes import in_a_loop
from tests.conftest import TestedServer
from tests.sql.conftest import Program


class AsyncReceiver(asyncio.Queue[Event]):
    """A queue of the events of channel A, filled by a coroutine function."""

    @classmethod
    async def of(cls, bus: AsyncPubSub) -> AsyncReceiver:
        receiver = cls()
        await bus.subscribe("A")
        bus.on("A", receiver.put)
        return receiver

    async def payload(self) -> Any:
        return (await self.get()).payload


@pytest.mark.parametrize("autocommit", [True, False])
@in_a_loop
async def test_a_connection_that_is_given_is_used_with_its_transactions(
    server: TestedServer, listener: Program, autocommit: bool
):
    given = await psycopg.AsyncConnection.connect(server.url("user2"), autocommit=autocommit)
    async with given:
        bus = AsyncPubSub(given, interval=0.1)
        receiver = await AsyncReceiver.of(bus)
        await bus.publish("A", "at once")
        assert await receiver.payload() == "at once"
        async with given.transaction():
            for _ in range(3):
                await bus.publish("A", "x" * 20_000)
            assert listener.payloads() == ["!at once"]
        assert [await receiver.payload() for _ in range(3)] == ["x" * 20_000] * 3
        await asyncio.gather(*(given.execute("SELECT pg_sleep(0.001)") for _ in range(30)))
        await given.rollback()
        await bus.close()
        assert await (await given.execute("SELECT pg_listening_channels()")).fetchall() == []


@in_a_loop
async def test_a_cancelled_publish_does_not_harm_the_connection(server: TestedServer):
    async with AsyncPubSub(server.url("user1")) as bus:
        receiver = await AsyncReceiver.of(bus)
        for turn in range(10):
            task = asyncio.create_task(bus.publish("A", "я" * 200_000))
            await asyncio.wait({task}, timeout=turn / 1000)
            task.cancel()
            await asyncio.wait({task})
        await bus.publish("A", "last")
        while (payload := await receiver.payload()) != "last":
            is_whole = payload == "я" * 200_000
            assert is_whole
        assert (bus.counters.malformed, bus.counters.lost_connections) == (0, 0)


@in_a_loop
async def test_failing_or_cancelled_coroutines_do_not_end_the_bus(server: TestedServer):
    async def fails(event: Event) -> None:
        raise ValueError(event.payload)

    async def cancels(event: Event) -> None:
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    async with AsyncPubSub(server.url("user1")) as bus:
        for handler in (fails, cancels):
            bus.on("A", handler)
        receiver = await AsyncReceiver.of(bus)
        for number in range(2):
            await bus.publish("A", number)
            assert await receiver.payload() == number
        assert bus.counters.handler_failures == 4
