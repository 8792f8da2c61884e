"""Wakes: who is told that there is something to read, and who is not."""

import pytest

from tests.sql.conftest import World
from tests.streams.conftest import Stream, register

WAKE = {"Type": "Sys", "Evt": "published", "Topic": "T"}


def test_a_commit_wakes_once_and_a_rollback_never(stream: Stream):
    stream.got()
    waiting = register(stream.subscriber, "SUB")
    with stream.publisher.connection.transaction():
        stream.publish(*"abc")
        stream.publisher.ok("publish_many", "PUB", "T", ["x"] * 100)
        before = waiting.headers()
    assert (before, waiting.headers()) == ([], [WAKE])
    with stream.publisher.connection.transaction(force_rollback=True):
        stream.publish("x")
    stream.publish("x", topic="NEW.1")
    assert waiting.headers() == []


def test_every_way_to_publish_wakes(stream: Stream):
    stream.publish("x", topic="NEW.1")
    stream.got(topic="NEW.1")
    stream.got()
    waiting, sender = register(stream.subscriber, "SUB"), stream.publisher
    stream.publish("x", topic="NEW.1")
    assert waiting.headers() == [{**WAKE, "Topic": "NEW.1"}]
    sender.ok("init", "PUB")
    sender.ok("topic_notify", "T")
    for has_listener in (False, True):
        if has_listener:
            stream.world.node("user2", "SUB2").ok("topic_listen", "T")
        waiting.payloads()
        for function, *arguments in (
            ("publish", "PUB", "T", "x"), ("publish_many", "PUB", "T", ["x"]),
            ("topic_send", "T", "x"), ("topic_send_as", "PUB", "T", "x"),
        ):  # fmt: skip
            sender.ok(function, *arguments)
            assert waiting.headers() == [WAKE], (function, has_listener)


def test_nodes_of_one_connection_are_woken_together(stream: Stream, world: World):
    world.rules("user2 BYSTANDER Topic T R 10")
    gateway = world.node("user2", "SUB", "SUB2")
    stream.got("SUB")
    stream.got("SUB2")
    bystander = register(world.program("user2"), "BYSTANDER")
    gateway.payloads()
    stream.publish("x")
    assert (gateway.headers(), bystander.headers()) == ([WAKE], [])


@pytest.mark.parametrize(
    ("loss", "gain"), [
        ("UPDATE messages.auth SET mode = 'W'", "UPDATE messages.auth SET mode = 'R'"),
        ("UPDATE messages.auth SET dest = 'ELSE'", "UPDATE messages.auth SET dest = 'T*'"),
        ("UPDATE messages.auth SET role = 'user2'", "UPDATE messages.auth SET role = 'user3'"),
        ("REVOKE team FROM user3", "GRANT team TO user3"),
    ],
)  # fmt: skip
def test_a_lost_right_ends_the_wakes(stream: Stream, world: World, loss: str, gain: str):
    world.rules("team NODE Topic T R 5", "user3 NODE Topic OTHER R 5")
    of_rule = " WHERE ident = 'NODE' AND dest <> 'OTHER'" if "messages.auth" in loss else ""
    if of_rule:
        world.execute("UPDATE messages.auth SET role = 'user3' WHERE ident = 'NODE'")
    superuser, node = world.superuser(), world.program("user3")
    node.got("NODE", "T")
    register(node, "NODE")
    woken = []
    for statement in loss, gain:
        superuser.execute(statement + of_rule)
        world.owner.ok("evaluate")
        node.payloads()
        stream.publish("x")
        woken.append(node.headers())
    assert woken == [[], [WAKE]]


def test_a_node_registered_too_early_is_woken_after_a_reading(stream: Stream):
    reader = stream.world.program("user2")
    reader.execute("BEGIN")
    reader.got("SUB", "T")
    node = register(stream.subscriber, "SUB")
    reader.execute("COMMIT")
    stream.publish("x")
    assert node.headers() == []
    reader.got("SUB", "T")
    stream.publish("x")
    assert node.headers() == [WAKE]


def test_a_topic_with_any_name_wakes_with_that_name(stream: Stream, world: World):
    for name in ("q'\"\\$1", "\x01" * 100, "🐘" * 100, "a\nb", "null"):
        world.rule("user1", "PUB", "Topic", name, "W", 5)
        world.rule("user2", "SUB", "Topic", name, "R", 5)
        stream.got(topic=name)
        register(stream.subscriber, "SUB")
        stream.publish("x", topic=name)
        assert stream.subscriber.headers() == [{**WAKE, "Topic": name}]
        assert stream.got(topic=name) == ["x"]
