"""topic_send to a topic with subscriptions or retention: stored too, in the same call."""

from collections.abc import Callable

import pytest

from tests.sql.conftest import Program
from tests.streams.conftest import Stream

Send = Callable[[Program, str], dict[str, object]]
SENDS: dict[str, Send] = {
    "topic_send": lambda program, text: program.call("topic_send", "T", text),
    "topic_send with a token": lambda program, text: program.call("topic_send", "T", text, "TOKEN"),
    "topic_send_many": lambda program, text: program.call("topic_send_many", "T", [text]),
    "topic_send_as": lambda program, text: program.call("topic_send_as", "PUB", "T", text),
}


@pytest.fixture
def sender(stream: Stream) -> Program:
    """The publisher as a node that sends to T."""
    stream.publisher.ok("init", "PUB")
    stream.publisher.ok("topic_notify", "T")
    return stream.publisher


def answers(sender: Program) -> dict[object, int]:
    """Send in each of the ways: how often each error was answered."""
    errors = [send(sender, name)["Err"] for name, send in SENDS.items()]
    return {error: errors.count(error) for error in errors}


@pytest.mark.versions
def test_a_subscription_or_retention_stores_what_is_sent(stream: Stream, sender: Program) -> None:
    assert (answers(sender), stream.stored()) == ({"10": 4}, [])
    stream.got(timeout=10)
    assert answers(sender) == {"0": 4}
    rows = stream.subscriber.read("SUB", "T", 10)
    assert [(row.sender, row.payload, row.enc) for row in rows] == [
        ("PUB", name, None) for name in SENDS
    ]
    # Its subscription has died: at first nobody knows, then nothing is stored again.
    stream.prune()
    stream.age(10)
    assert answers(sender) == {"10": 4}
    stream.tend()
    assert (answers(sender), stream.stored()) == ({"10": 4}, [])
    stream.retain(60)
    assert (answers(sender), stream.stored()) == ({"0": 4}, list(SENDS))


def test_bodies_are_stored_whole_with_their_encoding(stream: Stream, sender: Program) -> None:
    stream.got()
    for send in SENDS.values():
        send(sender, "x" * 100_000)
    assert stream.got() == ["x" * 100_000] * 4
    bodies = [str(n) for n in range(100)]
    sender.ok("topic_send_many", "T", bodies, None, "json")
    rows = stream.subscriber.read("SUB", "T")
    assert [(row.payload, row.enc) for row in rows] == [(body, "json") for body in bodies]


def test_what_is_rolled_back_or_refused_is_not_stored(stream: Stream, sender: Program) -> None:
    stream.got()
    with sender.connection.transaction(force_rollback=True):
        assert answers(sender) == {"0": 4}
    stream.execute("DELETE FROM messages.auth WHERE ident = 'PUB' AND dest = 'T'")
    assert set(answers(sender)) <= {"2", "50"}
    assert (stream.got(), stream.stored()) == ([], [])


def test_sends_and_publishes_come_in_their_order(stream: Stream, sender: Program) -> None:
    listener = stream.world.node("user2", "SUB2", listen="T")
    stream.got()
    listener.payloads()
    for name, send in SENDS.items():
        send(sender, f"{name} sent")
        sender.ok("publish", "PUB", "T", f"{name} published")
    expected = [f"{name} {how}" for name in SENDS for how in ("sent", "published")]
    assert (stream.got(), listener.bodies()) == (expected, expected)
