"""AsyncNode reads subscriptions as Node does; what is cancelled loses nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from time import monotonic

import pytest

from psqlmessages import AsyncNode, AsyncSubscription, Node
from psqlmessages.exceptions import NotSubscribed
from tests.client.nodes import NOW, in_a_loop
from tests.client.programs import PROMPTLY
from tests.sql.conftest import World
from tests.streams.client.conftest import HOURS, SOON, NewAsyncReader


async def bodies(messages: AsyncSubscription, number: int) -> list[object]:
    """The bodies of the next messages, so many."""
    async with asyncio.timeout(SOON.total_seconds()):
        return [(await anext(messages)).body for _ in range(number)]


def publish_all(writer: Node, topic: str, number: int) -> None:
    for body in range(number):
        writer.publish(topic, body)


@pytest.mark.usefixtures("no_second_look")
@in_a_loop
async def test_what_waited_comes_first_then_live_ones(
    writer: Node, new_async_reader: NewAsyncReader
) -> None:
    async with new_async_reader() as node:
        await node.subscribe("NEWS", HOURS)
    writer.publish_many("NEWS", range(5))
    async with new_async_reader() as node:
        messages = node.subscribe("NEWS", HOURS)
        assert await bodies(messages, 5) == [0, 1, 2, 3, 4]
        for number in range(5, 8):
            coming = asyncio.create_task(bodies(messages, 1))
            await asyncio.wait({coming}, timeout=0.05)
            assert not coming.done()
            await asyncio.to_thread(writer.publish, "NEWS", number)
            assert await coming == [number]
        assert node.counters.calls <= 12


@in_a_loop
async def test_awaited_it_subscribes_at_once_and_else_with_the_first_message(
    writer: Node, new_async_reader: NewAsyncReader
) -> None:
    async with new_async_reader() as node:
        lazy = node.subscribe("NEWS", idle=NOW)
        with pytest.raises(NotSubscribed):
            await node.subscription("NEWS")
        messages = await node.subscribe("NEWS")
        assert messages.topic == "NEWS"
        assert (await node.subscription("NEWS")).is_recovered
        await asyncio.to_thread(writer.publish, "NEWS", "x")
        assert await bodies(messages, 1) == ["x"]
        await messages.confirm()
        assert [message async for message in lazy] == []


@in_a_loop
async def test_a_wait_that_is_cancelled_loses_nothing(
    writer: Node, new_async_reader: NewAsyncReader
) -> None:
    async with new_async_reader() as node:
        messages = await node.subscribe("NEWS", max_rows=7)
        taken: list[object] = []
        cancelled, patience = 0, 0.0
        publishing = asyncio.create_task(asyncio.to_thread(publish_all, writer, "NEWS", 100))
        while len(taken) < 100:
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.wait({waiting}, timeout=patience)
            waiting.cancel()
            try:
                taken.append((await waiting).body)
                patience = 0.0
            except asyncio.CancelledError:
                # Ever longer, until some come through, however slow the machine.
                cancelled, patience = cancelled + 1, 1.5 * patience + 0.0005
        await publishing
        await messages.confirm()
        assert cancelled > 10
        assert taken == list(range(100))
        assert [message async for message in node.subscribe("NEWS", idle=NOW)] == []


@in_a_loop
async def test_tasks_that_publish_at_once_share_round_trips_and_each_gets_its_answer(
    stream: World, new_async_reader: NewAsyncReader
) -> None:
    stream.rules("user2 READER Topic NEWS.OWN RW 60")
    async with new_async_reader() as node:
        first = await node.publish("NEWS.OWN", "made")
        messages = await node.subscribe("NEWS.OWN")
        answers = await asyncio.gather(*(node.publish("NEWS.OWN", n) for n in range(200)))
        many = await node.publish_many("NEWS.OWN", [b"a", b"b"])
        ids = [answer.id for answer in (first, *answers, many)]
        assert ids == sorted(set(ids))
        assert await bodies(messages, 202) == [*range(200), b"a", b"b"]
        assert await node.unsubscribe("NEWS.OWN") is True
        assert [message async for message in messages] == []


async def stop(node: AsyncNode) -> None:
    node.stop()


@pytest.mark.parametrize("how", [stop, AsyncNode.close])
@in_a_loop
async def test_stop_and_close_end_iteration_at_once(
    new_async_reader: NewAsyncReader, how: Callable[[AsyncNode], Awaitable[None]]
) -> None:
    async with new_async_reader() as node:
        messages = await node.subscribe("NEWS")
        waiting = asyncio.ensure_future(anext(messages, "the end"))
        await asyncio.wait({waiting}, timeout=0.1)
        began = monotonic()
        await how(node)
        assert await waiting == "the end"
        assert monotonic() - began < PROMPTLY


@in_a_loop
async def test_readers_on_other_connections_are_woken(
    writer: Node, new_async_reader: NewAsyncReader
) -> None:
    async with new_async_reader() as node:
        await node.subscribe("NEWS")
        assert await node.wait_published("NEWS", SOON) is True
        assert await node.wait_published("NEWS", timedelta(seconds=0.1)) is False
        waiting = asyncio.create_task(node.wait_published("NEWS", SOON))
        await asyncio.to_thread(writer.publish, "NEWS", "woken")
        assert await waiting is True
