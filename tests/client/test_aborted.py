"""What is aborted amid one message, by the server or by its handler, does not end the node."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, CallFailed, Message, Node
from psqlmessages.exceptions import MessagesError
from tests.client.test_rpc import running
from tests.conftest import TestedServer

SOON = timedelta(seconds=60)
LARGE = "x" * 20_000


@pytest.fixture
def dsn(server: TestedServer) -> str:
    """That of user2, whose calls wait for no lock."""
    return make_conninfo(server.url("user2"), options="-c lock_timeout=100ms")


@pytest.fixture
def lock(server: TestedServer) -> Iterator[psycopg.Connection]:
    """A connection that can hold large bodies up."""
    with psycopg.connect(server.url()) as connection:
        yield connection


def hold(connection: psycopg.Connection) -> None:
    connection.execute("LOCK TABLE psqlmessages_body IN ACCESS EXCLUSIVE MODE")


def test_a_body_that_cannot_be_fetched_now_costs_one_message(
    node1: Node, dsn: str, lock: psycopg.Connection
) -> None:
    with Node("NODE2", dsn) as node2:
        node2.topic_listen("ORDERS")
        node1.topic_notify("ORDERS")
        node1.topic_send("ORDERS", LARGE)
        hold(lock)
        messages = (m for m in node2.messages(timeout=SOON) if m.type == "Topic")
        with pytest.raises(MessagesError, match="lock timeout"):
            next(messages).body  # noqa: B018 - it raises
        lock.rollback()
        node1.topic_send("ORDERS", "next")
        assert next(messages).body == "next"


def test_an_answer_that_is_aborted_costs_one_call(
    node1: Node, dsn: str, lock: psycopg.Connection
) -> None:
    with Node("NODE2", dsn) as node2:

        @node2.on_rpc
        def answer(message: Message) -> str:
            if message.body == "large":
                hold(lock)
                return LARGE
            return "small"

        with running(node2):
            with pytest.raises(CallFailed):
                node1.call("NODE2", "large", timeout=SOON)
            lock.rollback()
            assert node1.call("NODE2", "small", timeout=SOON) == "small"
        assert node2.counters.reply_failures == 1


def test_an_async_node_goes_on_too(node1: Node, dsn: str, lock: psycopg.Connection) -> None:
    async def test() -> None:
        async with AsyncNode("NODE2", dsn) as node2:
            failed = asyncio.Event()

            @node2.on_topic("ORDERS")
            async def order(message: Message) -> None:
                try:
                    assert message.body == LARGE
                except MessagesError:
                    failed.set()

            @node2.on_rpc
            async def answer(message: Message) -> str:
                return LARGE if message.body == "large" else "small"

            await node2.topic_listen("ORDERS")
            await asyncio.to_thread(node1.topic_notify, "ORDERS")
            await asyncio.to_thread(node1.topic_send, "ORDERS", LARGE)
            await asyncio.to_thread(hold, lock)
            handling = asyncio.create_task(node2.run())
            await asyncio.wait_for(failed.wait(), 60)
            with pytest.raises(CallFailed):
                await asyncio.to_thread(node1.call, "NODE2", "large", timeout=SOON)
            await asyncio.to_thread(lock.rollback)
            assert await asyncio.to_thread(node1.call, "NODE2", "s", timeout=SOON) == "small"
            node2.stop()
            await handling

    asyncio.run(test())


def test_a_handler_that_awaits_what_was_cancelled_fails_alone(
    node1: Node, server: TestedServer
) -> None:
    async def test() -> None:
        async with AsyncNode("NODE2", server.url("user2")) as node2:

            @node2.on_rpc
            async def answer(message: Message) -> str:
                if message.body == "cancels":
                    cancelled = asyncio.get_running_loop().create_future()
                    cancelled.cancel()
                    await cancelled
                return "done"

            handling = asyncio.create_task(node2.run())
            with pytest.raises(CallFailed, match="CancelledError"):
                await asyncio.to_thread(node1.call, "NODE2", "cancels", timeout=SOON)
            assert await asyncio.to_thread(node1.call, "NODE2", "works", timeout=SOON) == "done"
            assert node2.counters.handler_failures == 1
            handling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await handling

    asyncio.run(test())
