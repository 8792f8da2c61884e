"""Handlers that run at the same time: their limit, their order, and how they end."""

import asyncio
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from psqlmessages import Message, Node, Options
from psqlmessages.exceptions import CallFailed, CallTimeout
from tests.client.conftest import NewNode
from tests.client.nodes import QUICK, SOON, in_a_loop, running
from tests.django.processes import talking
from tests.django.waiting import wait_until
from tests.sql.conftest import World

# A program whose handler never ends; a signal closes its node.
HANGING = """
import signal, sys, threading
from psqlmessages import Node, Options

with Node("NODE2", sys.argv[1], options=Options(concurrency=1, stop_timeout=0.1)) as node:
    @node.on_rpc
    def hang(message):
        print("begun", flush=True)
        threading.Event().wait()

    signal.signal(signal.SIGTERM, lambda *_: node.close())
    print("ready", flush=True)
    node.run()
"""
MANY = 50
BRIEFLY = timedelta(milliseconds=50)


class Handling:
    """Handlers that wait until the test releases the body of their message."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self._released: set[Any] = set()
        self._changed = threading.Condition()

    def handle(self, message: Message) -> str:
        with self._changed:
            self.begun.append(message.body)
            assert self._changed.wait_for(lambda: message.body in self._released, 100)
        self.ended.append(message.body)
        return "done"

    def release(self, *bodies: Any) -> None:
        with self._changed:
            self._released |= set(bodies)
            self._changed.notify_all()


@pytest.fixture
def handling() -> Handling:
    return Handling()


def listening(new_node: NewNode, *topics: str, **options: Any) -> tuple[Any, Any]:
    """Open NODE1, which sends to the topics, and NODE2, which listens to them."""
    node1 = new_node()
    node2 = new_node("NODE2", options=Options(**options))
    for topic in topics:
        node2.topic_listen(topic)
        node1.topic_notify(topic)
    return node1, node2


def test_many_messages_are_handled_at_the_same_time(new_node: NewNode):
    node1, node2 = listening(new_node, "ORDERS")
    together = threading.Barrier(MANY)
    node2.on_topic("ORDERS")(lambda message: together.wait(100))
    node2.on_rpc(lambda message: together.wait(100) + message.body)
    with running(node2):
        node1.topic_send_many("ORDERS", range(MANY - 1))
        wait_until(lambda: together.n_waiting == MANY - 1)
        together.wait(100)
        with ThreadPoolExecutor(MANY) as pool:
            answers = pool.map(lambda n: node1.call("NODE2", 0, timeout=SOON), range(MANY))
            assert sorted(answers) == list(range(MANY))


@in_a_loop
async def test_coroutines_are_handled_at_the_same_time_in_one_thread(new_async_node: Any):
    async with new_async_node("NODE1") as node1, new_async_node("NODE2") as node2:
        together, threads = asyncio.Barrier(MANY), set()

        class Answering:
            async def __call__(self, message: Message) -> object:
                threads.add(threading.get_ident())
                await together.wait()
                return message.body

        node2.on_rpc(Answering())
        handle = asyncio.create_task(node2.run())
        asked = (node1.call("NODE2", n, timeout=SOON) for n in range(2 * MANY))
        assert await asyncio.gather(*asked) == list(range(2 * MANY))
        assert threads == {threading.get_ident()}
        node2.stop()
        await handle


def test_an_ordered_topic_keeps_its_order_while_others_go_on(new_node: NewNode, handling: Handling):
    node1, node2 = listening(new_node, "ORDERS", "ORDERS.A", "ORDERS.B")
    node2.on_topic("ORDERS.*", ordered=True)(handling.handle)
    node2.on_topic("ORDERS")(handling.handle)
    with running(node2):
        node1.topic_send_many("ORDERS.A", ["a1", "a2", "a3"])
        node1.topic_send_many("ORDERS.B", ["b1", "b2"])
        node1.topic_send_many("ORDERS", ["x1", "x2"])
        handling.release("b1", "b2", "x2", "a2", "a3")
        wait_until(lambda: len(handling.ended) == 3)
        assert [body for body in handling.ended if body != "x2"] == ["b1", "b2"]
        assert "a2" not in handling.begun
        handling.release("a1", "x1")
        wait_until(lambda: len(handling.ended) == 7)
        assert [body for body in handling.ended if body[0] == "a"] == ["a1", "a2", "a3"]


def test_at_the_limit_messages_wait_in_the_inbox(new_node: NewNode, handling: Handling):
    node1, node2 = listening(new_node, "ORDERS", concurrency=2)
    node2.on_topic("ORDERS")(handling.handle)
    with running(node2):
        node1.topic_send_many("ORDERS", [1, 2, 3, 4])
        wait_until(lambda: len(handling.begun) == 2)
        assert sorted(handling.begun) == [1, 2]
        handling.release(2)
        wait_until(lambda: len(handling.begun) == 3)
        assert handling.ended == [2]
        handling.release(1, 3, 4)
        wait_until(lambda: len(handling.ended) == 4)


def test_ordered_messages_wait_up_to_the_limit_of_the_inbox(new_node: NewNode, handling: Handling):
    node1, node2 = listening(new_node, "ORDERS", "ORDERS.A", inbox_limit=2)
    node2.on_topic("ORDERS", ordered=True)(handling.handle)
    node2.on_topic("ORDERS.A")(handling.handle)
    handling.release("other", 2, 3)
    with running(node2):
        node1.topic_send_many("ORDERS", [1, 2, 3])
        wait_until(lambda: handling.begun == [1])
        node1.topic_send("ORDERS.A", "other")
        node1.topic_status("ORDERS")
        assert handling.begun == [1]
        handling.release(1)
        wait_until(lambda: len(handling.ended) == 4)
        assert [body for body in handling.ended if body != "other"] == [1, 2, 3]


def test_stop_waits_for_running_handlers_and_starts_no_other(new_node: NewNode, handling: Handling):
    node1, node2 = listening(new_node, "ORDERS", concurrency=2)
    node2.on_rpc(handling.handle)
    node2.on_topic("ORDERS", ordered=True)(handling.handle)
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(node2.run)
        call = pool.submit(node1.call, "NODE2", "asked", timeout=SOON)
        wait_until(lambda: handling.begun == ["asked"])
        node1.topic_send_many("ORDERS", [1, 2])
        wait_until(lambda: len(handling.begun) == 2)
        # `run` waits because of the limit, and message 2 waits for message 1.
        node2.stop()
        handling.release("asked", 1, 2)
        assert call.result(100) == "done"
        run.result(100)
    assert sorted(handling.ended, key=str) == [1, "asked"]


def test_an_endless_handler_is_reported(new_node: NewNode, handling: Handling, caplog):
    node1, node2 = listening(new_node, "ORDERS", concurrency=1, stop_timeout=BRIEFLY)
    node2.on_topic("ORDERS")(handling.handle)
    thread = threading.Thread(target=node2.run)
    thread.start()
    node1.topic_send_many("ORDERS", ["for ever", "next"])
    wait_until(lambda: handling.begun)
    node2.stop()
    thread.join(100)
    assert not thread.is_alive()
    text = "did not end within 0.05 s (stop_timeout) after the stop: Handling.handle"
    assert caplog.text.count(text) == 1
    handling.release("for ever")
    wait_until(lambda: handling.ended)
    assert handling.begun == ["for ever"]


def test_a_hung_handler_does_not_prevent_the_process_from_ending(node1: Node, conversation: World):
    process = talking("-c", HANGING, conversation.server.url("user2"), stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "ready\n"
        node1.rpc("NODE2", "token", "x")
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        _, logged = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "did not end within 0.1 s (stop_timeout) after the stop: hang" in logged


@in_a_loop
async def test_coroutines_that_do_not_end_are_cancelled(new_async_node: Any):
    options = Options(stop_timeout=BRIEFLY)
    async with new_async_node("NODE1") as node1, new_async_node("NODE2", options) as node2:
        begun, ended = asyncio.Event(), []

        @node2.on_rpc
        async def hang(message: Message) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(message.body)
                raise

        handle = asyncio.create_task(node2.run())
        await node1.rpc("NODE2", "token", "x")
        await begun.wait()
        node2.stop()
        await handle
        assert ended == ["x"]


def test_a_handler_may_close_its_node(new_node: NewNode, handling: Handling):
    # An AsyncNode that a thread closes waits for that handler too.
    node1, node2 = listening(new_node, "ORDERS", stop_timeout=timedelta(seconds=2))
    node2.on_topic("ORDERS")(handling.handle)
    node2.on_rpc(lambda message: node2.close())
    with running(node2):
        node1.topic_send("ORDERS", "other")
        wait_until(lambda: handling.begun)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(node1.call, "NODE2", "close", timeout=SOON)
            wait_until(lambda: node2._state.is_stopped)
            handling.release("other")
            with pytest.raises((CallFailed, CallTimeout)):
                call.result(100)
    assert handling.ended == ["other"]


def test_an_exit_in_a_handler_s_thread_ends_run(node1: Node, node2: Node):
    @node2.on_rpc
    def leave(message: Message) -> None:
        raise SystemExit(3)

    node1.rpc("NODE2", "token", "x")
    with pytest.raises(SystemExit, match="3"):
        node2.run()


@in_a_loop
async def test_a_synchronous_handler_may_raise_anything(new_async_node: Any):
    async with new_async_node("NODE1", QUICK) as node1, new_async_node("NODE2") as node2:
        node2.on_rpc(lambda message: next(iter(())))
        handle = asyncio.create_task(node2.run())
        with pytest.raises(CallFailed, match="RuntimeError"):
            await node1.call("NODE2", "x", timeout=SOON)
        node2.stop()
        await handle
