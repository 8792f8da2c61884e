"""AsyncNode: opened once, and a close ends what is under way and leaves no connection behind."""

import asyncio

import pytest

from psqlmessages.client import async_link
from psqlmessages.client.calls import Call
from psqlmessages.client.connections import AsyncConnection
from psqlmessages.exceptions import NodeClosed
from tests.client.programs import PROMPTLY
from tests.client.test_async_node import NewNode, run


def test_a_node_that_is_closed_while_it_opens_leaves_no_connection(new_async_node: NewNode) -> None:
    async def test() -> None:
        node = new_async_node("NODE1")
        connect, made = node._link._dialer.connect_async, []

        async def connect_slowly() -> AsyncConnection:
            made.append(await connect())
            await node.close()
            return made[0]

        node._link._dialer.connect_async = connect_slowly
        with pytest.raises(NodeClosed):
            await node.open()
        assert made[0].closed

    run(test())


def test_tasks_may_open_a_node_at_once(new_async_node: NewNode) -> None:
    async def test() -> None:
        node = new_async_node("NODE1")
        connect, made = node._link._dialer.connect_async, []

        async def connect_once() -> AsyncConnection:
            made.append(await connect())
            return made[-1]

        node._link._dialer.connect_async = connect_once
        await asyncio.gather(*(node.open() for _ in range(3)))
        await node.topic_listen("ORDERS")
        assert len(made) == 1
        await node.close()
        assert made[0].closed

    run(test())


def test_a_close_tells_those_whose_calls_get_no_answer_in_time(
    new_async_node: NewNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_link, "_CLOSING_SECONDS", 0.2)

    async def test() -> None:
        async with new_async_node("NODE1") as node:
            sleeping = Call("SELECT 1 FROM pg_sleep(%s::float)", ("30",), int, is_send=True)
            asked = [asyncio.ensure_future(node._link.order(sleeping)) for _ in range(3)]
            await asyncio.wait(asked, timeout=0.2)
        done, _ = await asyncio.wait(asked, timeout=PROMPTLY)
        assert [type(future.exception()) for future in done] == [NodeClosed] * 3

    run(test())
