"""Publishing: what is stored, what is answered, who is told, and what a rollback leaves."""

import json
import threading
from datetime import UTC, datetime

import psycopg
import pytest

from tests.sql.conftest import PATIENCE_SECONDS, World
from tests.sql.simultaneous import in_background, wait_until_blocked
from tests.streams.conftest import Stream


def test_publish_answers_id_listeners_and_subscribers(stream: Stream, world: World) -> None:
    stream.got()
    stream.got("SUB2")
    world.node("user2", "SUB").ok("topic_listen", "T")
    answer = stream.publisher.ok("publish", "PUB", "T", "x")
    assert answer == {"Err": "0", "Id": answer["Id"], "Listeners": 1, "Subscribers": 2}
    assert isinstance(answer["Id"], int)


def test_a_subscription_that_died_is_no_subscriber(stream: Stream) -> None:
    stream.got(timeout=5)
    stream.age(5)
    stream.tend()
    assert stream.publisher.ok("publish", "PUB", "T", "x")["Subscribers"] == 0


def test_each_message_has_a_higher_id_than_the_one_before(stream: Stream) -> None:
    ids = [stream.publish("x") for _ in range(5)]
    assert ids == sorted(set(ids))


def test_a_row_holds_id_topic_sender_payload_time_and_encoding(stream: Stream) -> None:
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


@pytest.mark.parametrize(
    "payload", ["", "x" * 10_000, "x" * 3_000_000, "🐘\n\x01'\"\\ %s", "漢" * 5_000]
)
def test_a_payload_of_any_text_and_size_arrives_as_it_was(stream: Stream, payload: str) -> None:
    stream.got()
    stream.publish(payload)
    assert stream.got() == [payload]


def test_null_is_published_as_the_empty_text(stream: Stream) -> None:
    stream.got()
    stream.publisher.ok("publish", "PUB", "T", None)
    stream.publisher.ok("publish_many", "PUB", "T", ["a", None])
    assert stream.got() == ["", "a", ""]


def test_nul_never_gets_to_the_server(stream: Stream) -> None:
    with pytest.raises(psycopg.DataError, match="NUL"):
        stream.publisher.call("publish", "PUB", "T", "a\x00b")


def test_publish_many_stores_all_in_order_and_answers_the_last_id(stream: Stream) -> None:
    stream.got()
    answer = stream.publisher.ok("publish_many", "PUB", "T", [str(n) for n in range(500)])
    rows = stream.subscriber.read("SUB", "T")
    assert [row.payload for row in rows] == [str(n) for n in range(500)]
    assert rows[-1].id == answer["Id"]


@pytest.mark.parametrize("nothing", ["NULL", "ARRAY[]::text[]", "ARRAY[ARRAY[]]::text[]"])
def test_publish_many_of_nothing_stores_nothing(stream: Stream, nothing: str) -> None:
    answer = stream.publisher.query(f"SELECT messages.publish_many('PUB', 'T', {nothing})")
    assert (answer["Id"], stream.stored()) == (None, [])


@pytest.mark.parametrize(
    ("array", "payloads"),
    [
        ("'[5:6]={a,b}'", ["a", "b"]),
        ("'[3:3]={a}'", ["a"]),
        ("'{{a,b},{c,d}}'", ["a", "b", "c", "d"]),
        ("'{{a}}'", ["a"]),
    ],
)
def test_publish_many_takes_arrays_of_any_shape(
    stream: Stream, world: World, array: str, payloads: list[str]
) -> None:
    stream.got()
    listener = world.node("user2", "SUB")
    listener.ok("topic_listen", "T")
    listener.payloads()
    stream.publisher.query(f"SELECT messages.publish_many('PUB', 'T', {array})")
    assert stream.got() == payloads
    live = [header["Body"] for header in listener.headers() if header["Type"] == "Topic"]
    assert live == payloads


def test_one_payload_of_many_that_is_too_large_and_nothing_is_stored(
    stream: Stream, world: World
) -> None:
    world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = 8192")
    try:
        fault = stream.publisher.error("publish_many", "PUB", "T", ["small", "x" * 8193])
    finally:
        world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")
    assert (fault[0], stream.stored()) == (51, [])


