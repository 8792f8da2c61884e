"""Questions and answers between two nodes on the real database."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any

import psycopg
import pytest

from psqlmessages import Message, Node
from psqlmessages.exceptions import CalleeGone, CallFailed, CallTimeout
from tests.client.conftest import NewNode
from tests.client.nodes import NOW, SOON, next_message, running, when
from tests.django.waiting import wait_until
from tests.sql.conftest import World

FAILURES = {
    "fail": "the handler of NODE2 failed (RuntimeError)",
    "refuse": "no such order",
    **dict.fromkeys(("unsendable", "refuse unsendably"), "the answer could not be sent"),
}


@pytest.fixture
def pair(new_node: NewNode) -> Iterator[tuple[Any, Any]]:
    node1, node2 = new_node(), new_node("NODE2")

    @node2.on_rpc
    def answer(message: Message) -> object:
        if message.body == "fail":
            raise RuntimeError("a secret")
        if message.body in ("refuse", "refuse unsendably"):
            raise CallFailed("no such order" if message.body == "refuse" else "\0")
        return object() if message.body == "unsendable" else message.body

    with running(node2):
        yield node1, node2


def test_a_call_is_answered_by_the_handler_of_the_node_asked(pair: tuple[Any, Any]):
    node1, node2 = pair
    for body in ("x", {"x": 1}, None, b"\0", "y" * 50_000):
        assert node1.call("NODE2", body, timeout=SOON) == body
    # If the handler fails, the caller learns why, without the text of the exception.
    for body, reason in FAILURES.items():
        with pytest.raises(CallFailed) as raised:
            node1.call("NODE2", body, timeout=SOON)
        assert raised.value.text == reason
        assert node1.call("NODE2", "works", timeout=SOON) == "works"
    assert (node2.counters.handler_failures, node2.counters.reply_failures) == (1, 2)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda n: node1.call("NODE2", n, timeout=SOON), range(100))
        assert list(found) == list(range(100))
    # The answer to `rpc` comes as a message.
    node1.rpc("NODE2", "my token", "x")
    answer = next_message(node1, "Return")
    assert (answer.sender, answer.token, answer.body) == ("NODE2", "my token", "x")


def test_a_handler_may_answer_explicitly(node1: Node, node2: Node, caplog):
    came = []

    @node2.on_rpc
    def answer(message: Message) -> object:
        answer = message.reply_error if message.body == "unsendable reason" else message.reply
        answer({"works": "by hand", "unsendable reason": 5}.get(message.body, object()))
        return "too late"

    @node2.on_topic("ORDERS", ordered=True)
    def order(message: Message) -> None:
        came.append(message.body)
        if message.body == "first":
            raise CallFailed("no such article")

    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    with running(node2):
        node1.topic_send_many("ORDERS", ["first", "last"])
        wait_until(lambda: came == ["first", "last"])
        assert node1.call("NODE2", "works", timeout=SOON) == "by hand"
        for body in ("unsendable", "unsendable reason"):
            with pytest.raises(CallFailed, match=r"the handler of NODE2 failed \(TypeError\)"):
                node1.call("NODE2", body, timeout=SOON)
    assert node2.counters.handler_failures == 3
    assert "no such article" in caplog.text


def test_a_call_that_nobody_answers_times_out(node1: Node, node2: Node):
    with pytest.raises(CallTimeout, match=r"no answer from NODE2 within 0\.2 s"):
        node1.call("NODE2", "x", timeout=timedelta(milliseconds=200))
    next_message(node2, "Rpc").reply("late")
    # This call returns after the notification has arrived.
    node1.topic_status("ORDERS")
    assert [m for m in node1.messages(timeout=NOW) if m.type == "Return"] == []
    assert node1.counters.late_answers == 1
    with running(node2), pytest.raises(CallFailed, match="NODE2 has no RPC handler"):
        node1.call("NODE2", "x", timeout=SOON)


@pytest.mark.parametrize("end", ["SELECT messages.deinit('NODE2')", "crash"])
def test_a_call_ends_when_the_node_asked_goes(conversation: World, node1: Node, end: str):
    callee = psycopg.connect(conversation.server.url("user2"), autocommit=True)
    callee.execute("SELECT messages.init('NODE2')")
    leave = callee.close if end == "crash" else lambda: callee.execute(end)
    leaving = when(lambda: next(callee.notifies(timeout=60, stop_after=1)), leave)
    with pytest.raises(CalleeGone, match="NODE2 has gone"):
        node1.call("NODE2", "x", timeout=SOON)
    # The caller may know before `deinit` has returned.
    leaving.join()
    callee.close()


def test_every_listener_answers_a_question_to_a_topic(world: World, new_node: NewNode):
    world.rules("user3 NODE3 Topic ORDERS R 5")
    node1, node2, node3 = (new_node(f"NODE{number}") for number in (1, 2, 3))
    for node in (node2, node3):
        node.on_topic("ORDERS")(lambda m: m.body + 1)
    with running(node2), running(node3):
        node1.topic_notify("ORDERS")
        wait_until(lambda: len(node1.topic_status("ORDERS").listeners) == 2)
        answers = islice(node1.call_topic("ORDERS", 1, timeout=SOON), 2)
        assert {(a.sender, a.body) for a in answers} == {("NODE2", 2), ("NODE3", 2)}
        # Without a timeout this would wait for a third answer.
        list(node1.call_topic("ORDERS", 1, timeout=NOW))


def test_a_node_that_was_away_before_the_question_answers_it(new_node: NewNode):
    node1 = new_node()
    for _ in range(2):
        new_node("NODE2").close()
    node2 = new_node("NODE2")
    node2.on_rpc(lambda message: message.body)
    with running(node2):
        # NODE1 has not read the events of the earlier connections yet.
        assert node1.call("NODE2", "x", timeout=SOON) == "x"
