"""Questions and answers between two nodes on the real database."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice

import psycopg
import pytest

from psqlmessages import CallTimeout, Message, Node
from psqlmessages.exceptions import (
    CalleeGone,
    CallFailed,
)
from tests.client.conftest import AddRules
from tests.client.test_node import NOW, SOON, next_message, poll_until
from tests.conftest import TestedServer


@pytest.fixture
def answering(node2: Node) -> Iterator[Node]:
    """NODE2, whose handlers run in a thread."""

    @node2.on_rpc
    def answer(message: Message) -> object:
        if message.body == "fail":
            raise RuntimeError("a secret")
        if message.body == "refuse":
            raise CallFailed("no such order")
        if message.body == "unsendable":
            return object()
        if message.body == "by hand":
            message.reply("by hand")
        if message.body == "unsendable by hand":
            message.reply(object())
        return message.body

    with running(node2):
        yield node2


@contextmanager
def running(node: Node) -> Iterator[None]:
    thread = threading.Thread(target=node.run)
    thread.start()
    try:
        yield
    finally:
        node.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("body", ["x", {"x": 1}, None, b"\0", "by hand", "y" * 50_000])
def test_a_call_is_answered_by_the_handler_of_the_node_asked(
    node1: Node, answering: Node, body: object
) -> None:
    assert node1.call("NODE2", body, timeout=SOON) == body


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("fail", "the handler of NODE2 failed (RuntimeError)"),
        ("refuse", "no such order"),
        ("unsendable", "the answer could not be sent"),
        ("unsendable by hand", "the handler of NODE2 failed (TypeError)"),
    ],
)
def test_a_handler_that_fails_tells_the_asker_and_the_node_goes_on(
    node1: Node, answering: Node, body: str, reason: str
) -> None:
    with pytest.raises(CallFailed) as raised:
        node1.call("NODE2", body, timeout=SOON)
    assert raised.value.text == reason
    assert answering.counters.handler_failures == (body in ("fail", "unsendable by hand"))
    assert answering.counters.reply_failures == (body == "unsendable")
    assert node1.call("NODE2", "works", timeout=SOON) == "works"


def test_a_failed_call_of_a_handler_that_nobody_asked_is_logged(
    node1: Node, node2: Node, caplog: pytest.LogCaptureFixture
) -> None:
    came = threading.Event()

    @node2.on_topic("ORDERS")
    def order(message: Message) -> None:
        if message.body == "last":
            came.set()
        else:
            raise CallFailed("no such article")

    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    with running(node2):
        node1.topic_send("ORDERS", "first")
        node1.topic_send("ORDERS", "last")
        assert came.wait(60)
    assert node2.counters.handler_failures == 1
    assert "no such article" in caplog.text


def test_a_call_to_a_node_without_handlers_fails_at_once(node1: Node, node2: Node) -> None:
    with running(node2), pytest.raises(CallFailed, match="NODE2 has no handler for this"):
        node1.call("NODE2", "x", timeout=SOON)


def test_a_call_that_nobody_answers_times_out(node1: Node, node2: Node) -> None:
    with pytest.raises(CallTimeout, match=r"no answer from NODE2 within 0\.2 s"):
        node1.call("NODE2", "x", timeout=timedelta(milliseconds=200))


def test_threads_share_a_node(node1: Node, answering: Node) -> None:
    def ask(number: int) -> object:
        return node1.call("NODE2", number, timeout=SOON)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(200))) == list(range(200))


def test_an_answer_after_the_timeout_is_counted_and_dropped(node1: Node, node2: Node) -> None:
    with pytest.raises(CallTimeout):
        node1.call("NODE2", "x", timeout=NOW)
    next_message(node2, "Rpc").reply("late")
    # What this answers comes after the notification.
    node1.topic_status("ORDERS")
    assert [m for m in node1.messages(timeout=NOW) if m.type == "Return"] == []
    assert node1.counters.late_answers == 1


@pytest.mark.parametrize("end", ["deinit", "crash"])
def test_a_call_ends_when_the_node_asked_goes(
    server: TestedServer, conversation: None, superuser: psycopg.Connection, node1: Node, end: str
) -> None:
    callee = psycopg.connect(server.url("user2"), autocommit=True)
    callee.execute("SELECT messages.init('NODE2')")
    channel = callee.execute("SELECT * FROM pg_listening_channels()").fetchone()
    assert channel is not None

    def go_when_asked() -> None:
        next(callee.notifies(timeout=60, stop_after=1))
        if end == "deinit":
            callee.execute("SELECT messages.deinit('NODE2')")
        callee.close()

    with ThreadPoolExecutor() as pool:
        pool.submit(go_when_asked)
        with pytest.raises(CalleeGone, match="NODE2 has gone"):
            node1.call("NODE2", "x", timeout=SOON)


def test_every_listener_answers_a_question_to_a_topic(
    server: TestedServer, add_rules: AddRules, node1: Node, node2: Node
) -> None:
    add_rules(("user3", "NODE3", "Topic", "ORDERS", "R", 5))
    with Node("NODE3", server.url("user3")) as node3:
        for node in (node2, node3):
            node.on_topic("ORDERS")(lambda m: m.body + 1)
        with running(node2), running(node3):
            node1.topic_notify("ORDERS")
            poll_until(lambda: len(node1.topic_status("ORDERS").listeners) == 2)
            answers = node1.call_topic("ORDERS", 1, timeout=SOON)
            found = sorted((a.sender, a.body) for a in islice(answers, 2))
            assert found == [("NODE2", 2), ("NODE3", 2)]
            # Without an end of its own this would wait for a third.
            list(node1.call_topic("ORDERS", 1, timeout=NOW))


def test_an_rpc_without_waiting_brings_its_answer_as_a_message(
    node1: Node, answering: Node
) -> None:
    node1.rpc("NODE2", "my token", "x")
    answer = next_message(node1, "Return")
    assert (answer.sender, answer.token, answer.body) == ("NODE2", "my token", "x")
