"""AsyncNode with many tasks: they share round trips, and may be cancelled."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import psycopg
import pytest

from psqlmessages import AsyncNode, Message, Options, exceptions
from psqlmessages.client.calls import Call
from tests.client.nodes import SOON, in_a_loop

NewNode = Callable[..., AsyncNode]


@in_a_loop
async def test_a_send_that_fails_does_not_harm_those_beside_it(new_async_node: NewNode):
    """The calls share a transaction, so the others are sent again without the failed one."""

    def call(number: int) -> Call[object]:
        return Call(
            "SELECT pg_notify(current_setting('messages.channel'), %s || left('', 1 / %s::int))",
            (f'{{"Type":"Topic","From":"B","To":"T"}}\n{number}', str(number)),
            lambda answer: answer,
            may_share_round_trip=True,
        )

    async with new_async_node("NODE1") as node:
        await node.topic_listen("ORDERS")
        await node.topic_notify("ORDERS")
        # The server aborts the third.
        calls = (node._session.run(call(n)) for n in (1, 2, 0, 3))
        results = await asyncio.gather(*calls, return_exceptions=True)
        aborted = [isinstance(r, psycopg.errors.DivisionByZero) for r in results]
        assert aborted == [False, False, True, False]
        messages = node.messages(timeout=timedelta(seconds=0.3))
        assert [m.body async for m in messages if m.type == "Topic"] == ["1", "2", "3"]


@in_a_loop
async def test_a_handler_that_is_cancelled_fails_its_call_alone(new_async_node: NewNode):
    async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:

        @node2.on_rpc
        async def answer(message: Message) -> object:
            if message.body == "cancels":
                cancelled = asyncio.get_running_loop().create_future()
                cancelled.cancel()
                await cancelled
            return message.body * 2

        handle = asyncio.create_task(node2.run())
        with pytest.raises(exceptions.CallFailed, match="CancelledError"):
            await node1.call("NODE2", "cancels", timeout=SOON)
        assert await node1.call("NODE2", 1, timeout=SOON) == 2
        assert node2.counters.handler_failures == 1
        handle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handle


@in_a_loop
async def test_cancelling_a_call_or_a_close_does_no_harm(new_async_node: NewNode):
    """At the end of its loop, asyncio.run cancels every task."""
    for turns in range(3):
        async with new_async_node("NODE2") as node2:
            node = new_async_node("NODE1")
            await node.open()
            calling = asyncio.create_task(node.call("NODE2", "x", timeout=SOON))
            await asyncio.wait({calling}, timeout=turns / 2000)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            waiting = asyncio.create_task(anext(aiter(node), None))
            await asyncio.wait({waiting}, timeout=turns / 2000)
            waiting.cancel()
            await asyncio.wait({waiting})
            assert (await node.topic_status("ORDERS")).notifiers == ()
            assert node2.is_healthy
        closing = asyncio.create_task(node.close())
        await asyncio.wait({closing}, timeout=turns / 5000)
        closing.cancel()
        await asyncio.wait({closing})
        assert not node.is_healthy
        with pytest.raises(exceptions.NodeClosed):
            await node.topic_status("ORDERS")
        assert node._session._connection is None or node._session._connection.closed
        # The server may take a moment to notice that a session without deinit has ended.
        async with asyncio.timeout(60):
            is_free = False
            while not is_free:
                with suppress(exceptions.IdentTaken):
                    async with new_async_node("NODE1"):
                        is_free = True


@in_a_loop
async def test_a_receiver_that_falls_behind_loses_nothing(new_async_node: NewNode):
    options = Options(inbox_limit=100, evaluate_interval=timedelta(milliseconds=50))
    async with new_async_node("NODE1") as node1, new_async_node("NODE2", options) as node2:
        await node2.topic_listen("ORDERS")
        await node1.topic_notify("ORDERS")
        assert (await anext(aiter(node2))).type == "Sys"
        for start in range(0, 5_000, 500):
            batch = [f"{start + n:06}" + "x" * 1000 for n in range(500)]
            await node1.topic_send_many("ORDERS", batch)
            # The inbox is full before the next messages are sent.
            while len(node2._state.inbox) < 100:
                await node1.topic_status("ORDERS")
        assert len(node2._state.inbox) < 2_000
        topical = (m async for m in node2 if m.type == "Topic")
        assert [int((await anext(topical)).body[:6]) for _ in range(5_000)] == list(range(5_000))


@in_a_loop
async def test_each_of_several_calls_ends_at_its_own_timeout(new_async_node: NewNode):
    ended = []

    async def call(node: AsyncNode, seconds: float) -> None:
        with pytest.raises(exceptions.CallTimeout, match=f"no answer .* within {seconds:g} s"):
            await node.call("NODE2", "x", timeout=seconds)
        ended.append(seconds)

    async with new_async_node("NODE1") as node, new_async_node("NODE2") as other:
        async with asyncio.TaskGroup() as tasks:
            for seconds in 0.3, 0.1, 0.5, 0.1:
                tasks.create_task(call(node, seconds))
            answered = tasks.create_task(node.call("NODE2", "wanted", timeout=SOON))
            async for message in other.messages():
                if message.content == "wanted":
                    break
            await message.reply("answer")
        assert (ended, answered.result()) == ([0.1, 0.1, 0.3, 0.5], "answer")
