"""AsyncNode takes as Node does; who is cancelled takes nothing along."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from psqlmessages import AsyncNode, Element, Node
from tests.client.nodes import end_backend, in_a_loop
from tests.queues.client.conftest import NOW, SOON, NewAsyncReader, left, listened, state
from tests.sql.conftest import World

Take = Callable[..., Awaitable[list[Element]]]
TAKES = pytest.mark.parametrize("take", [AsyncNode.pop, AsyncNode.reserve])


@in_a_loop
async def test_many_wait_cheaply(queues: World, writer: Node, new_async_reader: NewAsyncReader):
    order: list[int] = []

    async def read(node: AsyncNode, number: int) -> None:
        if await node.pop("Q", timeout=SOON):
            order.append(number)

    async with new_async_reader() as node:
        waiting = {asyncio.ensure_future(read(node, number)) for number in range(200)}
        # Each has looked, and the first one listens.
        while len(node._state.wait_lists.of("Q")._waiters) < 200:
            await node.evaluate()
        await asyncio.to_thread(listened, queues)
        before = node.counters.calls
        for number in range(1, 11):
            await asyncio.to_thread(writer.push, "Q", number)
            while len(order) < number:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        # Found, committed, looked in vain, asked for the next one.
        assert node.counters.calls - before <= 80
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
    assert order == list(range(10))


@TAKES
@in_a_loop
async def test_a_reader_cancelled_at_any_moment_loses_no_element(
    queues: World, writer: Node, new_async_reader: NewAsyncReader, take: Take
):
    number, taken, cancelled = 30, [], 0
    patience = 0.0
    async with new_async_reader() as node:
        push_all = asyncio.to_thread(lambda: [writer.push("Q", body) for body in range(number)])
        pushing = asyncio.create_task(push_all)
        while len(taken) < number:
            readers = [asyncio.ensure_future(take(node, "Q", timeout=SOON)) for _ in range(3)]
            # Ever longer, until some come through: so they are cancelled at each stage.
            await asyncio.wait({readers[0]}, timeout=patience)
            for reader in readers:
                reader.cancel()
            patience = 1.2 * patience + 0.0002
            for found in await asyncio.gather(*readers, return_exceptions=True):
                if isinstance(found, list):
                    taken.extend(found)
                    patience = 0.0
                else:
                    assert isinstance(found, asyncio.CancelledError)
                    cancelled += 1
        await pushing
    assert cancelled > 20
    assert sorted(element.body for element in taken) == list(range(number))
    assert all(element.tries == 0 for element in taken)
    if take is AsyncNode.pop:
        assert left(queues) == (0, 0)


@in_a_loop
async def test_popped_elements_are_removed_before_the_next_call_and_before_the_end(
    queues: World, writer: Node, new_async_reader: NewAsyncReader
):
    async with new_async_reader() as node:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await node.pop("Q", timeout=timedelta.max)
        await asyncio.to_thread(writer.push_many, "Q", range(3))
        await node.pop("Q")
        assert (await node.sizes("Q")).total == 2
        await node.pop("Q", 2)
    assert left(queues) == (0, 0)


@in_a_loop
async def test_pops_outlive_a_cut_and_a_lost_lease_counts(
    queues: World, writer: Node, new_async_reader: NewAsyncReader, caplog
):
    writer.push_many("Q", ["x", "y"])
    async with new_async_reader() as node:
        await node.pop("Q")
        # The node's task has had no turn since: the call that removes is yet to be sent.
        end_backend(queues, "READER")
        assert left(queues) == (2, 1)
        await asyncio.to_thread(queues.wait_for, "SELECT count(*) = 1 FROM psqlmessages_element")
        assert node.counters.lost_leases == 0
        await node.pop("Q")
        queues.execute("DELETE FROM psqlmessages_element")
    assert node.counters.lost_leases == 1
    assert "leases of queue Q had expired" in caplog.text


@in_a_loop
async def test_close_leaves_no_lease(queues: World, writer: Node, new_async_reader: NewAsyncReader):
    writer.push_many("Q", range(40))
    node = new_async_reader()
    await node.open()
    readers = [asyncio.ensure_future(node.pop("Q")) for _ in range(40)]
    await asyncio.wait({readers[5]})
    await node.close()
    answers = await asyncio.gather(*readers, return_exceptions=True)
    taken = [element for found in answers if isinstance(found, list) for element in found]
    assert len(taken) > 5
    assert left(queues) == (40 - len(taken), 0)


@in_a_loop
async def test_a_left_loop_releases(queues: World, writer: Node, new_async_reader: NewAsyncReader):
    writer.push_many("Q", [*"012345"])
    async with new_async_reader() as node:
        loops = [node.consume("Q", batch=2) for _ in range(3)]
        assert [(await anext(loop)).body for loop in loops] == ["0", "2", "4"]
        assert left(queues) == (6, 6)
    assert node.counters.lost_leases == 0
    for loop in loops:
        await loop.aclose()
    assert state(queues) == [(str(n), 1 - n % 2, False) for n in range(6)]


@in_a_loop
async def test_cancelling_rolls_back(queues: World, writer: Node, new_async_reader: NewAsyncReader):
    writer.push_many("Q", ["a", "b", "c"])

    async def work() -> None:
        async with new_async_reader() as node:
            async for element in node.consume("Q", batch=3, idle=NOW):
                if element.body == "b":
                    task.cancel()
                    await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.wait({task})
    assert task.cancelled()
    assert state(queues) == [("b", 1, False), ("c", 0, False)]
