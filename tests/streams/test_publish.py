"""Publishing and sending to streams: what is stored, answered, told, and what a rollback leaves."""

import json
from collections.abc import Callable
from datetime import UTC, datetime

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import Stream


def test_publish_answers_id_listeners_and_subscribers(stream: Stream):
    stream.got(timeout=5)
    stream.got("SUB2", timeout=1000)
    stream.world.node("user2", "SUB").ok("topic_listen", "T")
    answer = stream.publisher.ok("publish", "PUB", "T", "x")
    assert answer == {"Err": "0", "Id": answer["Id"], "Listeners": 1, "Subscribers": 2}
    stream.age(5)
    stream.tend()
    later = stream.publisher.ok("publish", "PUB", "T", "x")
    assert (later["Subscribers"], later["Id"] > answer["Id"]) == (1, True)


def test_a_row_holds_id_topic_sender_payload_time_and_encoding(stream: Stream):
    stream.got()
    before = datetime.now(UTC)
    first = stream.publish("text")
    stream.publisher.ok("publish", "PUB", "T", '{"a":1}', "json")
    stream.publisher.ok("publish_many", "PUB", "T", ["YQ==", "Yg=="], "b64")
    rows = stream.subscriber.read("SUB", "T")
    assert [(row.topic, row.sender, row.payload, row.enc) for row in rows] == [
        ("T", "PUB", "text", None), ("T", "PUB", '{"a":1}', "json"),
        ("T", "PUB", "YQ==", "b64"), ("T", "PUB", "Yg==", "b64"),
    ]  # fmt: skip
    assert [row.id for row in rows] == [first, first + 1, first + 2, first + 3]
    assert before <= rows[0].published_at <= rows[-1].published_at <= datetime.now(UTC)


def test_a_payload_of_any_text_and_size_arrives_as_it_was(stream: Stream):
    stream.got()
    for payload in ("", "x" * 10_000, "x" * 3_000_000, "🐘\n\x01'\"\\ %s", "漢" * 5_000):
        stream.publish(payload)
        assert stream.got() == [payload]
    stream.publisher.ok("publish", "PUB", "T", None)
    stream.publisher.ok("publish_many", "PUB", "T", ["a", None])
    assert stream.got() == ["", "a", ""]
    with pytest.raises(psycopg.DataError, match="NUL"):
        stream.publisher.call("publish", "PUB", "T", "a\x00b")


def test_publish_many_takes_arrays_of_any_shape(stream: Stream):
    stream.got()
    listener = stream.world.node("user2", "SUB")
    listener.ok("topic_listen", "T")
    listener.payloads()
    for array, payloads in {
        "'[5:6]={a,b}'": ["a", "b"], "'[3:3]={a}'": ["a"], "'{{a,b},{c,d}}'": ["a", "b", "c", "d"],
        "'{{a}}'": ["a"], "NULL": [], "ARRAY[]::text[]": [], "ARRAY[ARRAY[]]::text[]": [],
    }.items():  # fmt: skip
        answer = stream.publisher.query(f"SELECT messages.publish_many('PUB', 'T', {array})")
        live = [header["Body"] for header in listener.headers() if header["Type"] == "Topic"]
        assert (stream.got(), live, answer["Id"] is None) == (payloads, payloads, not payloads)


def test_a_rule_for_something_else_publishes_nothing(stream: Stream):
    stream.got()
    refused = {}
    for rule in ("ELSE Topic T W", "PUB Topic ELSE W", "PUB Queue T W", "PUB Rpc T W"):
        stream.execute("DELETE FROM messages.auth WHERE ident IN ('PUB', 'ELSE')")
        stream.world.rules(f"user1 {rule} 5", "user1 PUB Topic KNOWN R 5")
        refused[rule] = stream.publisher.error("publish", "PUB", "T", "forged")[0]
    assert set(refused.values()) == {2}
    stream.world.rules("user1 PUB Topic T R 5")
    for call, what in (("publish", "x"), ("publish_many", ["x"])):
        assert stream.publisher.error(call, "PUB", "T", what)[0] == 3
    assert stream.stored() == []


def test_publish_reaches_live_listeners_and_observers_too(stream: Stream):
    world = stream.world
    world.rules("user2 EYE Topic T O 5")
    listener, eye = world.node("user2", "SUB"), world.node("user2", "EYE")
    listener.ok("topic_listen", "T")
    eye.ok("topic_observe", "T")
    listener.payloads()
    eye.payloads()
    stream.publish("small")
    stream.publisher.ok("publish_many", "PUB", "T", ["{}", "x" * 9000], "json")
    for program in (listener, eye):
        small, one, large = program.headers()
        assert (small["From"], small["To"], small["Body"]) == ("PUB", "T", "small")
        assert (one["Enc"], one["Body"]) == ("json", "{}")
        assert (large["Enc"], large["Size"]) == ("json", 9000)
        assert program.data(json.dumps(large))[1] == "x" * 9000


def test_publish_makes_the_topic_where_a_pattern_allows_it(stream: Stream):
    assert stream.publisher.error("publish", "PUB", "OTHER.1", "x")[0] == 9
    stream.publish("first", topic="NEW.1")
    assert stream.got(topic="NEW.1") == []
    stream.publish("second", topic="NEW.1")
    assert stream.got(topic="NEW.1") == ["second"]
    # Neither that nor reading has made a session.
    assert stream.query("SELECT count(*) FROM psqlmessages_client") == 0


