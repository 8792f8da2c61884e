"""Node on the real database: sending, receiving, asking and answering."""

import inspect
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from threading import Event, Timer
from time import monotonic

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, Message, Node, Options
from psqlmessages.client.calls import Call
from psqlmessages.exceptions import (
    IdentNotAuthorized,
    IdentTaken,
    NodeClosed,
    NoListeners,
    NotConnected,
    NotInstalled,
    NotNotifying,
    ServerUnreachable,
    TopicNotExistent,
)
from tests.client.conftest import AddRules
from tests.client.moments import when
from tests.client.programs import PROMPTLY
from tests.conftest import TestedServer

SOON = timedelta(seconds=60)
NOW = timedelta(0)


def next_message(node: Node, message_type: str = "Topic") -> Message:
    return next(m for m in node.messages(timeout=SOON) if m.type == message_type)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello",
        "zwei\nZeilen, ein Üm\u2028laut",
        b"",
        b"\0\xff",
        {"id": 1},
        [1, None],
        None,
        1.5,
    ],
)
def test_every_kind_of_body_arrives_as_it_was_sent(node1: Node, node2: Node, body: object) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    node1.topic_send("ORDERS", body)
    message = next_message(node2)
    assert message.body == body
    assert (message.sender, message.to, message.topic) == ("NODE1", "ORDERS", "ORDERS")
    assert isinstance(message.id, int)


@pytest.mark.parametrize("size", [7_000, 8_000, 100_000, 3_000_000])
def test_a_large_body_arrives_whole(node1: Node, node2: Node, size: int) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    node1.topic_send("ORDERS", "x" * size)
    message = next_message(node2)
    assert message.body == "x" * size
    assert message.size == size


def test_events_and_messages_come_in_order(node1: Node, node2: Node) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    for number in range(200):
        node1.topic_send("ORDERS", number)
    topical = (m.body for m in node2.messages(timeout=SOON) if m.type == "Topic")
    assert list(islice(topical, 200)) == list(range(200))


def test_many_bodies_travel_in_one_call(node1: Node, node2: Node) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    bodies = ["text", {"n": 1}, None, "x" * 10_000]
    assert node1.topic_send_many("ORDERS", bodies) == 4
    assert node1.topic_send_many("ORDERS", []) == 0
    assert node1.topic_send_many("ORDERS", (bytes([n % 256]) for n in range(500))) == 500
    received = [next_message(node2).body for _ in range(504)]
    assert received == bodies + [bytes([n % 256]) for n in range(500)]


def test_nothing_is_lost_between_two_waits(node1: Node, node2: Node) -> None:
    """Notifications that come with the answers of other calls count as well."""
    node1.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    for number in range(50):
        node1.topic_send("ORDERS", number)
        node1.topic_status("ORDERS")
    assert [m.body for m in node1.messages(timeout=NOW) if m.type == "Topic"] == list(range(50))
    assert list(node1.messages(timeout=NOW)) == []


def test_a_wait_of_no_time_still_reads_what_is_there(node1: Node, node2: Node) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    list(node2.messages(timeout=NOW))
    node1.topic_send("ORDERS", "x")
    # The sender's commit wakes the listener's backend, which may take a moment to deliver.
    assert poll_until(lambda: [m.body for m in node2.messages(timeout=NOW) if m.type == "Topic"])


def poll_until(found: Callable[[], object]) -> object:
    deadline, pause = monotonic() + 60, Event()
    while not (result := found()):
        assert monotonic() < deadline
        pause.wait(0.01)
    return result


def test_errors_are_exceptions(server: TestedServer, node1: Node) -> None:
    with pytest.raises(TopicNotExistent):
        node1.topic_listen("UNHEARD")
    with pytest.raises(NotNotifying):
        node1.topic_send("ORDERS", "x")
    node1.topic_notify("ORDERS")
    with pytest.raises(NoListeners):
        node1.topic_send("ORDERS", "x")
    with pytest.raises(NotConnected):
        node1.call("NODE2", "x")
    with pytest.raises(IdentTaken), Node("NODE1", server.url("user1")):
        pass
    with pytest.raises(IdentNotAuthorized), Node("OTHER", server.url("user1")):
        pass
    with pytest.raises(ValueError, match="NUL"):
        node1.topic_send("ORDERS", "a\0")


def test_a_node_knows_who_sends_and_who_listens(node1: Node, node2: Node) -> None:
    assert node1.topic_listen("ORDERS")
    assert not node1.topic_listen("ORDERS")
    assert node2.topic_notify("ORDERS")
    assert node1.topic_status("ORDERS") == (("NODE2",), ("NODE1",))
    assert node1.topic_auth("ORDERS").listeners == ("NODE1", "NODE2")
    assert node2.topic_unnotify("ORDERS")
    assert not node2.topic_unnotify("ORDERS")
    assert node1.topic_unlisten("ORDERS")
    assert node1.topic_status("ORDERS") == ((), ())


def test_an_observer_sees_a_topic_without_being_a_listener(node1: Node, node2: Node) -> None:
    assert node2.topic_observe("ORDERS*")
    node1.topic_notify("ORDERS")
    with pytest.raises(NoListeners):
        node1.topic_send("ORDERS", "nobody")
    node1.topic_listen("ORDERS")
    node1.topic_send("ORDERS", "seen")
    assert next_message(node2).body == "seen"
    assert node2.topic_unobserve("ORDERS*")


