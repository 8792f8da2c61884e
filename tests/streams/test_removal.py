"""Removal: what nobody needs goes by truncation, and what somebody needs stays."""

import os
from datetime import timedelta
from itertools import pairwise

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages.cli.main import main
from tests.sql.conftest import World
from tests.streams.conftest import Stream

pytestmark = pytest.mark.versions
SIZE = "SELECT sum(pg_relation_size(messages._stream_partition(s))) FROM generate_series(0, 3) AS s"
DAY = 24 * 60 * 60


def test_messages_read_by_every_subscription_are_removed(stream: Stream):
    stream.got("SUB")
    stream.got("SUB2")
    stream.publish("x")
    stream.got("SUB")
    stream.prune()
    kept = stream.stored()
    stream.got("SUB2")
    # It says how many tables it emptied.
    assert [stream.prune() for _ in range(3)] == [1, 0, 0]
    assert (kept, stream.stored()) == (["x"], [])
    stream.subscriber.ok("unsubscribe", "SUB", "T")
    stream.subscriber.ok("unsubscribe", "SUB2", "T")
    stream.publish("that nobody subscribes to")
    stream.prune()
    assert stream.stored() == []


def test_a_table_that_is_needed_after_all_is_not_emptied(stream: Stream):
    """As where a publisher commits between the look at its table and the lock on it."""
    stream.got()
    stream.publish("x")
    empty = "SELECT messages._truncate_stream_partition(s.slot) FROM messages._stream AS s"
    assert (stream.query(empty), stream.stored()) == (False, ["x"])
    stream.got()
    assert (stream.query(empty), stream.stored()) == (True, [])


@pytest.mark.parametrize("keeper", ["subscription", "retention"])
def test_an_hour_without_any_call_counts_for_nothing_ten_times(stream: Stream, keeper: str):
    if keeper == "subscription":
        stream.got(timeout=60)
    stream.publish("x")
    if keeper == "retention":
        stream.retain(60)
    hours = 0
    while stream.stored():
        hours += 1
        stream.age(3600)
        stream.age_messages(3600)
        stream.execute(
            "UPDATE messages._stream SET maintained_at = clock_timestamp() - interval '1 hour';"
            "UPDATE messages._clock_gap"
            " SET began_at = began_at - interval '1 hour', ended_at = ended_at - interval '1 hour'"
        )
        stream.prune()
    # So that what is kept for a reader that is gone is bounded.
    assert hours == 11


@pytest.mark.parametrize("removal", ["tend", "prune"])
def test_needed_messages_are_moved_and_arrive_in_order(stream: Stream, removal: str):
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


def test_long_payloads_are_moved_some_at_a_time_and_one_at_least(stream: Stream):
    stream.got("SUB", timeout=1000)
    # Each is more than one step moves. What is random is not compressed.
    payloads = [os.urandom(5_100_000).hex() for _ in range(2)]
    stream.publisher.ok("publish_many", "PUB", "T", [*["x" * 1000] * 100, *payloads])
    stream.got("SUB", timeout=1000, max_rows=100)
    assert [stream.tend() for _ in range(3)] == [0, 1, 0]
    is_equal = stream.got("SUB") == payloads
    assert is_equal


def test_retention_keeps_messages_whether_read_or_not(stream: Stream):
    stream.retain(100)
    stream.got()
    stream.publish("x")
    stream.got()
    stream.publish(*["of no retention"] * 3, topic="NEW.1")
    kept = []
    for seconds in (0, 50, 50):
        stream.age_messages(seconds)
        stream.prune()
        kept.append(stream.stored())
    assert kept == [["x"], ["x"], []]
    # But it is no limit where a subscription waits.
    stream.publish("y")
    stream.age_messages(500)
    stream.prune()
    assert stream.got() == ["y"]
    # The young stay, and the old go.
    stream.publish(*"abcdefgh")
    stream.got()
    stream.age_messages(100)
    stream.publish("young")
    for _ in range(3):
        stream.prune()
    assert stream.stored() == ["young"]


def test_a_topic_that_publish_made_stays_while_something_uses_it(stream: Stream):
    world = stream.world
    world.rules("user2 NODE Topic NEW.* R 5", "user2 NODE Topic LIVE.* R 5")
    for name in ("subscribed", "heard", "named", "kept", "empty", "written", "unused"):
        stream.publish("x", topic=f"NEW.{name}")
    stream.got(topic="NEW.subscribed")
    # A topic that a node made stays.
    world.node("user2", "NODE", listen="NEW.heard LIVE.1").ok("topic_unlisten", "LIVE.1")
    world.rules("user3 OTHER Topic NEW.named R 5")
    retained = "name IN ('NEW.kept', 'NEW.empty')"
    stream.execute(f"UPDATE psqlmessages_topic SET retention = 60 WHERE {retained}")
    stream.execute(
        "UPDATE psqlmessages_streammessage SET published_at = 'epoch'"
        " WHERE topic_id = (SELECT id FROM psqlmessages_topic WHERE name = 'NEW.empty')"
    )
    stream.got(topic="NEW.written")
    stream.publish("y", topic="NEW.written")
    for _ in range(3):
        stream.prune()
    used = [f"NEW.{name}" for name in ("empty", "heard", "kept", "named", "subscribed", "written")]
    assert stream.topics() == ["LIVE.1", *used, "T"]
    assert stream.stored() == ["x", "y"]