def test_a_pattern_is_no_name_even_where_a_rule_holds_it(stream: Stream):
    stream.world.rules("user1 P* Topic X* RW 5", "user1 P* Topic Y RW 5", "user1 PUB Topic X* RW 5")
    for _ in range(2):
        for function, last in (("publish", "x"), ("subscribe", 60)):
            assert stream.publisher.error(function, "P*", "Y", last)[0] == 16
            assert stream.publisher.error(function, "PUB", "X*", last)[0] == 9
        stream.execute("INSERT INTO psqlmessages_topic (name) VALUES ('X*') ON CONFLICT DO NOTHING")


def test_a_rollback_leaves_neither_message_nor_topic(stream: Stream):
    stream.got()
    connection = stream.publisher.connection
    with connection.transaction(force_rollback=True):
        stream.publish("gone")
        stream.publish("gone", topic="NEW.1")
    with connection.transaction():
        with connection.transaction(force_rollback=True):
            stream.publish("one")
        stream.publish("two")
        with connection.transaction(force_rollback=True):
            stream.publish("three")
        stream.publish("four")
        assert stream.got() == []
    assert (stream.got(), stream.topics()) == (["two", "four"], ["T"])


def test_publish_works_at_every_isolation_but_not_read_only(stream: Stream):
    stream.got()
    connection = stream.publisher.connection
    for isolation in ("REPEATABLE READ", "SERIALIZABLE", "READ UNCOMMITTED"):
        connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        stream.publish("old")
        stream.publish("new", topic=f"NEW.{isolation}")
        connection.execute("COMMIT")
        assert stream.got() == ["old"], isolation
    connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        stream.publish("x")


def test_published_messages_are_durable_despite_session_settings(stream: Stream):
    for of_session, of_commit in {"off": "on", "local": "local"}.items():
        stream.publisher.execute(f"SET synchronous_commit = {of_session}")
        with stream.publisher.connection.transaction():
            stream.publish("x")
            assert stream.publisher.query("SHOW synchronous_commit") == of_commit
        assert stream.publisher.query("SHOW synchronous_commit") == of_session


def test_many_publishes_of_a_transaction_hold_two_locks(stream: Stream):
    stream.got(timeout=1000)
    with stream.publisher.connection.transaction():
        stream.publisher.query(
            "SELECT count(messages.publish('PUB', 'T', n::text)) FROM generate_series(1, 1000) AS n"
        )
        locks = stream.world.watcher.query(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
            " AND classid BETWEEN 1347223552 AND 1347289087",
            stream.publisher.pid,
        )
    # The first needs no mark, so the second finds none.
    assert locks == 2
    assert stream.got() == [str(n) for n in range(1, 1001)]


def test_publishers_of_one_topic_do_not_wait_for_each_other(stream: Stream, world: World):
    stream.got()
    others = [world.program("user1") for _ in range(4)]
    for number, other in enumerate(others):
        other.execute("SET statement_timeout = '30s'")
        other.execute("BEGIN")
        other.ok("publish", "PUB", "T", str(number))
        other.ok("publish", "PUB", "NEW.1" if number == 0 else "T", "more")
    for other in reversed(others):
        other.execute("COMMIT")
    assert [payload for payload in stream.got() if payload != "more"] == ["0", "1", "2", "3"]


Send = Callable[[Program, str], dict[str, object]]
SENDS: dict[str, Send] = {
    "topic_send": lambda program, text: program.call("topic_send", "T", text),
    "topic_send with a token": lambda program, text: program.call("topic_send", "T", text, "TOKEN"),
    "topic_send_many": lambda program, text: program.call("topic_send_many", "T", [text]),
    "topic_send_as": lambda program, text: program.call("topic_send_as", "PUB", "T", text),
}


@pytest.fixture
def sender(stream: Stream) -> Program:
    stream.publisher.ok("init", "PUB")
    stream.publisher.ok("topic_notify", "T")
    return stream.publisher


def answers(sender: Program) -> dict[object, int]:
    errors = [send(sender, name)["Err"] for name, send in SENDS.items()]
    return {error: errors.count(error) for error in errors}


@pytest.mark.versions
def test_a_subscription_or_retention_stores_messages(stream: Stream, sender: Program):
    assert (answers(sender), stream.stored()) == ({"10": 4}, [])
    stream.got(timeout=10)
    assert answers(sender) == {"0": 4}
    rows = stream.subscriber.read("SUB", "T", 10)
    published = [("PUB", name, None) for name in SENDS]
    assert [(row.sender, row.payload, row.enc) for row in rows] == published
    # Its subscription has died: at first nobody knows, then nothing is stored again.
    stream.prune()
    stream.age(10)
    assert answers(sender) == {"10": 4}
    stream.tend()
    assert (answers(sender), stream.stored()) == ({"10": 4}, [])
    stream.retain(60)
    assert (answers(sender), stream.stored()) == ({"0": 4}, list(SENDS))


def test_bodies_are_stored_whole_with_their_encoding(stream: Stream, sender: Program):
    stream.got()
    for send in SENDS.values():
        send(sender, "x" * 100_000)
    assert stream.got() == ["x" * 100_000] * 4
    bodies = [str(n) for n in range(100)]
    sender.ok("topic_send_many", "T", bodies, None, "json")
    rows = stream.subscriber.read("SUB", "T")
    assert [(row.payload, row.enc) for row in rows] == [(body, "json") for body in bodies]


def test_sends_and_publishes_come_in_their_order(stream: Stream, sender: Program):
    listener = stream.world.node("user2", "SUB2", listen="T")
    stream.got()
    listener.payloads()
    for name, send in SENDS.items():
        send(sender, f"{name} sent")
        sender.ok("publish", "PUB", "T", f"{name} published")
    expected = [f"{name} {how}" for name in SENDS for how in ("sent", "published")]
    assert (stream.got(), listener.bodies()) == (expected, expected)