def test_a_connection_can_have_several_idents(
    server: TestedServer, add_rules: AddRules, node1: Node
) -> None:
    add_rules(("user1", "OTHER", "Topic", "ORDERS", "RW", 5))
    node1.init("OTHER")
    node1.topic_listen("ORDERS")
    node1.use("NODE1")
    node1.topic_notify("ORDERS")
    assert node1.topic_status("ORDERS") == (("NODE1",), ("OTHER",))
    assert node1.deinit("OTHER")
    assert node1.topic_status("ORDERS").listeners == ()


def test_sending_as_a_node_without_a_session(
    server: TestedServer, node1: Node, node2: Node
) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_send_as("NODE1", "ORDERS", {"id": 1})
    message = next_message(node2)
    assert (message.sender, message.body) == ("NODE1", {"id": 1})


def test_handlers_hear_of_events(node1: Node, server: TestedServer) -> None:
    heard: list[tuple[str, str]] = []

    @node1.on_event("connect", "disconnect")
    def note(message: Message) -> None:
        heard.append((message.event, message.ident))
        if message.event == "disconnect":
            node1.stop()

    with ThreadPoolExecutor() as pool:
        running = pool.submit(node1.run)
        with Node("NODE2", server.url("user2")):
            pass
        running.result(timeout=60)
    assert heard == [("connect", "NODE2"), ("disconnect", "NODE2")]


@pytest.mark.usefixtures("long_closing")
@pytest.mark.parametrize("ending", ["close", "stop"])
def test_another_thread_ends_a_wait_at_once(
    server: TestedServer, conversation: None, ending: str
) -> None:
    with Node("NODE1", server.url("user1")) as node:
        Timer(0.2, getattr(node, ending)).start()
        started = monotonic()
        assert list(node.messages()) == []
        assert monotonic() - started < PROMPTLY


def test_another_thread_ends_a_call_at_once(node1: Node, node2: Node) -> None:
    when(lambda: next(node2.messages(timeout=SOON)), node1.close)
    with pytest.raises(NodeClosed, match="was stopped while it waited"):
        node1.call("NODE2", "x", timeout=SOON)


@pytest.mark.usefixtures("long_closing")
def test_a_signal_handler_ends_a_wait_at_once(node1: Node) -> None:
    previous = signal.signal(signal.SIGUSR1, lambda *_: node1.close())
    try:
        Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        started = monotonic()
        assert list(node1.messages()) == []
        assert monotonic() - started < PROMPTLY
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not node1.is_healthy
    with pytest.raises(NodeClosed):
        node1.topic_send("ORDERS", "x")


def test_sending_still_works_after_stop_but_not_after_close(node1: Node, node2: Node) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    node1.stop()
    node1.topic_send("ORDERS", "goodbye")
    assert next_message(node2).body == "goodbye"
    node1.close()
    node1.close()
    with pytest.raises(NodeClosed):
        node1.topic_send("ORDERS", "x")
    assert node2.topic_status("ORDERS").notifiers == ()


def test_a_node_that_was_never_opened_says_so() -> None:
    with pytest.raises(NodeClosed, match="not open yet"):
        Node("NODE1").topic_send("ORDERS", "x")


def test_a_server_that_is_not_there_is_an_error_of_ours() -> None:
    with pytest.raises(ServerUnreachable, match="cannot connect"):
        Node("NODE1", "host=127.0.0.1 port=1").open()


def test_a_database_without_our_schema_says_what_to_do(server: TestedServer) -> None:
    dsn = make_conninfo(server.superuser_url, dbname="postgres")
    with pytest.raises(NotInstalled, match="run the migrations"):
        Node("NODE1", dsn).open()


def test_forged_and_malformed_notifications_do_not_harm_a_node(
    owner: psycopg.Connection, node1: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for forged in ("", "not json", '{"Type":7}', '{"Type":"Sys","Evt":"reconnected"}', "x" * 7999):
        for number in range(20):
            owner.execute("SELECT pg_notify(%s, %s)", (node1.channel, f"{forged} {number}"[:7999]))
    node1.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    node1.topic_send("ORDERS", "real")
    assert next_message(node1).body == "real"
    assert node1.counters.malformed == 100
    assert len(caplog.records) == 1


def test_a_node_can_do_without_waiting_for_the_disk_or_not(
    server: TestedServer, conversation: None
) -> None:
    for is_on in (False, True):
        options = Options(synchronous_commit=is_on)
        with Node("NODE1", server.url("user1"), options=options) as node:
            shown = node._link.run(Call("SHOW synchronous_commit", (), str))
            assert shown == ("on" if is_on else "off")


def test_sync_and_async_offer_the_same() -> None:
    def offered(node_class: type) -> dict[str, list[tuple[str, object]]]:
        signatures = {}
        for name, member in inspect.getmembers(node_class):
            if name.startswith("_") and name != "__init__":
                continue
            if callable(member):
                parameters = inspect.signature(member).parameters.values()
                signatures[name] = [(p.name, p.kind, p.default) for p in parameters]
            else:
                signatures[name] = []
        return signatures

    assert offered(Node) == offered(AsyncNode)
