"""What is told of streams: subscription, connect_stream, and the views that each role may see."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import Stream, moment


def test_subscription_tells_since_backlog_and_expiry(stream: Stream):
    stream.publish("before")
    before = datetime.now(UTC)
    stream.got(timeout=100)
    after = datetime.now(UTC)
    stream.publish("one", "two")
    state = stream.state()
    assert (state["Err"], state["Recovered"]) == ("0", True)
    assert before <= moment(state["Since"]) <= after
    hundred = timedelta(seconds=100)
    assert before + hundred <= moment(state["Expires"]) <= after + hundred
    # The backlog is what the next calls return; they move the expiry, not the beginning.
    backlogs = []
    for _ in range(3):
        backlogs.append(stream.state()["Backlog"])
        stream.got(max_rows=1, timeout=1000)
    assert backlogs == [2, 1, 0]
    later = stream.state()
    assert later["Since"] == state["Since"]
    assert moment(later["Expires"]) - moment(state["Expires"]) > timedelta(seconds=850)


@pytest.mark.parametrize("removal", [None, "prune", "tend"])
def test_missed_messages_are_reported_even_if_removed(stream: Stream, removal: str | None):
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    for _ in range(3 if removal else 0):
        getattr(stream, removal)()
    assert stream.stored() == ([] if removal else ["missed"])
    dead = stream.state()
    stream.got(timeout=10)
    restarted = stream.state()
    assert (dead["Recovered"], dead["Backlog"]) == (False, 0)
    assert moment(dead["Expires"]) < datetime.now(UTC)
    assert restarted["Recovered"] is False
    assert moment(restarted["Since"]) > moment(dead["Since"])
    # Who then comes back in time is recovered again.
    stream.subscriber.ok("connect_stream", "SUB")
    assert stream.state()["Recovered"] is True


def test_a_late_reader_that_missed_nothing_recovers(stream: Stream):
    stream.got(timeout=100)
    stream.publish("read")
    stream.got(timeout=100)
    stream.age(100)
    stream.publish("of another topic", topic="NEW.1")
    dead = stream.state()
    stream.got(timeout=100)
    assert (dead["Recovered"], stream.state()["Recovered"]) == (True, True)


def test_missed_messages_are_reported_even_if_the_topic_was_created_again(stream: Stream):
    stream.publish("first", topic="NEW.1")
    stream.got(topic="NEW.1", timeout=10)
    stream.publish("missed", topic="NEW.1")
    stream.age(10)
    stream.prune()
    assert stream.subscriber.error("subscription", "SUB", "NEW.1")[0] == 9
    stream.world.rules("user1 PUB Topic NEW.1 W 10")
    stream.got(topic="NEW.1", timeout=10)
    assert stream.state(topic="NEW.1")["Recovered"] is False


def test_connect_stream_registers_and_names_living_subscriptions(stream: Stream):
    stream.publish("x", topic="NEW.1")
    stream.publish("x", topic="NEW.2")
    stream.got(topic="NEW.2", timeout=10)
    stream.age(10)
    stream.got()
    stream.got(topic="NEW.1")
    stream.got("SUB2")
    answer = stream.subscriber.ok("connect_stream", "SUB")
    assert answer["Subscriptions"] == ["NEW.1", "T"]
    assert answer["Channel"].startswith("user2_")
    assert "Already" not in answer
    assert stream.subscriber.ok("connect_stream", "SUB")["Already"] == 1
    assert stream.query("SELECT ident FROM psqlmessages_client") == "SUB"
    # It refuses as init does.
    assert stream.world.program("user2").error("connect_stream", "SUB")[0] == 8
    assert stream.publisher.error("connect_stream", "SUB")[0] == 5


def test_connect_stream_of_another_role_changes_nothing(stream: Stream, world: World):
    world.rules("user3 SUB Topic OTHER R 10")
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    stream.got(timeout=10)
    other = world.program("user3")
    assert other.ok("connect_stream", "SUB")["Subscriptions"] == []
    assert stream.state()["Recovered"] is False
    # Nor does it wait for a reader in a transaction.
    other.ok("deinit", "SUB")
    reader = stream.world.program("user2")
    stream.limit_waits()
    with reader.connection.transaction():
        reader.got("SUB", "T")
        assert stream.subscriber.ok("connect_stream", "SUB")["Subscriptions"] == ["T"]


def rows(program: Program, view: str) -> list[dict[str, object]]:
    return program.query(f"SELECT json_agg(v ORDER BY v::text) FROM messages.{view} AS v") or []


def test_the_last_message_is_shown_after_its_removal(stream: Stream):
    for _ in range(2):
        before = datetime.now(UTC)
        stream.publish("x")
        [shown] = rows(stream.subscriber, "stream_topics")
        assert before <= moment(shown["last_msg_recv_timestamp"])
        stream.prune()
        assert stream.stored() == []
        assert rows(stream.subscriber, "stream_topics") == [shown]


def test_each_role_sees_the_streams_that_a_rule_allows(stream: Stream, world: World):
    world.rules("user3 SECRET Topic SECRET RW 10")
    stream.got()
    world.program("user3").got("SECRET", "SECRET")
    expected = {
        "user1": (["T"], ["SUB"]), "user2": (["T"], ["SUB"]),
        "user3": (["SECRET"], ["SECRET"]), "hostile": ([], []),
    }  # fmt: skip
    for role, (topics, clients) in expected.items():
        program = world.program(role)
        assert [row["topic"] for row in rows(program, "stream_topics")] == topics
        assert [row["client"] for row in rows(program, "stream_clients")] == clients
        assert [row["topic"] for row in rows(program, "stream_subscriptions")] == topics
    assert [row["client"] for row in rows(world.owner, "stream_clients")] == ["SECRET", "SUB"]
