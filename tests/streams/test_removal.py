"""Removal: what nobody needs goes by truncation, and what somebody needs stays."""

import os
from datetime import timedelta
from itertools import pairwise

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages.cli import main
from tests.sql.conftest import World
from tests.streams.conftest import Stream

SIZE = (
    "SELECT sum(pg_relation_size(messages._stream_table(slot))) FROM generate_series(0, 3) AS slot"
)
removals = pytest.mark.parametrize("removal", ["tend", "prune"])


def test_what_every_subscription_has_passed_goes(stream: Stream) -> None:
    stream.got("SUB")
    stream.got("SUB2")
    stream.publish("x")
    stream.got("SUB")
    stream.prune()
    kept = stream.stored()
    stream.got("SUB2")
    assert stream.prune() == 1
    assert (kept, stream.stored()) == (["x"], [])


def test_one_that_died_keeps_nothing_while_another_lives(stream: Stream) -> None:
    stream.got("SUB", timeout=10)
    stream.got("SUB2", timeout=1000)
    stream.publish("x")
    stream.got("SUB2", timeout=1000)
    stream.age(10, "SUB")
    stream.prune()
    assert stream.stored() == []


def test_removal_does_not_wait_for_a_reader_in_its_transaction(
    stream: Stream, world: World
) -> None:
    stream.got()
    stream.publish("x")
    stream.got()
    world.owner.connection.execute("SET statement_timeout = '30s'")
    with stream.subscriber.connection.transaction():
        stream.got()
        assert stream.prune() == 0
    assert stream.prune() == 1


def test_a_table_that_is_needed_after_all_is_not_emptied(stream: Stream, world: World) -> None:
    """As where a publisher commits between the look at its table and the lock on it."""
    stream.got()
    stream.publish("x")
    empty = "SELECT messages._empty_stream_table(s.slot) FROM messages._stream AS s"
    assert (world.owner.query(empty), stream.stored()) == (False, ["x"])
    stream.got()
    assert (world.owner.query(empty), stream.stored()) == (True, [])


def test_what_nobody_subscribes_to_goes(stream: Stream) -> None:
    stream.publish("x")
    stream.prune()
    assert stream.stored() == []


def test_a_message_waits_for_the_longest_timeout_and_no_longer(stream: Stream) -> None:
    stream.got("SUB", timeout=10)
    stream.got("SUB2", timeout=1000)
    stream.publish("x")
    stream.age(10)
    stream.prune()
    kept = stream.stored()
    stream.age(1000, "SUB2")
    stream.prune()
    assert (kept, stream.stored()) == (["x"], [])


@pytest.mark.parametrize("keeper", ["subscription", "retention"])
def test_an_hour_without_any_call_counts_for_nothing_ten_times(
    stream: Stream, world: World, keeper: str
) -> None:
    if keeper == "subscription":
        stream.got(timeout=60)
    stream.publish("x")
    if keeper == "retention":
        world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 60")
    hours = 0
    while stream.stored():
        hours += 1
        stream.age(3600)
        stream.age_messages(3600)
        world.owner.connection.execute(
            "UPDATE messages._stream SET tended_at = clock_timestamp() - interval '1 hour';"
            "UPDATE messages._clock_gap"
            " SET began_at = began_at - interval '1 hour', ended_at = ended_at - interval '1 hour'"
        )
        stream.prune()
    # So that what is kept for a reader that is gone is bounded.
    assert hours == 11


@removals
def test_what_is_needed_is_moved_and_comes_in_order(stream: Stream, removal: str) -> None:
    stream.got("SUB")
    stream.got("SUB2")
    stream.publish(*"abcdefghijkl")
    stream.got("SUB2")
    stream.got("SUB", max_rows=9)
    # The first times only the table that is filled changes.
    for _ in range(3):
        getattr(stream, removal)()
    stream.publish("m")
    assert stream.stored() == ["j", "k", "l", "m"]
    assert stream.got("SUB") == ["j", "k", "l", "m"]


