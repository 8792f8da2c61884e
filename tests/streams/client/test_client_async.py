"""AsyncNode reads subscriptions as Node does; what is cancelled loses nothing."""

import asyncio

import pytest

from psqlmessages import AsyncNode, AsyncSubscription, Node
from psqlmessages.exceptions import NotSubscribed
from tests.client.nodes import NOW, in_a_loop
from tests.streams.client.conftest import SOON


async def bodies(messages: AsyncSubscription, number: int) -> list[object]:
    async with asyncio.timeout(SOON.total_seconds()):
        return [(await anext(messages)).body for _ in range(number)]


@in_a_loop
async def test_awaited_it_subscribes_at_once_and_else_with_the_first_message(
    writer: Node, async_reader: AsyncNode
) -> None:
    async with async_reader as node:
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
async def test_a_cancelled_wait_loses_nothing(writer: Node, async_reader: AsyncNode) -> None:
    async with async_reader as node:
        messages = await node.subscribe("NEWS", max_rows=7)
        taken: list[object] = []
        cancelled, patience = 0, 0.0
        publish_all = asyncio.to_thread(lambda: [writer.publish("NEWS", n) for n in range(100)])
        publishing = asyncio.create_task(publish_all)
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
