"""Consumers: an element is committed when the loop comes back, and rolled back where it is left."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic

import pytest

from psqlmessages import Element, Node
from psqlmessages.client import queue_hand, queue_node
from tests.queues.client.conftest import NOW, SOON, NewAsyncReader
from tests.queues.client.test_queue_waiting import listened
from tests.sql.conftest import World

STATE = """
    SELECT body, tries, lease IS NOT NULL AND available_at > clock_timestamp() AS is_reserved,
           round(extract(epoch FROM mature_at - clock_timestamp()))::int
    FROM psqlmessages_element ORDER BY id
"""


def state(queues: World) -> list[tuple[str, int, bool, int]]:
    """Body, tries, whether it is reserved, and in how many seconds it is mature, of each left."""
    return queues.owner.connection.execute(STATE).fetchall()


def test_each_is_committed_when_the_loop_comes_back(
    queues: World, writer: Node, reader: Node
) -> None:
    writer.push_many("Q", ["a", "b", "c"])
    seen = []
    for element in reader.consume("Q", idle=NOW):
        seen.append(element.body)
        assert len(state(queues)) == 4 - len(seen)
    assert seen == ["a", "b", "c"]
    assert state(queues) == []


@pytest.mark.usefixtures("no_polling")
def test_it_waits_for_what_comes_until_the_node_is_stopped(
    queues: World, writer: Node, reader: Node
) -> None:
    seen: list[object] = []

    def work() -> None:
        for element in reader.consume("Q"):
            seen.append(element.body)
            if element.body == "last":
                reader.stop()

    with ThreadPoolExecutor() as pool:
        working = pool.submit(work)
        listened(queues)
        writer.push("Q", "first")
        writer.push("Q", "last")
        working.result(SOON.total_seconds())
    assert seen == ["first", "last"]
    assert state(queues) == []


def fail_at(reader: Node, body: str, **options: object) -> None:
    for element in reader.consume("Q", idle=NOW, **options):
        if element.body == body:
            raise ZeroDivisionError


def test_an_exception_rolls_back_the_one_at_hand_with_a_growing_delay(
    queues: World, writer: Node, reader: Node
) -> None:
    writer.push_many("Q", ["a", "b", "c", "d"])
    with pytest.raises(ZeroDivisionError):
        fail_at(reader, "b", batch=3)
    assert [row[:3] for row in state(queues)] == [
        ("b", 1, False), ("c", 0, False), ("d", 0, False),
    ]  # fmt: skip
    for tries, seconds in ((2, 2), (3, 4), (10, 300)):
        queues.owner.connection.execute(
            "UPDATE psqlmessages_element"
            " SET tries = %s - 1, mature_at = 'epoch', available_at = 'epoch' WHERE body = 'b'",
            (tries,),
        )
        began = monotonic()
        with pytest.raises(ZeroDivisionError):
            fail_at(reader, "b")
        body, tried, is_reserved, mature = state(queues)[0]
        assert (body, tried, is_reserved) == ("b", tries, False)
        assert seconds - 1 - (monotonic() - began) <= mature <= seconds


def test_what_the_loop_settles_itself_is_left_alone(
    queues: World, writer: Node, reader: Node
) -> None:
    writer.push_many("Q", ["commit", "rollback", "release", "lease"])
    for element in reader.consume("Q", batch=4, idle=NOW):
        act = {"commit": reader.commit, "rollback": reader.rollback, "release": reader.release}
        if element.body in act:
            assert act[element.body](element)
        if element.body == "lease":
            break
    assert reader.counters.lost_leases == 0
    assert [row[:2] for row in state(queues)] == [("rollback", 1), ("release", 0), ("lease", 1)]


def test_a_lease_that_was_lost_is_told_and_what_has_expired_is_not_handed_out(
    queues: World, writer: Node, reader: Node, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    writer.push_many("Q", ["a", "b", "c"])
    seen = []
    for element in reader.consume("Q", batch=3, idle=NOW):
        seen.append((element.body, element.tries))
        if len(seen) == 1:
            # While it was handled, two minutes went by, and others took it.
            now = queue_hand.monotonic()
            monkeypatch.setattr(queue_hand, "monotonic", lambda now=now: now + 121)
            queues.owner.connection.execute("UPDATE psqlmessages_element SET available_at = now()")
            assert queues.program("user2").elements("pop", "READER", "Q")[0].body == "a"
    assert seen == [("a", 0), ("b", 1), ("c", 1)]
    assert reader.counters.lost_leases == 3
    assert "a lease of queue Q had run out" in caplog.text
    assert state(queues) == []


@pytest.mark.parametrize("how", ["consume", "reserve"])
def test_ctrl_c_in_the_moment_of_taking_gives_all_back(
    queues: World, writer: Node, reader: Node, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    writer.push_many("Q", ["a", "b"])
    drive = queue_node.drive

    def interrupted(*arguments: object) -> None:
        drive(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(queue_node, "drive", interrupted)
    takes = {
        "consume": lambda: next(iter(reader.consume("Q", batch=2))),
        "reserve": lambda: reader.reserve("Q", 2, timeout=SOON),
    }
    with pytest.raises(KeyboardInterrupt):
        takes[how]()
    assert [row[:3] for row in state(queues)] == [("a", 0, False), ("b", 0, False)]


def test_what_cannot_be_given_back_is_told(
    queues: World, writer: Node, reader: Node, caplog: pytest.LogCaptureFixture
) -> None:
    writer.push_many("Q", ["a", "b"])

    def work() -> None:
        for _ in reader.consume("Q", batch=2):
            queues.owner.connection.execute("UPDATE messages.auth SET mode = 'W'")
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
        work()
    assert "could not be settled, and come back when their leases have run out" in caplog.text
    assert [row[:3] for row in state(queues)] == [("a", 0, True), ("b", 0, True)]


async def _break(element: Element) -> bool:
    return element.body == "b"


async def _fail(element: Element) -> bool:
    if element.body == "b":
        raise ZeroDivisionError
    return False


async def _cancel(element: Element) -> bool:
    if element.body == "b":
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()
    return False


@pytest.mark.parametrize("leave", [_break, _fail, _cancel])
def test_asyncio_commits_and_rolls_back_as_well(
    queues: World, writer: Node, new_async_reader: NewAsyncReader, leave: Callable[..., object]
) -> None:
    writer.push_many("Q", ["a", "b", "c"])

    async def work() -> None:
        async with new_async_reader() as node:
            async for element in node.consume("Q", batch=3, idle=NOW):
                if await leave(element):
                    break

    async def test() -> None:
        task = asyncio.create_task(work())
        await asyncio.wait({task})
        assert task.cancelled() == (leave is _cancel)
        if leave is _fail:
            assert isinstance(task.exception(), ZeroDivisionError)

    asyncio.run(test())
    assert [row[:3] for row in state(queues)] == [("b", 1, False), ("c", 0, False)]


def test_a_consumer_that_is_held_is_emptied_at_the_end_of_its_node(
    queues: World, writer: Node, new_async_reader: NewAsyncReader
) -> None:
    writer.push_many("Q", ["a", "b"])

    async def test() -> None:
        async with new_async_reader() as node:
            elements = node.consume("Q", batch=2)
            assert (await anext(elements)).body == "a"
        assert [row[:3] for row in state(queues)] == [("a", 1, False), ("b", 0, False)]
        await elements.aclose()

    asyncio.run(test())


def test_asyncio_waits_for_what_comes_until_the_node_is_stopped(
    queues: World, writer: Node, new_async_reader: NewAsyncReader
) -> None:
    async def test() -> None:
        async with new_async_reader() as node:
            seen = []

            async def work() -> None:
                async for element in node.consume("Q", duration=timedelta(seconds=30)):
                    seen.append(element.body)
                    if element.body == "last":
                        node.stop()

            working = asyncio.create_task(work())
            await asyncio.to_thread(listened, queues)
            await asyncio.to_thread(writer.push_many, "Q", ["first", "last", "left"])
            async with asyncio.timeout(SOON.total_seconds()):
                await working
            assert seen == ["first", "last"]

    asyncio.run(test())
    assert [row[:3] for row in state(queues)] == [("left", 0, False)]