def test_a_subscription_that_died_is_forgotten_after_thirty_days(stream: Stream):
    stream.got(timeout=DAY)
    counts = []
    for days in (1, 29, 1):
        stream.age(days * DAY)
        stream.prune()
        counts.append(stream.query("SELECT count(*) FROM psqlmessages_subscription"))
    assert counts == [1, 1, 0]


def test_any_call_runs_housekeeping(stream: Stream):
    dead = "SELECT array_agg(ident::text) FROM psqlmessages_subscription WHERE NOT is_alive"
    stream.publisher.ok("init", "PUB")
    stream.publisher.ok("topic_notify", "T")
    found = {}
    for program, function, *arguments in (
        (stream.publisher, "publish", "PUB", "T", "x"),
        (stream.subscriber, "subscribe", "SUB", "T", 1000),
        (stream.publisher, "topic_send", "T", "x"),
        (stream.publisher, "evaluate"),
        (stream.subscriber, "unsubscribe", "SUB", "T"),
    ):
        stream.got("SUB2", timeout=10)
        stream.got("SUB", timeout=1000)
        stream.age(10, "SUB2")
        stream.let_be_due()
        program.query("SELECT set_config('messages.housekeeping_at', '', false)")
        program.call(function, *arguments)
        found[function] = stream.query(dead)
        stream.execute("UPDATE messages._stream SET maintained_at = 'infinity'")
    assert [name for name, idents in found.items() if "SUB2" not in (idents or [])] == []


def test_it_happens_at_most_once_a_second(stream: Stream):
    stream.tend()
    tended = []
    for _ in range(20):
        stream.publisher.ok("evaluate")
        tended.append(stream.query("SELECT maintained_at FROM messages._stream"))
    pauses = [later - earlier for earlier, later in pairwise(tended) if later != earlier]
    assert min(pauses, default=timedelta(seconds=1)) >= timedelta(seconds=1)


@pytest.mark.parametrize("noted", ["maintained_at", "switched_at", "garbage_removed_at"])
def test_removal_goes_on_if_the_clock_was_put_back(stream: Stream, noted: str):
    stream.publish("x", topic="NEW.1")
    stream.got(topic="NEW.1")
    stream.tend()
    stream.subscriber.ok("unsubscribe", "SUB", "NEW.1")
    stream.publish("x")
    stream.let_be_due()
    stream.execute(f"UPDATE messages._stream SET {noted} = clock_timestamp() + interval '1 hour'")
    stream.query("SELECT messages._maintain_streams()")
    assert (stream.stored(), stream.topics()) == ([], ["T"])


def test_an_absent_reader_costs_only_its_own_messages(stream: Stream, world: World):
    turns = 30
    stream.got("SUB", topic="T")
    stream.got("SUB2", topic="T", timeout=10_000)
    world.rules("user1 PUB Topic AWAY W 5", "user2 SUB2 Topic AWAY R 5")
    stream.got("SUB2", topic="AWAY", timeout=10_000)
    sizes = []
    for turn in range(turns):
        stream.publisher.ok("publish_many", "PUB", "T", ["x" * 1000] * 200)
        stream.publisher.ok("publish_many", "PUB", "AWAY", [f"{turn}", *["x" * 1000] * 9])
        assert len(stream.got("SUB")) == 200
        stream.got("SUB2")
        stream.tend()
        sizes.append(int(stream.query(SIZE)) / 8192)
    waiting = turns * 10 / 7
    assert max(sizes) < 4 * waiting + 4 * 30
    rows = stream.subscriber.read("SUB2", "AWAY")
    assert [row.payload for row in rows if len(row.payload) < 9] == [str(n) for n in range(turns)]
    assert len(rows) == turns * 10


def test_an_older_snapshot_prunes_nothing(stream: Stream):
    stream.got()
    stream.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    stream.execute("SELECT count(*) FROM messages.topics")
    stream.publish("x")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="READ COMMITTED"):
        stream.prune()
    stream.execute("ROLLBACK")
    assert stream.got() == ["x"]


def test_prune_ignores_the_isolation(stream: Stream, capsys):
    stream.publish("x")
    isolated = "-c default_transaction_isolation=serializable"
    assert main(["--dsn", make_conninfo(stream.world.server.url(), options=isolated), "prune"]) == 0
    assert capsys.readouterr().out.startswith("emptied ")
    assert stream.stored() == []