def test_a_table_of_which_much_is_needed_stays_as_it_is(stream: Stream, world: World) -> None:
    stream.got()
    stream.publish(*"abcd")
    stream.got(max_rows=2)
    table = "SELECT array_agg(DISTINCT tableoid::regclass::text) FROM psqlmessages_streammessage"
    before = world.owner.query(table)
    assert [stream.prune() for _ in range(3)] == [0, 0, 0]
    assert (stream.stored(), world.owner.query(table)) == (list("abcd"), before)


def test_a_table_is_emptied_in_steps_where_much_is_to_be_moved(
    stream: Stream, world: World
) -> None:
    stream.got("SUB", timeout=1000)
    # Estimated by a sample of a hundred pages: a tenth is never taken for a quarter.
    stream.publisher.ok("publish_many", "PUB", "T", ["x" * 10] * 120_000)
    stream.got("SUB", timeout=1000, max_rows=108_000)
    emptied = [stream.tend() for _ in range(3)]
    assert emptied == [0, 1, 0]
    left = world.owner.query("SELECT count(*) FROM psqlmessages_streammessage")
    assert (left, len(stream.got("SUB", max_rows=90_000))) == (12_000, 12_000)


def test_long_payloads_are_moved_some_at_a_time_and_one_at_least(stream: Stream) -> None:
    stream.got("SUB", timeout=1000)
    # What is random is not compressed.
    payloads = [os.urandom(6_000_000).hex() for _ in range(3)]
    stream.publisher.ok("publish_many", "PUB", "T", [*["x" * 1000] * 100, *payloads])
    stream.got("SUB", timeout=1000, max_rows=100)
    emptied = [stream.tend() for _ in range(5)]
    assert emptied == [0, 0, 1, 0, 0]
    assert stream.got("SUB") == payloads


def test_retention_keeps_messages_whether_read_or_not(stream: Stream, world: World) -> None:
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 100 WHERE name = 'T'")
    stream.got()
    stream.publish("x")
    stream.got()
    stream.publish(*["of no retention"] * 3, topic="NEW.1")
    stream.prune()
    young = stream.stored()
    stream.age_messages(50)
    stream.prune()
    still = stream.stored()
    stream.age_messages(50)
    stream.prune()
    assert (young, still, stream.stored()) == (["x"], ["x"], [])


def test_retention_is_no_limit_where_a_subscription_waits(stream: Stream, world: World) -> None:
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 10 WHERE name = 'T'")
    stream.got(timeout=1000)
    stream.publish("x")
    stream.age_messages(500)
    stream.prune()
    assert stream.got() == ["x"]


def test_of_a_topic_with_retention_the_young_stay_and_the_old_go(
    stream: Stream, world: World
) -> None:
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 100 WHERE name = 'T'")
    stream.publish(*"abcdefghi")
    stream.age_messages(100)
    stream.publish("young")
    for _ in range(3):
        stream.prune()
    assert stream.stored() == ["young"]


@removals
def test_a_topic_that_publish_made_goes_with_its_last_message(
    stream: Stream, world: World, removal: str
) -> None:
    stream.publish("x", topic="NEW.1")
    for _ in range(3):
        getattr(stream, removal)()
    topics = world.owner.query("SELECT array_agg(name::text) FROM psqlmessages_topic")
    assert (topics, stream.publisher.error("publish", "PUB", "OTHER", "x")[0]) == (["T"], 9)
    assert world.owner.query("SELECT count(*) FROM messages._stream_last") == 0


