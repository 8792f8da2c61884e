"""Node and AsyncNode on the real database: sending, receiving, handlers, and their end."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from threading import Timer
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import psqlmessages
from psqlmessages import AsyncNode, Message, Node, Options, exceptions
from psqlmessages.client.calls import Call
from psqlmessages.client.session import NodeSession
from psqlmessages.exceptions import NodeClosed, NoListeners
from tests.client.conftest import NewNode
from tests.client.nodes import NOW, SOON, next_message, offered, running, when
from tests.client.programs import PROMPTLY
from tests.django.waiting import wait_until
from tests.sql.conftest import World

BODIES = (
    "", "hello", "zwei\nZeilen, ein Üm\u2028laut", b"", b"\0\xff", {"id": 1}, [1, None], None, 1.5,
    "x" * 7_000, "x" * 8_000, {"large": "ä\n" * 50_000}, "x" * 3_000_000,
)  # fmt: skip


@pytest.fixture
def echo(node: Any) -> Any:
    node.topic_listen("ORDERS")
    node.topic_notify("ORDERS")
    return node


def bodies(node: Any, count: int) -> list[object]:
    topical = (m.body for m in node.messages(timeout=SOON) if m.type == "Topic")
    return list(islice(topical, count))


def test_every_kind_and_size_of_body_arrives_as_it_was_sent(echo: Any):
    for body in BODIES:
        echo.topic_send("ORDERS", body)
        message = next_message(echo)
        assert message.body == body
        assert (message.sender, message.to, message.topic) == ("NODE1", "ORDERS", "ORDERS")
        assert isinstance(message.id, int)
        assert not isinstance(body, str) or message.size == len(body.encode())


def test_messages_come_in_order_and_none_is_lost_between_two_waits(echo: Any):
    """Notifications that arrive with the answers of other calls are included."""
    for number in range(50):
        echo.topic_send("ORDERS", number)
        echo.topic_status("ORDERS")
    # Even with a time-out of 0, notifications that have arrived are read.
    assert [m.body for m in echo.messages(timeout=NOW) if m.type == "Topic"] == list(range(50))
    assert list(echo.messages(timeout=NOW)) == []
    many = ["text", {"n": 1}, None, "x" * 10_000]
    assert echo.topic_send_many("ORDERS", many) == 4
    assert echo.topic_send_many("ORDERS", []) == 0
    assert echo.topic_send_many("ORDERS", (bytes([n % 256]) for n in range(500))) == 500
    assert bodies(echo, 504) == many + [bytes([n % 256]) for n in range(500)]


def test_errors_are_exceptions_and_the_node_goes_on(world: World, new_node: NewNode):
    node = new_node()
    with pytest.raises(exceptions.NotNotifying):
        node.topic_send("ORDERS", "x")
    node.topic_notify("ORDERS")
    for error, words, call, *arguments in (
        (exceptions.TopicNotExistent, "", node.topic_listen, "UNHEARD"),
        (NoListeners, "", node.topic_send, "ORDERS", "x"),
        (exceptions.NotConnected, "", node.call, "NODE2", "x"),
        (exceptions.IdentTaken, "", new_node),
        (exceptions.IdentMissing, "", new_node, "", world.server.url("user1")),
        (exceptions.IdentNotAuthorized, "", new_node, "NODE2", world.server.url("user1")),
        (ValueError, "NUL", node.topic_send, "ORDERS", "a\0"),
        (ValueError, "cannot contain a NUL", node.topic_send, "OR\0DERS", "x"),
        (TypeError, "a name or token must be a str, not int: 5", node.topic_send, 5, "x"),
    ):
        with pytest.raises(error, match=words or None):
            call(*arguments)
    assert node.is_healthy


def test_a_node_can_list_senders_listeners_and_observers(world: World, new_node: NewNode):
    world.rules("user1 OTHER Topic ORDERS RW 5")
    node1, node2 = new_node(), new_node("NODE2")
    assert node1.topic_listen("ORDERS")
    assert not node1.topic_listen("ORDERS")
    assert node2.topic_notify("ORDERS")
    assert node1.topic_status("ORDERS") == (("NODE2",), ("NODE1",))
    assert node1.topic_auth("ORDERS").listeners == ("NODE1", "NODE2", "OTHER")
    assert node2.topic_unnotify("ORDERS")
    assert not node2.topic_unnotify("ORDERS")
    assert node1.topic_unlisten("ORDERS")
    assert node1.topic_status("ORDERS") == ((), ())
    # An observer sees a topic without being a listener.
    assert node2.topic_observe("ORDERS*")
    node1.topic_notify("ORDERS")
    with pytest.raises(NoListeners):
        node1.topic_send("ORDERS", "nobody")
    # A connection can have several idents.
    node1.init("OTHER")
    node1.topic_listen("ORDERS")
    node1.use("NODE1")
    assert node1.topic_status("ORDERS") == (("NODE1",), ("OTHER",))
    node1.topic_send("ORDERS", "seen")
    node1.topic_send_as("NODE1", "ORDERS", {"id": 1})
    assert bodies(node2, 2) == ["seen", {"id": 1}]
    assert node2.topic_unobserve("ORDERS*")
    assert node1.deinit("OTHER")
    assert node1.topic_status("ORDERS").listeners == ()


def test_handlers_get_events(new_node: NewNode):
    node, heard = new_node(), []

    @node.on_event("connect", "disconnect")
    def note(message: Message) -> None:
        heard.append((message.event, message.ident))
        if message.event == "disconnect":
            node.stop()

    with running(node):
        new_node("NODE2").close()
        wait_until(lambda: len(heard) == 2)
    assert heard == [("connect", "NODE2"), ("disconnect", "NODE2")]


@pytest.mark.usefixtures("long_closing")
def test_another_thread_ends_a_wait_and_a_call_at_once(new_node: NewNode):
    node2, node = new_node("NODE2"), new_node()
    when(lambda: next_message(node2, "Rpc"), node.stop)
    started = monotonic()
    with pytest.raises(NodeClosed, match="stopped while it waited"):
        node.call("NODE2", "x", timeout=SOON)
    # After `stop` one may still send, after `close` not.
    node2.topic_listen("ORDERS")
    node.topic_notify("ORDERS")
    node.topic_send("ORDERS", "goodbye")
    assert next_message(node2).body == "goodbye"
    assert list(node.messages()) == []
    with pytest.raises(NodeClosed, match="stopped before the call"):
        node.call("NODE2", "x", timeout=SOON)
    assert monotonic() - started < PROMPTLY
    node.close()
    with pytest.raises(NodeClosed):
        node.topic_send("ORDERS", "x")
    assert not node.is_healthy
    assert node2.topic_status("ORDERS").notifiers == ()
    Timer(0.1, node2.close).start()
    assert not [m for m in node2.messages() if m.type == "Topic"]


@pytest.mark.usefixtures("long_closing")
def test_a_signal_handler_ends_a_wait_at_once(node1: Node):
    previous = signal.signal(signal.SIGUSR1, lambda *_: node1.close())
    try:
        Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        started = monotonic()
        assert list(node1.messages()) == []
        assert monotonic() - started < PROMPTLY
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert node1._session.is_closed


def test_a_node_that_cannot_be_used_says_why(world: World, new_node: NewNode):
    with pytest.raises(NodeClosed, match="not open yet"):
        Node("NODE1").topic_send("ORDERS", "x")
    with pytest.raises(exceptions.ServerUnreachable, match="cannot connect"):
        new_node("NODE1", "host=127.0.0.1 port=1")
    with pytest.raises(exceptions.NotInstalled, match="run the migrations"):
        new_node("NODE1", make_conninfo(world.server.superuser_url, dbname="postgres"))


def test_large_bodies_that_wait_arrive_in_few_calls(echo: Any, owner: psycopg.Connection):
    sent = [f"{number} Grüße " + "ä\n" * 4_000 for number in range(20)]
    for body in sent:
        echo.topic_send("ORDERS", body)
    # As if it had expired.
    owner.execute("DELETE FROM psqlmessages_body WHERE body LIKE '3 %'")
    # The answer comes after all notifications.
    echo.topic_status("ORDERS")
    before = echo.counters.calls
    found = [message for message in echo.messages(timeout=NOW) if message.type == "Topic"]
    assert echo.counters.calls - before < len(sent) / 2
    with pytest.raises(exceptions.MessagesError):
        _ = found.pop(3).body
    assert [message.body for message in found] == sent[:3] + sent[4:]
    assert (echo.counters.fetched, echo.counters.lost_bodies) == (len(sent) - 1, 1)


def test_a_node_waits_for_the_disk_where_it_is_asked_to(conversation: World):
    for is_on in (False, True):
        options = Options(synchronous_commit=is_on)
        with Node("NODE1", conversation.server.url("user1"), options=options) as node:
            shown = node._session.run(Call("SHOW synchronous_commit", (), str))
            assert shown == ("on" if is_on else "off")


def test_sync_and_async_offer_the_same_and_none_waits_long_between_two_tries():
    assert offered(Node) == offered(AsyncNode)
    assert offered(psqlmessages.PubSub) == offered(psqlmessages.AsyncPubSub)
    sync = offered(psqlmessages.Subscription)
    assert sync == offered(psqlmessages.AsyncSubscription) | {"__init__": sync["__init__"]}
    assert Options().backoff_max <= timedelta(seconds=4)


@pytest.mark.parametrize(
    ("end", "use"), [
        ("_end_calls", lambda node: node.topic_status("ORDERS")),
        ("_stop_reading", lambda node: next(node.messages(timeout=NOW), None)),
    ],
)  # fmt: skip
def test_ctrl_c_at_the_end_of_a_call_or_wait_leaves_no_connection_open(
    conversation: World, monkeypatch, end: str, use: Callable[[Node], object]
):
    node = Node("NODE1", conversation.server.url("user1"))
    node.open()

    def interrupt(_: NodeSession) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(NodeSession, end, interrupt)
    with pytest.raises(KeyboardInterrupt), node:
        use(node)
    assert node._session.is_closed