def test_a_payload_over_the_maximum_is_refused_where_nobody_listens(
    stream: Stream, world: World
) -> None:
    stream.got()
    world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = 8192")
    try:
        fault = stream.publisher.error("publish", "PUB", "T", "x" * 8193)
        stream.publish("x" * 8192)
    finally:
        world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")
    assert (fault[0], [len(payload) for payload in stream.stored()]) == (51, [8192])


@pytest.mark.parametrize("rule", ["ELSE Topic T", "PUB Topic ELSE", "PUB Queue T", "PUB Rpc T"])
def test_a_rule_for_something_else_publishes_nothing(
    stream: Stream, world: World, rule: str
) -> None:
    stream.got()
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'PUB'")
    world.rules(f"user1 {rule} W 5", "user1 PUB Topic KNOWN R 5")
    assert stream.publisher.error("publish", "PUB", "T", "forged")[0] == 2
    assert stream.stored() == []


def test_publish_reaches_live_listeners_and_observers_too(stream: Stream, world: World) -> None:
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


def test_publish_needs_neither_session_nor_registration(stream: Stream) -> None:
    stream.got()
    stream.publish("x")
    clients = stream.world.owner.query("SELECT count(*) FROM psqlmessages_client")
    assert (stream.got(), clients) == (["x"], 0)


@pytest.mark.parametrize(("call", "what"), [("publish", "x"), ("publish_many", ["x"])])
def test_publish_needs_the_mode_w(stream: Stream, call: str, what: object) -> None:
    assert stream.subscriber.error(call, "SUB", "T", what)[0] == 3
    assert stream.stored() == []


@pytest.mark.parametrize(("call", "what"), [("publish", "x"), ("publish_many", ["x"])])
def test_an_encoding_that_there_is_not_is_refused(stream: Stream, call: str, what: object) -> None:
    assert stream.publisher.error(call, "PUB", "T", what, "xml")[0] == 55
    assert stream.stored() == []


def test_publish_makes_the_topic_where_a_pattern_allows_it(stream: Stream) -> None:
    assert stream.publisher.error("publish", "PUB", "OTHER.1", "x")[0] == 9
    stream.publish("first", topic="NEW.1")
    assert stream.got(topic="NEW.1") == []
    stream.publish("second", topic="NEW.1")
    assert stream.got(topic="NEW.1") == ["second"]


def test_a_pattern_is_no_name_even_where_a_rule_holds_it(stream: Stream, world: World) -> None:
    world.rules("user1 P* Topic X* RW 5", "user1 P* Topic Y RW 5", "user1 PUB Topic X* RW 5")
    assert stream.publisher.error("publish", "P*", "Y", "x")[0] == 16
    assert stream.publisher.error("publish", "PUB", "X*", "x")[0] == 9
    assert stream.publisher.error("subscribe", "P*", "Y", 60)[0] == 16
    assert stream.publisher.error("subscribe", "PUB", "X*", 60)[0] == 9
    world.owner.connection.execute("INSERT INTO psqlmessages_topic (name) VALUES ('X*')")
    assert stream.publisher.error("publish", "PUB", "X*", "x")[0] == 9
    assert stream.publisher.error("subscribe", "PUB", "X*", 60)[0] == 9


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("publish", ("PUB", "NEW.1", "x")),
        ("publish_many", ("PUB", "NEW.1", ["x"])),
        ("publish_staged", ("PUB", "NEW.1", "query", 0, [], 0)),
    ],
)
def test_a_topic_whose_rule_goes_away_meanwhile_is_not_made(
    stream: Stream, world: World, function: str, arguments: tuple[object, ...]
) -> None:
    world.owner.connection.execute("BEGIN")
    world.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'NEW.*'")
    with in_background(lambda: stream.publisher.error(function, *arguments)) as refusal:
        wait_until_blocked(world, stream.publisher)
        world.owner.connection.execute("COMMIT")
    assert refusal.result()[0] == 2
    assert world.owner.query("SELECT count(*) FROM psqlmessages_topic WHERE name = 'NEW.1'") == 0


def test_a_rollback_leaves_neither_message_nor_topic(stream: Stream) -> None:
    stream.got()
    with stream.publisher.connection.transaction(force_rollback=True):
        stream.publish("gone")
        stream.publish("gone", topic="NEW.1")
    stream.publish("stays")
    topics = stream.world.owner.query("SELECT array_agg(name::text) FROM psqlmessages_topic")
    assert (stream.got(), topics) == (["stays"], ["T"])