@pytest.mark.parametrize(
    "keeper", ["subscription", "listener", "rule", "retention", "empty retention", "message"]
)
def test_a_topic_that_publish_made_stays_while_something_uses_it(
    stream: Stream, world: World, keeper: str
) -> None:
    world.rules("user2 NODE Topic NEW.* R 5")
    stream.publish("x", topic="NEW.1")
    if keeper == "subscription":
        stream.got(topic="NEW.1")
    elif keeper == "listener":
        world.node("user2", "NODE").ok("topic_listen", "NEW.1")
    elif keeper == "rule":
        world.rules("user3 OTHER Topic NEW.1 R 5")
    elif keeper.endswith("retention"):
        world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 60")
        stream.age_messages(60 if keeper.startswith("empty") else 0)
    else:
        stream.got(topic="NEW.1")
        stream.publish("y", topic="NEW.1")
    for _ in range(3):
        stream.prune()
    assert world.owner.query("SELECT count(*) FROM psqlmessages_topic WHERE name = 'NEW.1'") == 1


def test_a_topic_that_publish_did_not_make_stays(stream: Stream, world: World) -> None:
    world.rules("user2 NODE Topic LIVE.* R 5")
    node = world.node("user2", "NODE")
    node.ok("topic_listen", "LIVE.1")
    node.ok("topic_unlisten", "LIVE.1")
    stream.publish("x")
    for _ in range(3):
        stream.prune()
    names = world.owner.query("SELECT array_agg(name::text ORDER BY name) FROM psqlmessages_topic")
    assert names == ["LIVE.1", "T"]


def test_a_subscription_that_died_is_forgotten_after_thirty_days(
    stream: Stream, world: World
) -> None:
    count = "SELECT count(*) FROM psqlmessages_subscription"
    day = 24 * 60 * 60
    stream.got(timeout=day)
    counts = []
    for days in (1, 29, 1):
        stream.age(days * day)
        stream.prune()
        counts.append(world.owner.query(count))
    assert counts == [1, 1, 0]


def test_a_subscription_is_counted_no_more_before_it_is_forgotten(
    stream: Stream, world: World
) -> None:
    counted = "SELECT array_agg(subscriptions) FROM psqlmessages_topic WHERE name = 'T'"
    stream.got(timeout=10)
    stream.age(40 * 24 * 60 * 60)
    world.owner.connection.execute("SET statement_timeout = '30s'")
    holder = world.program()
    with holder.connection.transaction():
        holder.query("SELECT count(*) FROM (SELECT FROM psqlmessages_topic FOR UPDATE) AS t")
        stream.tend()
        stream.tend()
    stream.tend()
    assert world.owner.query(counted) == [0]
    assert stream.subscriber.error("subscription", "SUB", "T")[0] == 61


@pytest.mark.parametrize("call", ["publish", "subscribe", "unsubscribe", "topic_send", "evaluate"])
def test_it_happens_by_itself_in_whatever_call_comes(
    stream: Stream, world: World, call: str
) -> None:
    stream.got("SUB2", timeout=10)
    stream.got("SUB", timeout=1000)
    stream.age(10, "SUB2")
    stream.publisher.ok("init", "PUB")
    stream.publisher.ok("topic_notify", "T")
    world.owner.connection.execute("UPDATE messages._stream SET tended_at = 'epoch'")
    for program in (stream.publisher, stream.subscriber):
        program.query("SELECT set_config('messages.evaluated', '', false)")
    match call:
        case "publish":
            stream.publish("x")
        case "subscribe":
            stream.got("SUB")
        case "unsubscribe":
            stream.subscriber.ok("unsubscribe", "SUB", "T")
        case "topic_send":
            stream.publisher.ok("topic_send", "T", "x")
        case "evaluate":
            stream.publisher.ok("evaluate")
    dead = "SELECT array_agg(ident::text) FROM psqlmessages_subscription WHERE NOT is_alive"
    assert world.owner.query(dead) == ["SUB2"]


def test_it_happens_at_most_once_a_second(stream: Stream, world: World) -> None:
    stream.tend()
    tended = []
    for _ in range(20):
        stream.publisher.ok("evaluate")
        tended.append(world.owner.query("SELECT tended_at FROM messages._stream"))
    pauses = [later - earlier for earlier, later in pairwise(tended) if later != earlier]
    assert min(pauses, default=timedelta(seconds=1)) >= timedelta(seconds=1)


