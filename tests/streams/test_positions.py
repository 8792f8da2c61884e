"""Positions of a reader's own: horizons, subscriptions put there, the view of what is kept."""

import json
from typing import Any

import psycopg
import pytest

from tests.sql.conftest import Program
from tests.streams.conftest import Stream

pytestmark = pytest.mark.versions


def watermarks(stream: Stream, *topics: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Call stream_horizons as SUB: for each topic what it says."""
    after = json.dumps(options["after"]) if "after" in options else None
    arguments = "SUB", list(topics), after, options.get("max_rows")
    told = stream.subscriber.ok("stream_horizons", *arguments)["Topics"]
    return {each["Topic"]: each for each in told}


def horizon(stream: Stream, **options: Any) -> int:
    return int(watermarks(stream, "T", **options)["T"]["Horizon"])


def subscribe_from(stream: Stream, *positions: int, topic: str = "T") -> dict[str, Any]:
    return stream.subscriber.ok("subscribe_from", "SUB", [topic], list(positions), 60)


def test_the_horizon_is_the_last_message_that_is_safe_to_read(stream: Stream):
    assert horizon(stream) == 0
    first = stream.publish("first")
    told = {"Topic": "T", "Removed": 0, "Horizon": first, "Newest": first}
    assert watermarks(stream, "T")["T"] == told
    # An open publisher holds that of its topic alone.
    with stream.late("late"):
        newest, other = stream.publish("second"), stream.publish("other", topic="NEW.1")
        both = watermarks(stream, "T", "NEW.1")
        assert (both["T"], both["NEW.1"]["Horizon"]) == (told | {"Newest": newest}, other)
    assert horizon(stream, after={"T": first}) == newest


def test_at_most_so_many_messages_lie_after_the_positions(stream: Stream):
    ids = [stream.publish("x", topic=topic) for topic in ["T", "NEW.1"] * 3]
    for max_rows in range(1, 6):
        after = {"T": ids[0]}
        told = watermarks(stream, "T", "NEW.1", after=after, max_rows=max_rows)
        between = [
            each for topic, told_of in told.items() for each in ids[topic != "T" :: 2]
            if after.get(topic, 0) < each <= told_of["Horizon"]
        ]  # fmt: skip
        assert sorted(between) == ids[1 : 1 + max_rows]
        assert horizon(stream, after=after, max_rows=max_rows) == ids[2 * min(max_rows, 2)]


def test_a_pattern_selects_the_topics_that_the_node_may_read(stream: Stream):
    stream.world.rules(
        "user1 PUB Topic TT W 10", "user1 PUB Topic TU W 10", "user2 SUB Topic TU R 10",
        "user2 SUB2 Topic TT R 10", "user3 SUB Topic TT R 10", "user2 SUB Topic TT W 10",
        "user2 SUB Queue TT R 10",
    )  # fmt: skip
    assert list(watermarks(stream, "T*")) == ["T", "TU"]
    assert list(watermarks(stream, "*")) == ["T", "TU"]
    assert list(watermarks(stream, "X*")) == []


def test_a_subscription_moves_to_a_position_and_keeps_later_messages(stream: Stream):
    stream.retain(1000)
    ids = [stream.publish(str(number)) for number in range(4)]
    for position in (0, *ids, ids[1]):
        subscribe_from(stream, position)
        assert stream.state()["Backlog"] == sum(each > position for each in ids)
    stream.retain(0)
    stream.prune()
    assert stream.got() == ["2", "3"]
    stream.prune()
    assert stream.stored() == []
    # A call from an earlier position reports that messages were removed.
    missed = [{"Topic": "T", "Removed": ids[3]}]
    assert [subscribe_from(stream, each)["Missed"] for each in ids[2:]] == [missed, []]
    assert watermarks(stream, "T")["T"]["Removed"] == ids[3]


def test_a_topic_created_again_reports_missed_messages(stream: Stream):
    first = stream.publish("read", topic="NEW.1")
    subscribe_from(stream, first, topic="NEW.1")
    stream.age(60)
    missed = stream.publish("missed", topic="NEW.1")
    stream.prune()
    assert stream.topics() == ["T"]
    stream.publish("new", topic="NEW.1")
    answer = subscribe_from(stream, first, topic="NEW.1")
    assert answer["Missed"] == [{"Topic": "NEW.1", "Removed": missed}]
    assert watermarks(stream, "NEW.*")["NEW.1"]["Removed"] == missed
    assert subscribe_from(stream, missed, topic="NEW.1")["Missed"] == []
    assert stream.got(topic="NEW.1") == ["new"]


def test_several_jobs_place_the_same_topics_at_once_without_deadlock(stream: Stream):
    stream.publish("x", topic="NEW.1")
    second = stream.world.program("user2")
    with stream.subscriber.connection.transaction():
        stream.subscriber.ok("subscribe_from", "SUB", ["NEW.1", "T"], [0, 0], 60)
        second.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.call("subscribe_from", "SUB", ["T", "NEW.1"], [0, 0], 60)
    second.ok("subscribe_from", "SUB", ["T", "NEW.1"], [0, 0], 60)


def test_an_open_save_of_rules_delays_no_living_subscription(stream: Stream):
    stream.got()
    stream.subscriber.execute("SET lock_timeout = '2s'")
    with stream.world.owner.connection.transaction(force_rollback=True):
        stream.execute("UPDATE messages.auth SET timeout = 20")
        subscribe_from(stream, 0)
        assert stream.got() == []


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize(
    "call", [
        "stream_horizons('SUB', '{T}')", "subscribe_from('SUB', '{T}', '{0}', 5)",
        "subscribe('SUB', 'T', 60)",
    ],
)  # fmt: skip
def test_an_older_snapshot_is_refused(stream: Stream, level: str, call: str):
    connection = stream.subscriber.connection
    connection.execute(f"SET default_transaction_isolation = '{level}'")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="READ COMMITTED"):
        connection.execute(f"SELECT messages.{call}")


def test_the_view_shows_messages_that_the_role_may_read(stream: Stream):
    stream.world.rules("user1 PUB Topic U W 10")
    stream.publish("mine")
    stream.publish("of others", topic="U")
    read = "SELECT array_agg(body) FROM messages.stored"
    assert stream.subscriber.query(read) == ["mine"]
    # W alone lets nobody read.
    assert stream.publisher.query(read) is None
    assert sorted(stream.query(read)) == ["mine", "of others"]
    stream.execute("DELETE FROM messages.auth WHERE role = 'user2'")
    assert stream.subscriber.query(read) is None


def read(program: Program, *arguments: Any) -> list[str | None]:
    """Call read_stream as SUB for T: the bodies."""
    return [row.body for row in program.elements("read_stream", "SUB", "T", *arguments)]


def test_a_range_of_ids_is_read_in_order_up_to_the_settled_one(stream: Stream):
    first = stream.publish("1")
    with stream.late("open"):
        second = stream.publish("2")
        # Without an end it stops before what an open transaction may still add.
        assert read(stream.subscriber) == ["1"]
        assert read(stream.subscriber, 0, second) == ["1", "2"]
    assert read(stream.subscriber, first) == ["open", "2"]
    assert read(stream.subscriber, 0, None, 1) == ["1"]
    assert read(stream.subscriber, 0, second, None, False) == [None] * 3
    assert read(stream.subscriber, second) == []


def test_messages_read_stay_until_the_transaction_ends(stream: Stream):
    stream.publish("one")
    with stream.subscriber.connection.transaction():
        for _ in range(2):
            assert read(stream.subscriber) == ["one"]
            stream.prune()
    stream.prune()
    assert read(stream.subscriber) == []
