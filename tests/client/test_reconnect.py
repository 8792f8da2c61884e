"""A lost connection comes back: registered as before, and the caller is told."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Timer
from time import monotonic

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, Message, Node, Options
from psqlmessages.client import async_link
from psqlmessages.client.calls import Call
from psqlmessages.exceptions import CallTimeout, ConnectionLost, NodeClosed
from tests.client.moments import somebody_sleeps, when
from tests.client.programs import PROMPTLY
from tests.client.proxy import Proxy
from tests.conftest import TestedServer

SOON = timedelta(seconds=60)
# Comes back quickly, and is not lost because the machine stands still.
QUICK = Options(
    backoff_least=timedelta(milliseconds=20),
    backoff_most=timedelta(milliseconds=200),
    probe_timeout=SOON,
    reconnect_wait=SOON,
)
# Finds out soon that a network stalls, but not sooner than a machine may stand still.
WATCHFUL = replace(
    QUICK,
    evaluate_interval=timedelta(hours=1),
    probe_interval=timedelta(milliseconds=200),
    probe_timeout=timedelta(seconds=5),
    answer_timeout=timedelta(seconds=5),
)

LONG = Call("SELECT 1 FROM pg_sleep(100)", (), int)

EndBackend = Callable[[str], None]


@pytest.fixture
def end_backend(superuser: psycopg.Connection) -> EndBackend:
    """End the backend of a node's connection, found by its application name, and wait for it.

    Those of nodes before it may not have ended yet: it is the newest.
    """

    def end(ident: str) -> None:
        ended = superuser.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM ("
            " SELECT pid FROM pg_stat_activity WHERE application_name = %s"
            " ORDER BY backend_start DESC LIMIT 1) AS newest",
            (f"psqlmessages {ident}",),
        ).fetchall()
        assert ended == [(True,)]

    return end


@pytest.fixture
def node(server: TestedServer, conversation: None) -> Iterator[Node]:
    """NODE1, quick to come back."""
    with Node("NODE1", server.url("user1"), options=QUICK) as node:
        yield node


def next_event(node: Node, event: str) -> Message:
    return next(m for m in node.messages(timeout=SOON) if m.event == event)


def test_a_node_comes_back_registered_as_before_and_tells(
    node: Node, node2: Node, end_backend: EndBackend
) -> None:
    node.topic_listen("ORDERS")
    node.topic_notify("ORDERS.A")
    node2.topic_notify("ORDERS")
    node2.topic_listen("ORDERS.A")
    channel = node.channel
    end_backend("NODE1")
    back = next_event(node, "reconnected")
    assert back.type == "Sys"
    assert back.away is not None
    assert timedelta(0) < back.away < SOON
    assert node.is_healthy
    assert node.channel != channel
    assert (node.counters.lost_connections, node.counters.reconnects) == (1, 1)
    node2.topic_send("ORDERS", "again")
    assert next(m for m in node.messages(timeout=SOON) if m.type == "Topic").body == "again"
    node.topic_send("ORDERS.A", "there")
    assert next(m for m in node2.messages(timeout=SOON) if m.type == "Topic").body == "there"


def test_a_call_after_an_idle_while_goes_over_a_new_connection(
    node: Node, end_backend: EndBackend
) -> None:
    node.topic_listen("ORDERS")
    node.topic_notify("ORDERS")
    end_backend("NODE1")
    node._link._used_at -= 2
    node.topic_send("ORDERS", "x")
    assert next(m for m in node.messages(timeout=SOON) if m.type == "Topic").body == "x"


def test_a_call_under_way_says_that_it_may_or_may_not_have_been_done(
    node: Node, superuser: psycopg.Connection, end_backend: EndBackend
) -> None:
    when(somebody_sleeps(superuser), lambda: end_backend("NODE1"))
    with pytest.raises(ConnectionLost):
        node._link.run(LONG)
    assert node.topic_status("ORDERS").listeners == ()


def test_a_question_fails_at_once_when_its_connection_is_lost(
    node: Node, node2: Node, end_backend: EndBackend
) -> None:
    when(lambda: next(node2.messages(timeout=SOON)), lambda: end_backend("NODE1"))
    started = monotonic()
    with pytest.raises(ConnectionLost, match="lost during the call"):
        node.call("NODE2", "x", timeout=timedelta(seconds=60))
    assert monotonic() - started < 30


def test_what_an_administrator_took_away_is_not_asked_for_again(
    owner: psycopg.Connection, node: Node, end_backend: EndBackend
) -> None:
    node.topic_listen("ORDERS")
    node.topic_listen("ORDERS.A")
    owner.execute("DELETE FROM messages.auth WHERE role = 'user1' AND dest = 'ORDERS.*'")
    assert next_event(node, "topic_unlisten").topic == "ORDERS.A"
    end_backend("NODE1")
    next_event(node, "reconnected")
    assert node.topic_status("ORDERS").listeners == ("NODE1",)


def through(proxy: Proxy, dsn: str) -> str:
    return make_conninfo(dsn, host="127.0.0.1", port=proxy.port)


def test_a_stalled_network_is_found_by_the_probe_and_the_old_connection_is_ended(
    server: TestedServer, conversation: None, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = through(proxy, server.url("user1"))
    # Without evaluation only the probe's echo can be missing.
    with Node("NODE1", dsn, options=WATCHFUL) as node:
        node.topic_listen("ORDERS")
        list(node.messages(timeout=timedelta(seconds=0.5)))
        assert node.is_healthy
        proxy.stall()
        next_event(node, "reconnected")
        assert node.topic_status("ORDERS").listeners == ("NODE1",)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) < 5


def test_a_send_on_a_stalled_network_does_not_wait_for_ever(
    server: TestedServer, conversation: None, proxy: Proxy
) -> None:
    with Node("NODE1", through(proxy, server.url("user1")), options=WATCHFUL) as node:
        node.topic_notify("ORDERS")
        proxy.stall()
        started = monotonic()
        with pytest.raises(ConnectionLost, match="no answer from the server within 5 s"):
            node.topic_send("ORDERS", "x")
        assert monotonic() - started < PROMPTLY
        assert node.topic_status("ORDERS").notifiers == ("NODE1",)


def test_while_the_server_is_away_calls_wait_a_while_and_close_ends_it_at_once(
    server: TestedServer, conversation: None, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    options = Options(
        reconnect_wait=timedelta(seconds=0.3),
        backoff_most=timedelta(seconds=0.1),
        answer_timeout=timedelta(seconds=5),
    )
    dsn = through(proxy, server.url("user1")) + " connect_timeout=60"
    with Node("NODE1", dsn, options=options) as node:
        proxy.refuse()
        with pytest.raises(ConnectionLost):
            node.topic_status("ORDERS")
        with pytest.raises(ConnectionLost, match="is not connected"):
            node.topic_status("ORDERS")
        assert not node.is_healthy
        Timer(0.3, node.close).start()
        started = monotonic()
        assert list(node.messages()) == []
        assert monotonic() - started < PROMPTLY
    assert 0 < len(caplog.records) < 5


def test_an_async_node_comes_back_registered_as_before_and_tells(
    new_async_node: Callable[..., AsyncNode], end_backend: EndBackend
) -> None:
    async def test() -> None:
        async with new_async_node("NODE1", QUICK) as node:
            await node.topic_listen("ORDERS")
            await node.topic_notify("ORDERS")
            await asyncio.to_thread(end_backend, "NODE1")
            messages = aiter(node)
            back = await anext(messages)
            assert (back.event, back.type) == ("reconnected", "Sys")
            await node.topic_send("ORDERS", "again")
            assert (await anext(messages)).body == "again"
            assert node.counters.reconnects == 1

    asyncio.run(test())


def test_an_async_node_fails_what_is_under_way_and_carries_what_follows(
    new_async_node: Callable[..., AsyncNode], superuser: psycopg.Connection, end_backend: EndBackend
) -> None:
    async def test() -> None:
        async with new_async_node("NODE1", QUICK) as node, new_async_node("NODE2"):
            await node.topic_notify("ORDERS")
            calling = asyncio.create_task(node.call("NODE2", "x", timeout=SOON))
            long = asyncio.create_task(node._link.run(LONG))
            queued = asyncio.create_task(node.topic_status("ORDERS"))
            await asyncio.to_thread(somebody_sleeps(superuser))
            await asyncio.to_thread(end_backend, "NODE1")
            for task in (long, calling):
                with pytest.raises(ConnectionLost):
                    await task
            assert (await queued).notifiers == ("NODE1",)

    asyncio.run(test())


@pytest.mark.usefixtures("long_closing")
def test_an_async_node_finds_a_stalled_network_and_closes_at_once_while_it_is_away(
    server: TestedServer, conversation: None, proxy: Proxy
) -> None:
    async def test() -> None:
        dsn = through(proxy, server.url("user1"))
        async with AsyncNode("NODE1", dsn, options=WATCHFUL) as node:
            await node.topic_listen("ORDERS")
            proxy.stall()
            async for message in node:
                if message.event == "reconnected":
                    break
            assert (await node.topic_status("ORDERS")).listeners == ("NODE1",)
            proxy.refuse()
            with pytest.raises(ConnectionLost):
                await node.topic_status("ORDERS")
            waiting = asyncio.create_task(node.topic_status("ORDERS"))
            await asyncio.wait({waiting}, timeout=0.2)
            started = monotonic()
            await node.close()
            assert monotonic() - started < PROMPTLY
            with pytest.raises(NodeClosed):
                await waiting

    asyncio.run(test())


def answer_once(node: Node) -> None:
    for message in node.messages(timeout=SOON):
        if message.wants_answer:
            message.reply("heard")
            return


def test_a_question_after_an_idle_while_goes_over_a_new_connection(
    node: Node, node2: Node, end_backend: EndBackend
) -> None:
    end_backend("NODE1")
    node._link._used_at -= 2
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer_once, node2)
        assert node.call("NODE2", "x", timeout=SOON) == "heard"
        answering.result()
    assert node.counters.reconnects == 1


def test_an_async_question_that_waited_for_its_turn_goes_over_a_new_connection(
    new_async_node: Callable[..., AsyncNode], superuser: psycopg.Connection, end_backend: EndBackend
) -> None:
    async def test() -> None:
        async with new_async_node("NODE1", QUICK) as node, new_async_node("NODE2") as other:
            other.on_rpc(lambda message: "heard")
            running = asyncio.create_task(other.run())
            long = asyncio.create_task(node._link.run(LONG))
            calling = asyncio.create_task(node.call("NODE2", "x", timeout=SOON))
            await asyncio.to_thread(somebody_sleeps(superuser))
            await asyncio.to_thread(end_backend, "NODE1")
            with pytest.raises(ConnectionLost):
                await long
            assert await calling == "heard"
            other.stop()
            await running

    asyncio.run(test())


def test_an_async_node_closes_in_time_amid_a_call_on_a_stalled_network(
    server: TestedServer, conversation: None, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_link, "_CLOSING_SECONDS", 0.2)

    async def test() -> None:
        node = AsyncNode("NODE1", through(proxy, server.url("user1")))
        await node.open()
        proxy.stall("answers")
        asking = asyncio.create_task(node.topic_status("ORDERS"))
        await asyncio.wait({asking}, timeout=0.2)
        started = monotonic()
        await node.close()
        assert monotonic() - started < PROMPTLY
        with pytest.raises(NodeClosed):
            await asking

    asyncio.run(test())


def test_an_async_wait_of_no_time_ends_while_the_node_is_away(
    server: TestedServer, conversation: None, proxy: Proxy
) -> None:
    async def test() -> None:
        dsn = through(proxy, server.url("user1"))
        async with AsyncNode("NODE1", dsn, options=WATCHFUL) as node:
            proxy.refuse()
            with pytest.raises(ConnectionLost):
                await node.topic_status("ORDERS")
            async with asyncio.timeout(PROMPTLY):
                async for _ in node.messages(timeout=timedelta(0)):
                    pass

    asyncio.run(test())


def test_a_call_ends_in_time_where_the_network_stalls_before_its_answer(
    server: TestedServer, node2: Node, proxy: Proxy
) -> None:
    # An evaluation by itself would wait for as long as a probe, which is a minute.
    options = Options(
        evaluate_interval=timedelta(milliseconds=100),
        probe_interval=timedelta(minutes=1),
        probe_timeout=timedelta(milliseconds=300),
    )

    def stall_once_asked() -> None:
        next(m for m in node2.messages(timeout=SOON) if m.type == "Rpc")
        proxy.stall()

    with (
        Node("NODE1", through(proxy, server.url("user1")), options=options) as node,
        ThreadPoolExecutor(1) as threads,
    ):
        stalling = threads.submit(stall_once_asked)
        started = monotonic()
        with pytest.raises((ConnectionLost, CallTimeout)):
            node.call("NODE2", "x", timeout=timedelta(seconds=5))
        assert monotonic() - started < PROMPTLY
        stalling.result()
