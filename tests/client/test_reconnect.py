"""A lost connection comes back: registered as before, and the caller is told."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from threading import Timer
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, Node, Options
from psqlmessages.client import async_session
from psqlmessages.exceptions import ConnectionLost, NodeClosed
from tests.client import nodes
from tests.client.conftest import NewNode
from tests.client.programs import PROMPTLY
from tests.client.proxy import Proxy
from tests.django.waiting import wait_until
from tests.sql.conftest import World

# Detects a stalled network soon, but allows for pauses of a slow machine.
WATCHFUL = replace(
    nodes.QUICK, evaluate_interval=timedelta(hours=1), probe_interval=timedelta(milliseconds=200),
    probe_timeout=timedelta(seconds=2), answer_timeout=timedelta(seconds=2),
)  # fmt: skip
WAITS = """
    SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'psqlmessages NODE1'
        AND wait_event_type = 'Lock' AND query ~ 'topic_(listen|status|notify)')
"""


@pytest.fixture
def far(conversation: World, proxy: Proxy) -> str:
    return make_conninfo(conversation.server.url("user1"), host="127.0.0.1", port=proxy.port)


@contextmanager
def topics_locked(world: World) -> Iterator[None]:
    with psycopg.connect(world.server.url()) as blocker:
        blocker.execute("LOCK TABLE psqlmessages_topic IN ACCESS EXCLUSIVE MODE")
        yield


def test_a_node_comes_back_as_before_and_tells(conversation: World, node: Any, node2: Node):
    conversation.rules("user1 OTHER Topic ORDERS R 5")
    node.init("OTHER")
    node.topic_listen("ORDERS")
    node.use("NODE1")
    node.topic_listen("ORDERS")
    node.topic_notify("ORDERS.A")
    node2.topic_notify("ORDERS")
    node2.topic_listen("ORDERS.A")
    channel = node.channel
    nodes.end_backend(conversation)
    back = nodes.next_event(node, "reconnected")
    assert back.type == "Sys"
    assert timedelta(0) < back.away < nodes.SOON
    assert node.is_healthy
    assert node.channel != channel
    assert (node.counters.lost_connections, node.counters.reconnects) == (1, 1)
    node2.topic_send("ORDERS", "again")
    assert nodes.next_message(node).body == "again"
    node.topic_send("ORDERS.A", "there")
    assert nodes.next_message(node2).body == "there"
    assert node2.topic_status("ORDERS").listeners == ("NODE1", "OTHER")


def test_a_lost_call_may_have_been_done_and_later_ones_go_on(conversation: World, node: Any):
    node.topic_notify("ORDERS.A")
    with topics_locked(conversation):
        nodes.when(lambda: conversation.wait_for(WAITS), lambda: nodes.end_backend(conversation))
        with pytest.raises(ConnectionLost):
            node.topic_listen("ORDERS")
    assert node.topic_status("ORDERS") == ((), ())
    assert node.topic_status("ORDERS.A").notifiers == ("NODE1",)


@nodes.in_a_loop
async def test_queued_calls_go_on(conversation: World, new_async_node: Callable[..., AsyncNode]):
    async with new_async_node("NODE1", nodes.QUICK) as node, new_async_node("NODE2") as other:
        other.on_rpc(lambda message: "heard")
        task = asyncio.create_task(other.run())
        with topics_locked(conversation):
            under_way = asyncio.create_task(node.topic_listen("ORDERS"))
            await asyncio.to_thread(conversation.wait_for, WAITS)
            queued = asyncio.create_task(node.topic_status("ORDERS"))
            calling = asyncio.create_task(node.call("NODE2", "x", timeout=nodes.SOON))
            await asyncio.sleep(0)  # lets both tasks begin
            assert len(node._session._queue) == 2
            await asyncio.to_thread(nodes.end_backend, conversation)
            with pytest.raises(ConnectionLost):
                await under_way
        assert await queued == ((), ())
        assert await calling == "heard"
        other.stop()
        await task


def test_a_lost_connection_fails_a_question(conversation: World, node: Any, node2: Node):
    nodes.when(lambda: nodes.next_message(node2, "Rpc"), lambda: nodes.end_backend(conversation))
    started = monotonic()
    with pytest.raises(ConnectionLost, match="lost during the call"):
        node.call("NODE2", "x", timeout=nodes.SOON)
    assert monotonic() - started < PROMPTLY
    node2.on_rpc(lambda message: "heard")
    with nodes.running(node2):
        nodes.next_event(node, "reconnected")
        assert node.call("NODE2", "x", timeout=nodes.SOON) == "heard"


def test_calls_after_an_idle_while_use_a_new_connection(conversation: World, node2: Node):
    node2.on_rpc(lambda message: "heard")
    url = conversation.server.url("user1")
    with nodes.running(node2), Node("NODE1", url, options=nodes.QUICK) as node:
        node.topic_listen("ORDERS")
        node.topic_notify("ORDERS")
        for ask in (node.topic_send, lambda *_: node.call("NODE2", "x", timeout=nodes.SOON)):
            nodes.end_backend(conversation)
            node._session._used_at -= 2
            assert ask("ORDERS", "x") in (None, "heard")
        assert nodes.next_message(node).body == "x"
        assert node.counters.reconnects == 2


def flip_rules(owner: psycopg.Connection) -> None:
    owner.execute("UPDATE messages.auth SET dest = 'NOTHING' WHERE dest = 'ORDERS'")
    owner.execute("UPDATE messages.auth SET dest = 'ORDERS' WHERE dest = 'NOTHING'")


def test_revoked_topics_resume_if_joined_again(conversation: World, node: Any, node2: Node):
    owner = conversation.owner.connection
    node.topic_listen("ORDERS")
    for _ in range(2):
        flip_rules(owner)
        # The node has not read yet that it lost the first right.
        node.topic_listen("ORDERS")
    node.topic_listen("ORDERS.A")
    owner.execute("DELETE FROM messages.auth WHERE role = 'user1' AND dest = 'ORDERS.*'")
    nodes.end_backend(conversation)
    nodes.next_event(node, "reconnected")
    assert node2.topic_status("ORDERS").listeners == ("NODE1",)
    assert node2.topic_status("ORDERS.A").listeners == ()
    flip_rules(owner)
    node.topic_notify("ORDERS")
    nodes.end_backend(conversation)
    nodes.next_event(node, "reconnected")
    assert node2.topic_status("ORDERS") == (("NODE1",), ())


@pytest.mark.usefixtures("long_closing")
def test_calls_wait_while_the_server_is_away(new_node: NewNode, far: str, proxy: Proxy, caplog):
    options = Options(reconnect_wait=0.3, backoff_max=0.1, answer_timeout=2)
    node = new_node("NODE1", far + " connect_timeout=60", options)
    proxy.refuse()
    with pytest.raises(ConnectionLost):
        node.topic_status("ORDERS")
    with pytest.raises(ConnectionLost, match="is not connected"):
        node.topic_status("ORDERS")
    assert not node.is_healthy
    started = monotonic()
    assert list(node.messages(timeout=nodes.NOW)) == []
    Timer(0.3, node.close).start()
    assert list(node.messages()) == []
    assert monotonic() - started < PROMPTLY
    assert 0 < len([r for r in caplog.records if r.levelno >= logging.WARNING]) < 6


@pytest.mark.usefixtures("long_closing")
def test_close_waits_for_no_attempt_to_connect(new_node: NewNode, far: str, proxy: Proxy):
    node = new_node("NODE1", far + " connect_timeout=60", WATCHFUL)
    proxy.stall(new=True)
    with nodes.running(node):
        wait_until(lambda: proxy.accepted > 1)
        started = monotonic()
        node.close()
        assert monotonic() - started < PROMPTLY
        proxy.heal()


@nodes.in_a_loop
async def test_close_never_hangs(far: str, proxy: Proxy, monkeypatch):
    monkeypatch.setattr(async_session, "_CLOSING_SECONDS", 0.2)
    node = AsyncNode("NODE1", far)
    await node.open()
    proxy.stall("answers")
    calls = (
        node.topic_status("ORDERS"), node.topic_send("ORDERS", "x"), node.rpc("NODE2", "t", "x"),
    )  # fmt: skip
    asking = [asyncio.create_task(call) for call in calls]
    await asyncio.wait(asking, timeout=0.2)
    started = monotonic()
    await node.close()
    assert monotonic() - started < PROMPTLY
    done, _ = await asyncio.wait(asking, timeout=PROMPTLY)
    assert [type(task.exception()) for task in done] == [NodeClosed] * 3
