"""AsyncNode on the real database: the same as Node, many tasks at once."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest

from psqlmessages import AsyncNode, CallTimeout, Message, Options
from psqlmessages.client.calls import Call
from psqlmessages.exceptions import (
    CallFailed,
    IdentTaken,
    NodeClosed,
    NotNotifying,
    ServerUnreachable,
    TopicNotExistent,
)
from tests.client.conftest import AddRules
from tests.client.programs import PROMPTLY
from tests.conftest import TestedServer

SOON = timedelta(seconds=60)
NOW = timedelta(0)

NewNode = Callable[..., AsyncNode]


def run(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a test's coroutine; a task that is stuck fails it."""

    async def limited() -> None:
        async with asyncio.timeout(110):
            await coroutine

    asyncio.run(limited())


async def next_message(node: AsyncNode, message_type: str = "Topic") -> Message:
    async for message in node.messages(timeout=SOON):
        if message.type == message_type:
            return message
    raise AssertionError("no message came")


@asynccontextmanager
async def running(node: AsyncNode) -> AsyncIterator[None]:
    task = asyncio.create_task(node.run())
    try:
        yield
    finally:
        node.stop()
        await task


@pytest.mark.parametrize("body", ["hello", b"\0\xff", {"id": 1}, None, "x" * 100_000])
def test_every_kind_of_body_arrives_as_it_was_sent(new_async_node: NewNode, body: object) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:
            await node2.topic_listen("ORDERS")
            await node1.topic_notify("ORDERS")
            await node1.topic_send("ORDERS", body)
            message = await next_message(node2)
            assert message.body == body
            assert message.sender == "NODE1"

    run(test())


