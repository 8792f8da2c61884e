"""Wakes: who is told that there is something to read, and who is not."""

import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import Stream, register

WAKE = {"Type": "Sys", "Evt": "published", "Topic": "T"}


@pytest.fixture
def waiting(stream: Stream) -> Program:
    """SUB, subscribed and connected."""
    stream.got()
    return register(stream.subscriber, "SUB")


def test_a_connected_subscriber_is_woken_at_the_commit(stream: Stream, waiting: Program) -> None:
    with stream.publisher.connection.transaction():
        stream.publish("x")
        before = waiting.headers()
    assert (before, waiting.headers()) == ([], [WAKE])


def test_the_order_of_connecting_and_subscribing_does_not_matter(stream: Stream) -> None:
    register(stream.subscriber, "SUB")
    stream.got()
    stream.publish("x")
    assert stream.subscriber.headers() == [WAKE]


def test_plain_init_is_woken_too(stream: Stream, world: World) -> None:
    node = world.node("user2", "SUB")
    stream.got()
    node.payloads()
    stream.publish("x")
    assert node.headers() == [WAKE]


@pytest.mark.parametrize("way", ["publish_many", "with a listener", "of a topic that publish made"])
def test_every_way_to_publish_wakes(stream: Stream, world: World, way: str) -> None:
    topic = "NEW.1" if way.startswith("of") else "T"
    stream.publish("x", topic=topic)
    stream.got(topic=topic)
    register(stream.subscriber, "SUB")
    if way == "publish_many":
        stream.publisher.ok("publish_many", "PUB", topic, ["x"])
    elif way == "with a listener":
        world.node("user2", "SUB2").ok("topic_listen", topic)
        stream.subscriber.payloads()
        stream.publish("x", topic=topic)
    else:
        stream.publish("x", topic=topic)
    assert stream.subscriber.headers() == [{**WAKE, "Topic": topic}]


def test_many_messages_of_a_transaction_wake_once(stream: Stream, waiting: Program) -> None:
    with stream.publisher.connection.transaction():
        stream.publish(*"abc")
        stream.publisher.ok("publish_many", "PUB", "T", ["x"] * 100)
    assert waiting.headers() == [WAKE]


def test_a_rollback_wakes_nobody(stream: Stream, waiting: Program) -> None:
    with stream.publisher.connection.transaction(force_rollback=True):
        stream.publish("x")
    assert waiting.headers() == []


@pytest.mark.parametrize("how", ["topic_send", "topic_send_as"])
def test_what_is_sent_and_stored_wakes_too(stream: Stream, waiting: Program, how: str) -> None:
    sender = stream.publisher
    sender.ok("init", "PUB")
    sender.ok("topic_notify", "T")
    waiting.payloads()
    sender.ok(how, *(["T", "x"] if how == "topic_send" else ["PUB", "T", "x"]))
    assert waiting.headers() == [WAKE]


def test_a_connected_node_without_subscription_is_not_woken(
    stream: Stream, waiting: Program, world: World
) -> None:
    bystander = register(world.program("user2"), "SUB2")
    waiting.payloads()
    stream.publish("x")
    assert (bystander.headers(), waiting.headers()) == ([], [WAKE])


def test_a_message_of_another_topic_wakes_nobody(stream: Stream, waiting: Program) -> None:
    stream.publish("x", topic="NEW.1")
    assert waiting.headers() == []


def test_two_nodes_of_one_connection_are_woken_by_one_notification(
    stream: Stream, world: World
) -> None:
    gateway = world.gateway("user2", "SUB", "SUB2")
    stream.got("SUB")
    stream.got("SUB2")
    gateway.payloads()
    stream.publish("x")
    assert gateway.headers() == [WAKE]


@pytest.mark.parametrize("change", ["mode = 'W'", "dest = 'ELSEWHERE'", "role = 'user3'"])
def test_who_lost_the_right_is_woken_no_more_and_again_when_it_is_back(
    stream: Stream, world: World, change: str
) -> None:
    world.rules("user2 SUB Topic OTHER R 5")
    stream.got()
    node = register(stream.subscriber, "SUB")
    world.owner.connection.execute(
        f"UPDATE messages.auth SET {change} WHERE ident = 'SUB' AND dest = 'T'"
    )
    node.payloads()
    stream.publish("x")
    without = node.headers()
    world.rules("user2 SUB Topic T* R 5")
    node.payloads()
    stream.publish("y")
    assert (without, node.headers()) == ([], [WAKE])


def test_who_loses_a_group_role_is_woken_no_more(stream: Stream, world: World) -> None:
    world.rules("team TEAM Topic T R 10", "user3 TEAM Topic OTHER R 10")
    superuser = world.superuser()
    node = world.program("user3")
    node.got("TEAM", "T")
    register(node, "TEAM")
    superuser.connection.execute("REVOKE team FROM user3")
    try:
        world.owner.ok("evaluate")
        node.payloads()
        stream.publish("x")
        without = node.headers()
    finally:
        superuser.connection.execute("GRANT team TO user3")
    world.owner.ok("evaluate")
    node.payloads()
    stream.publish("y")
    assert (without, node.headers()) == ([], [WAKE])


def wakes(world: World) -> int:
    """How many channels are notified of topic T."""
    return int(
        world.owner.query("SELECT cardinality(wakes) FROM psqlmessages_topic WHERE name = 'T'")
    )


@pytest.mark.parametrize("end", ["deinit", "crash"])
def test_a_node_that_ended_is_not_notified(
    stream: Stream, waiting: Program, world: World, end: str
) -> None:
    before = wakes(world)
    waiting.ok(end, "SUB")
    assert (before, wakes(world)) == (1, 0)


def test_a_node_that_crashed_is_not_notified_once_that_is_found(
    stream: Stream, waiting: Program, world: World
) -> None:
    world.kill(waiting)
    world.owner.ok("evaluate")
    assert wakes(world) == 0
    stream.subscriber = register(world.program("user2"), "SUB")
    stream.publish("x")
    assert stream.subscriber.headers() == [WAKE]


@pytest.mark.parametrize("how", ["unsubscribe", "expiry"])
def test_a_subscription_that_ended_is_not_woken(stream: Stream, waiting: Program, how: str) -> None:
    if how == "unsubscribe":
        waiting.ok("unsubscribe", "SUB", "T")
    else:
        stream.age(60)
        stream.tend()
    waiting.payloads()
    stream.publish("x")
    assert waiting.headers() == []


def test_who_registered_while_the_subscription_was_uncommitted_is_woken_after_its_next_reading(
    stream: Stream, world: World
) -> None:
    reader = world.program("user2")
    reader.connection.execute("BEGIN")
    reader.got("SUB", "T")
    node = register(stream.subscriber, "SUB")
    reader.connection.execute("COMMIT")
    assert wakes(world) == 0
    reader.got("SUB", "T")
    stream.publish("x")
    assert node.headers() == [WAKE]


def test_a_topic_with_any_name_wakes_with_that_name(stream: Stream, world: World) -> None:
    for name in ("q'\"\\$1", "\x01" * 100, "🐘" * 100, "a\nb", "null"):
        world.rule("user1", "PUB", "Topic", name, "W", 5)
        world.rule("user2", "SUB", "Topic", name, "R", 5)
        stream.got(topic=name)
        register(stream.subscriber, "SUB")
        stream.publish("x", topic=name)
        assert stream.subscriber.headers() == [{**WAKE, "Topic": name}]
        assert stream.got(topic=name) == ["x"]