def tend_after_the_clock_was_put_back(world: World, noted: str) -> None:
    """Tend where one of the times that were noted lies ahead."""
    world.owner.connection.execute(
        "UPDATE messages._stream"
        " SET tended_at = 'epoch', switched_at = 'epoch', cleared_at = 'epoch';"
        f"UPDATE messages._stream SET {noted} = clock_timestamp() + interval '1 h'"
    )
    world.owner.query("SELECT messages._tend_streams()")


@pytest.mark.parametrize("noted", ["tended_at", "switched_at"])
def test_messages_are_removed_when_the_clock_was_put_back(
    stream: Stream, world: World, noted: str
) -> None:
    stream.publish("x")
    tend_after_the_clock_was_put_back(world, noted)
    assert stream.stored() == []


def test_topics_are_removed_when_the_clock_was_put_back(stream: Stream, world: World) -> None:
    stream.publish("x", topic="NEW.1")
    stream.got(topic="NEW.1")
    stream.tend()
    stream.subscriber.ok("unsubscribe", "SUB", "NEW.1")
    tend_after_the_clock_was_put_back(world, "cleared_at")
    assert world.owner.query("SELECT array_agg(name::text) FROM psqlmessages_topic") == ["T"]


def test_steady_publishing_fills_the_same_tables_again_and_again(
    stream: Stream, world: World
) -> None:
    stream.got()
    sizes = []
    for _ in range(30):
        stream.publisher.ok("publish_many", "PUB", "T", ["x" * 1000] * 200)
        assert len(stream.got()) == 200
        stream.tend()
        sizes.append(world.owner.query(SIZE))
    assert max(sizes[10:]) <= max(sizes[:10])


def test_one_that_is_away_for_long_costs_no_more_than_what_waits_for_it(
    stream: Stream, world: World
) -> None:
    stream.got("SUB", topic="T")
    stream.got("SUB2", topic="T", timeout=10_000)
    world.rules("user1 PUB Topic AWAY W 5", "user2 SUB2 Topic AWAY R 5")
    stream.got("SUB2", topic="AWAY", timeout=10_000)
    sizes = []
    for turn in range(60):
        stream.publisher.ok("publish_many", "PUB", "T", ["x" * 1000] * 200)
        stream.publisher.ok("publish_many", "PUB", "AWAY", [f"{turn}", *["x" * 1000] * 9])
        assert len(stream.got("SUB")) == 200
        stream.got("SUB2")
        stream.tend()
        sizes.append(int(world.owner.query(SIZE)) / 8192)
    waiting = 60 * 10 / 7
    assert max(sizes) < 4 * waiting + 4 * 30
    rows = stream.subscriber.read("SUB2", "AWAY")
    assert [row.payload for row in rows if len(row.payload) < 9] == [str(n) for n in range(60)]
    assert len(rows) == 600


def test_prune_says_how_many_tables_it_emptied(stream: Stream) -> None:
    stream.publish("x")
    assert [stream.prune() for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_older_snapshot_prunes_nothing(stream: Stream, world: World, isolation: str) -> None:
    stream.got()
    owner = world.owner.connection
    owner.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    owner.execute("SELECT count(*) FROM messages.topics")
    stream.publish("x")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="READ COMMITTED"):
        stream.prune()
    owner.execute("ROLLBACK")
    assert stream.got() == ["x"]


def test_the_command_prunes_whatever_isolation_its_role_has(
    stream: Stream, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.publish("x")
    isolated = "-c default_transaction_isolation=serializable"
    assert main(["--dsn", make_conninfo(world.server.url(), options=isolated), "prune"]) == 0
    assert capsys.readouterr().out.startswith("emptied ")
    assert stream.stored() == []
