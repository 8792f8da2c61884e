"""topic_send to a topic with subscriptions or retention: stored too, in the same call."""

from collections.abc import Callable

import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import Stream

Send = Callable[[Program, str], dict[str, object]]
SENDS: dict[str, Send] = {
    "topic_send": lambda program, text: program.call("topic_send", "T", text),
    "topic_send with a token": lambda program, text: program.call("topic_send", "T", text, "TOKEN"),
    "topic_send_many": lambda program, text: program.call("topic_send_many", "T", [text]),
    "topic_send_as": lambda program, text: program.call("topic_send_as", "PUB", "T", text),
}
ways = pytest.mark.parametrize("send", SENDS.values(), ids=list(SENDS))


@pytest.fixture
def sender(stream: Stream) -> Program:
    """The publisher as a node that sends to T."""
    stream.publisher.ok("init", "PUB")
    stream.publisher.ok("topic_notify", "T")
    return stream.publisher


@ways
def test_what_is_sent_to_a_topic_with_a_subscription_is_stored(
    stream: Stream, sender: Program, send: Send
) -> None:
    stream.got()
    assert send(sender, "x")["Err"] == "0"
    [row] = stream.subscriber.read("SUB", "T")
    assert (row.sender, row.payload, row.enc) == ("PUB", "x", None)


@ways
def test_what_is_sent_to_a_topic_with_retention_is_stored(
    stream: Stream, sender: Program, send: Send, world: World
) -> None:
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 60")
    assert send(sender, "x")["Err"] == "0"
    assert stream.stored() == ["x"]


@ways
def test_without_subscription_and_retention_it_is_not_stored_and_needs_a_listener(
    stream: Stream, sender: Program, send: Send
) -> None:
    assert send(sender, "x")["Err"] == "10"
    assert stream.stored() == []


@ways
def test_error_10_comes_again_where_the_last_subscription_has_died(
    stream: Stream, sender: Program, send: Send
) -> None:
    stream.got(timeout=10)
    stream.age(10)
    refused = send(sender, "x")["Err"]
    stream.tend()
    assert (refused, send(sender, "x")["Err"], stream.stored()) == ("10", "10", [])


@ways
def test_live_listeners_get_it_once_as_ever(
    stream: Stream, sender: Program, send: Send, world: World
) -> None:
    listener = world.node("user2", "SUB")
    listener.ok("topic_listen", "T")
    stream.got("SUB2")
    listener.payloads()
    send(sender, "x")
    assert [header["Body"] for header in listener.headers()] == ["x"]
    assert stream.got("SUB2") == ["x"]


@ways
def test_a_large_body_is_stored_whole(stream: Stream, sender: Program, send: Send) -> None:
    stream.got()
    send(sender, "x" * 100_000)
    assert stream.got() == ["x" * 100_000]


def test_many_are_stored_in_order_with_their_encoding(stream: Stream, sender: Program) -> None:
    stream.got()
    bodies = [str(n) for n in range(100)]
    sender.ok("topic_send_many", "T", bodies, None, "json")
    rows = stream.subscriber.read("SUB", "T")
    assert [(row.payload, row.enc) for row in rows] == [(body, "json") for body in bodies]


@ways
def test_a_rollback_stores_nothing(stream: Stream, sender: Program, send: Send) -> None:
    stream.got()
    with sender.connection.transaction(force_rollback=True):
        send(sender, "x")
    assert stream.got() == []


@ways
def test_a_refused_send_stores_nothing(
    stream: Stream, sender: Program, send: Send, world: World
) -> None:
    stream.got()
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'PUB' AND dest = 'T'")
    assert send(sender, "x")["Err"] in {"2", "50"}
    assert stream.stored() == []


def test_sends_and_publishes_come_in_the_order_of_their_calls(
    stream: Stream, sender: Program
) -> None:
    stream.got()
    for number, send in enumerate(SENDS.values()):
        send(sender, f"{number} sent")
        sender.ok("publish", "PUB", "T", f"{number} published")
    expected = [f"{n} {how}" for n in range(len(SENDS)) for how in ("sent", "published")]
    assert stream.got() == expected