def test_a_rollback_to_a_savepoint_takes_what_came_after_it_only(stream: Stream) -> None:
    stream.got()
    connection = stream.publisher.connection
    with connection.transaction():
        with connection.transaction(force_rollback=True):
            stream.publish("one")
        stream.publish("two")
        with connection.transaction(force_rollback=True):
            stream.publish("three")
        stream.publish("four")
    assert stream.got() == ["two", "four"]


def test_nothing_is_seen_before_the_commit(stream: Stream) -> None:
    stream.got()
    with stream.publisher.connection.transaction():
        stream.publish("x")
        assert stream.got() == []
    assert stream.got() == ["x"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE", "READ UNCOMMITTED"])
def test_publish_works_at_every_isolation(stream: Stream, isolation: str) -> None:
    stream.got()
    stream.publisher.connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    stream.publish("old")
    stream.publish("new", topic="NEW.1")
    stream.publisher.connection.execute("COMMIT")
    assert stream.got() == ["old"]


def test_publish_is_refused_in_a_read_only_transaction(stream: Stream) -> None:
    stream.publisher.connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        stream.publish("x")


def test_what_was_published_is_durable_whatever_the_session_set(stream: Stream) -> None:
    stream.publisher.connection.execute("SET synchronous_commit = off")
    with stream.publisher.connection.transaction():
        stream.publish("x")
        assert stream.publisher.query("SHOW synchronous_commit") == "on"
    assert stream.publisher.query("SHOW synchronous_commit") == "off"
    stream.publisher.connection.execute("SET synchronous_commit = local")
    with stream.publisher.connection.transaction():
        stream.publish("x")
        assert stream.publisher.query("SHOW synchronous_commit") == "local"


LOCKS = """
    SELECT count(*) FROM pg_locks
    WHERE locktype = 'advisory' AND pid = %s AND classid BETWEEN 1347223552 AND 1347289087
"""


def test_ten_thousand_publishes_of_a_transaction_hold_two_locks(stream: Stream) -> None:
    stream.got(timeout=1000)
    with stream.publisher.connection.transaction():
        stream.publisher.query(
            "SELECT count(messages.publish('PUB', 'T', n::text))"
            " FROM generate_series(1, 10000) AS n"
        )
        locks = stream.world.watcher.query(LOCKS, stream.publisher.pid)
    # The first needs no mark, so the second finds none.
    assert locks == 2
    assert stream.got(max_rows=20_000) == [str(n) for n in range(1, 10_001)]


def test_the_lock_goes_with_the_savepoint_and_comes_again(stream: Stream) -> None:
    connection, locks = stream.publisher.connection, []

    def note() -> None:
        locks.append(stream.world.watcher.query(LOCKS, stream.publisher.pid))

    with connection.transaction():
        with connection.transaction(force_rollback=True):
            stream.publish("one")
            note()
        note()
        stream.publish("two")
        note()
        with connection.transaction(force_rollback=True):
            stream.publish("three")
            stream.publish("other", topic="NEW.1")
            note()
        note()
    note()
    assert locks == [1, 0, 1, 2, 1, 0]


def test_publishers_of_one_topic_do_not_wait_for_each_other(stream: Stream, world: World) -> None:
    stream.got()
    others = [world.program("user1") for _ in range(4)]
    for number, other in enumerate(others):
        other.connection.execute("SET statement_timeout = '30s'")
        other.connection.execute("BEGIN")
        other.ok("publish", "PUB", "T", str(number))
        other.ok("publish", "PUB", "NEW.1" if number == 0 else "T", "more")
    for other in reversed(others):
        other.connection.execute("COMMIT")
    assert [payload for payload in stream.got() if payload != "more"] == ["0", "1", "2", "3"]


def test_publishers_that_make_one_topic_at_once_share_it(stream: Stream, world: World) -> None:
    programs = [world.program("user1") for _ in range(6)]
    for turn in range(10):
        topic, start = f"NEW.{turn}", threading.Barrier(len(programs))

        def publish(program: object, topic: str = topic, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE_SECONDS)
            program.ok("publish", "PUB", topic, "x")  # type: ignore[attr-defined]

        threads = [threading.Thread(target=publish, args=(program,)) for program in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        stored = world.owner.query(
            "SELECT count(*) FROM psqlmessages_streammessage AS m"
            " JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = %s",
            topic,
        )
        assert stored == len(programs)