def test_concurrent_sends_arrive_in_order_and_share_round_trips(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:
            await node2.topic_listen("ORDERS")
            await node1.topic_notify("ORDERS")
            transactions = await transactions_of(node1)
            await asyncio.gather(*(node1.topic_send("ORDERS", n) for n in range(2000)))
            assert await transactions_of(node1) - transactions < 100
            received = []
            async for message in node2:
                if message.type == "Topic":
                    received.append(message.body)
                if len(received) == 2000:
                    break
            assert received == list(range(2000))

    run(test())


async def transactions_of(node: AsyncNode) -> int:
    call = Call("SELECT pg_stat_get_db_xact_commit(oid) FROM pg_database"
                " WHERE datname = current_database()", (), int)  # fmt: skip
    await node._link.run(Call("SELECT pg_stat_force_next_flush()", (), str))
    await node._link.run(Call("SELECT 1", (), str))
    return await node._link.run(call)


def test_a_send_that_is_refused_does_not_harm_those_beside_it(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node:
            await node.topic_listen("ORDERS")
            await node.topic_notify("ORDERS")
            results = await asyncio.gather(
                node.topic_send("ORDERS", 1),
                node.topic_send("UNHEARD", 2),
                node.topic_send("ORDERS.NEW", 3),
                node.topic_send("ORDERS", 4),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [
                type(None),
                TopicNotExistent,
                TopicNotExistent,
                type(None),
            ]
            assert [(await next_message(node)).body for _ in range(2)] == [1, 4]

    run(test())


def test_a_send_that_the_server_aborts_does_not_harm_those_beside_it(
    new_async_node: NewNode,
) -> None:
    """They are one transaction, so the others are sent again, each in one of its own: once."""

    def call(number: int) -> Call[object]:
        return Call(
            "SELECT pg_notify(current_setting('messages.channel'), %s || 1 / %s::int)",
            ('{"Type":"Topic","From":"B","To":"T"}\n', str(number)),
            lambda answer: answer,
            is_send=True,
        )

    async def test() -> None:
        async with new_async_node("NODE1") as node:
            results = await asyncio.gather(
                *(node._link.run(call(n)) for n in (1, 1, 0, 1)), return_exceptions=True
            )
            assert [isinstance(r, psycopg.errors.DivisionByZero) for r in results] == [
                False,
                False,
                True,
                False,
            ]
            messages = node.messages(timeout=timedelta(seconds=0.3))
            assert [m.body async for m in messages if m.type == "Topic"] == ["1", "1", "1"]

    run(test())


def test_a_thousand_concurrent_calls_are_answered(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:

            @node2.on_rpc
            async def answer(message: Message) -> object:
                return message.body * 2

            async with running(node2):
                asked = (node1.call("NODE2", n, timeout=SOON) for n in range(1000))
                assert await asyncio.gather(*asked) == [n * 2 for n in range(1000)]
                big = "b" * 20_000
                assert await node1.call("NODE2", big, timeout=SOON) == big * 2
            assert node1.counters.late_answers == 0

    run(test())


def test_calls_time_out_each_on_its_own(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:
            slow = asyncio.create_task(node1.call("NODE2", "slow", timeout=SOON))
            question = await next_message(node2, "Rpc")
            with pytest.raises(CallTimeout):
                await node1.call("NODE2", "never", timeout=timedelta(seconds=0.1))
            never = await next_message(node2, "Rpc")
            await never.reply("too late")
            await question.reply("in time")
            assert await slow == "in time"
            assert node1.counters.late_answers == 1

    run(test())


def test_a_cancelled_call_does_not_harm_the_connection(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:
            for turns in range(6):
                task = asyncio.create_task(node1.call("NODE2", "x", timeout=SOON))
                await asyncio.wait({task}, timeout=turns / 2000)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert (await node1.topic_status("ORDERS")).notifiers == ()
            assert node2.is_healthy

    run(test())


def test_every_listener_answers_a_question_to_a_topic(
    server: TestedServer, add_rules: AddRules, new_async_node: NewNode
) -> None:
    add_rules(("user3", "NODE3", "Topic", "ORDERS", "R", 5))

    async def test() -> None:
        nodes = [new_async_node(f"NODE{number}") for number in (1, 2, 3)]
        async with nodes[0] as asker, nodes[1] as node2, nodes[2] as node3:
            for node in (node2, node3):
                node.on_topic("ORDERS")(lambda m: m.body + 1)
                await node.topic_listen("ORDERS")
            async with running(node2), running(node3):
                await asker.topic_notify("ORDERS")
                answers = asker.call_topic("ORDERS", 1, timeout=SOON)
                found = [await anext(answers) for _ in range(2)]
                assert {(a.sender, a.body) for a in found} == {("NODE2", 2), ("NODE3", 2)}
                # Without an end of its own this would wait for a third.
                async for _ in asker.call_topic("ORDERS", 1, timeout=NOW):
                    pass

    run(test())


def test_a_wait_of_no_time_still_reads_what_is_there(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node:
            await node.topic_listen("ORDERS")
            await node.topic_notify("ORDERS")
            await node.topic_send("ORDERS", "x")
            assert [m.body async for m in node.messages(timeout=NOW)] == ["x"]
            assert [m.body async for m in node.messages(timeout=NOW)] == []

    run(test())


def test_a_handler_that_fails_is_counted_and_the_node_goes_on(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:

            @node2.on_rpc
            async def answer(message: Message) -> object:
                return 1 / message.body

            async with running(node2):
                with pytest.raises(CallFailed, match="ZeroDivisionError"):
                    await node1.call("NODE2", 0, timeout=SOON)
                assert await node1.call("NODE2", 1, timeout=SOON) == 1
            assert node2.counters.handler_failures == 1

    run(test())


@pytest.mark.usefixtures("long_closing")
@pytest.mark.parametrize("ending", ["thread", "signal", "close", "cancel"])
def test_a_wait_ends_at_once(new_async_node: NewNode, ending: str) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node:
            waiting = asyncio.create_task(anext(aiter(node), None))
            loop = asyncio.get_running_loop()
            if ending == "thread":
                threading.Timer(0.1, node.stop).start()
            elif ending == "signal":
                loop.add_signal_handler(signal.SIGUSR1, node.stop)
                os.kill(os.getpid(), signal.SIGUSR1)
            elif ending == "close":
                loop.call_later(
                    0.1, lambda: setattr(node, "closing", loop.create_task(node.close()))
                )
            else:
                loop.call_later(0.1, waiting.cancel)
            started = monotonic()
            await asyncio.wait({waiting})
            assert monotonic() - started < PROMPTLY
            loop.remove_signal_handler(signal.SIGUSR1)

    run(test())


def test_calls_that_wait_fail_when_the_node_is_closed(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:
            calling = asyncio.create_task(node1.call("NODE2", "x", timeout=SOON))
            await next_message(node2, "Rpc")
            await node1.close()
            with pytest.raises(NodeClosed):
                await calling
            with pytest.raises(NodeClosed):
                await node1.topic_send("ORDERS", "x")
            await node1.close()

    run(test())


def test_a_close_that_is_cancelled_leaves_no_connection_open(new_async_node: NewNode) -> None:
    """As when a loop ends: asyncio.run cancels every task, whatever it is doing."""

    async def test() -> None:
        for turns in range(5):
            node = new_async_node("NODE1")
            await node.open()
            closing = asyncio.create_task(node.close())
            await asyncio.wait({closing}, timeout=turns / 5000)
            closing.cancel()
            await asyncio.wait({closing})
            assert not node.is_healthy
            with pytest.raises(NodeClosed):
                await node.topic_status("ORDERS")
            connection = node._link._connection
            assert connection is None or connection.closed
            # The server may take a moment to notice that a session without deinit has ended.
            async with asyncio.timeout(60):
                while not await is_free(new_async_node("NODE1")):
                    pass

    run(test())


async def is_free(node: AsyncNode) -> bool:
    try:
        async with node:
            return True
    except IdentTaken:
        return False


def test_a_node_that_was_never_opened_says_so() -> None:
    with pytest.raises(NodeClosed, match="not open yet"):
        run(AsyncNode("NODE1").topic_send("ORDERS", "x"))
    with pytest.raises(ServerUnreachable):
        run(AsyncNode("NODE1", "host=127.0.0.1 port=1").open())


def test_a_receiver_that_falls_behind_stops_reading_and_loses_nothing(
    new_async_node: NewNode,
) -> None:
    options = Options(inbox_limit=100, evaluate_interval=timedelta(milliseconds=50))

    async def test() -> None:
        async with (
            new_async_node("NODE1") as node1,
            new_async_node("NODE2", options) as node2,
        ):
            await node2.topic_listen("ORDERS")
            await node1.topic_notify("ORDERS")
            first = await anext(aiter(node2))
            assert first.type == "Sys"
            for start in range(0, 20_000, 500):
                batch = [f"{start + n:06}" + "x" * 1000 for n in range(500)]
                await node1.topic_send_many("ORDERS", batch)
                # However late the first come: it has fallen behind before the others are sent.
                while len(node2._listening.inbox) < 100:
                    await node1.topic_status("ORDERS")
            assert len(node2._listening.inbox) < 2_000
            topical = (m async for m in node2 if m.type == "Topic")
            received = [int((await anext(topical)).body[:6]) for _ in range(20_000)]
            assert received == list(range(20_000))

    run(test())


def test_errors_reach_who_called(new_async_node: NewNode) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node:
            with pytest.raises(NotNotifying):
                await node.topic_send("ORDERS", "x")
            with pytest.raises(ValueError, match="NUL"):
                await node.topic_send("ORDERS", "\0")
            with pytest.raises(ValueError, match="cannot hold a NUL"):
                await node.topic_send("OR\0DERS", "x")
            with pytest.raises(TypeError, match="a name or token is a str, not int"):
                await node.topic_send(5, "x")  # type: ignore[arg-type]
            assert node.is_healthy

    run(test())
