"""What is told of streams: subscription, connect_stream, and the views that each role may see."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.sql.conftest import TABLES, Program, World
from tests.streams.conftest import Stream, moment, register


def test_subscription_tells_since_backlog_and_expiry(stream: Stream) -> None:
    before = datetime.now(UTC)
    stream.got(timeout=100)
    after = datetime.now(UTC)
    stream.publish("one", "two")
    state = stream.state()
    assert (state["Err"], state["Recovered"], state["Backlog"]) == ("0", True, 2)
    assert before <= moment(state["Since"]) <= after
    hundred = timedelta(seconds=100)
    assert before + hundred <= moment(state["Expires"]) <= after + hundred


def test_the_backlog_is_what_the_next_calls_return(stream: Stream) -> None:
    stream.got()
    stream.publish(*"abc")
    backlogs = []
    for _ in range(4):
        backlogs.append(stream.state()["Backlog"])
        stream.got(max_rows=1)
    assert backlogs == [3, 2, 1, 0]


def test_a_reading_moves_the_expiry_and_not_the_beginning(stream: Stream) -> None:
    stream.got(timeout=10)
    first = stream.state()
    stream.got(timeout=1000)
    second = stream.state()
    assert first["Since"] == second["Since"]
    assert moment(second["Expires"]) - moment(first["Expires"]) > timedelta(seconds=900)


def test_who_missed_messages_is_told_so_before_and_after_it_starts_afresh(stream: Stream) -> None:
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    dead = stream.state()
    stream.got(timeout=10)
    restarted = stream.state()
    assert (dead["Recovered"], dead["Backlog"]) == (False, 0)
    assert moment(dead["Expires"]) < datetime.now(UTC)
    assert restarted["Recovered"] is False
    assert moment(restarted["Since"]) > moment(dead["Since"])


def test_who_was_too_late_but_missed_nothing_is_recovered(stream: Stream) -> None:
    stream.publish("before")
    stream.got(timeout=100)
    stream.publish("read")
    stream.got(timeout=100)
    stream.age(100)
    stream.publish("of another topic", topic="NEW.1")
    dead = stream.state()
    stream.got(timeout=100)
    assert (dead["Recovered"], stream.state()["Recovered"]) == (True, True)


@pytest.mark.parametrize("removal", ["prune", "tend"])
def test_what_was_missed_is_told_even_where_it_is_gone(stream: Stream, removal: str) -> None:
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    for _ in range(3):
        getattr(stream, removal)()
    gone = stream.stored()
    dead = stream.state()
    stream.got(timeout=10)
    assert (gone, dead["Recovered"], stream.state()["Recovered"]) == ([], False, False)


def test_what_was_missed_is_told_even_where_the_topic_went_and_came_again(
    stream: Stream, world: World
) -> None:
    stream.publish("first", topic="NEW.1")
    stream.got(topic="NEW.1", timeout=10)
    stream.publish("missed", topic="NEW.1")
    stream.age(10)
    stream.prune()
    assert stream.subscriber.error("subscription", "SUB", "NEW.1")[0] == 9
    world.rules("user1 PUB Topic NEW.1 W 10")
    stream.got(topic="NEW.1", timeout=10)
    assert stream.state(topic="NEW.1")["Recovered"] is False


def test_a_new_subscription_is_recovered(stream: Stream) -> None:
    stream.publish("before")
    stream.got()
    assert stream.state()["Recovered"] is True


def test_who_comes_back_in_time_is_recovered_again(stream: Stream) -> None:
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    stream.got(timeout=10)
    stream.subscriber.ok("connect_stream", "SUB")
    assert stream.state()["Recovered"] is True


def test_connect_stream_registers_the_node_and_names_its_living_subscriptions(
    stream: Stream, world: World
) -> None:
    stream.publish("x", topic="NEW.1")
    stream.got()
    stream.got(topic="NEW.1")
    stream.got("SUB2")
    answer = stream.subscriber.ok("connect_stream", "SUB")
    assert answer["Subscriptions"] == ["NEW.1", "T"]
    assert answer["Channel"].startswith("user2_")
    assert "Already" not in answer
    assert stream.subscriber.ok("connect_stream", "SUB")["Already"] == 1
    assert world.owner.query("SELECT ident FROM psqlmessages_client") == "SUB"


def test_connect_stream_names_no_subscription_that_died(stream: Stream) -> None:
    stream.got(timeout=10)
    stream.age(10)
    assert stream.subscriber.ok("connect_stream", "SUB")["Subscriptions"] == []


def test_connect_stream_of_another_role_tells_and_changes_nothing_that_it_may_not_read(
    stream: Stream, world: World
) -> None:
    world.rules("user3 SUB Topic OTHER R 10")
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    stream.got(timeout=10)
    assert world.program("user3").ok("connect_stream", "SUB")["Subscriptions"] == []
    assert stream.state()["Recovered"] is False


def test_connect_stream_refuses_as_init_does(stream: Stream, world: World) -> None:
    register(stream.subscriber, "SUB")
    other = world.program("user2")
    assert other.error("connect_stream", "SUB")[0] == 8
    assert stream.publisher.error("connect_stream", "SUB")[0] == 5


def test_connect_stream_does_not_wait_for_a_reader_in_a_transaction(
    stream: Stream, world: World
) -> None:
    stream.got(timeout=10)
    stream.publish("missed")
    stream.age(10)
    stream.got(timeout=10)
    reader = world.program("user2")
    stream.subscriber.connection.execute("SET statement_timeout = '30s'")
    with reader.connection.transaction():
        reader.got("SUB", "T")
        assert stream.subscriber.ok("connect_stream", "SUB")["Subscriptions"] == ["T"]


def rows(program: Program, view: str) -> list[dict[str, object]]:
    """The rows of a view."""
    return program.query(f"SELECT json_agg(v ORDER BY v::text) FROM messages.{view} AS v") or []


def test_the_views_show_what_the_tables_of_such_systems_show(stream: Stream) -> None:
    register(stream.subscriber, "SUB")
    stream.got("SUB", timeout=100)
    stream.got("SUB2", timeout=200)
    before = datetime.now(UTC)
    stream.publish("x")
    after = datetime.now(UTC)
    [topic] = rows(stream.subscriber, "stream_topics")
    assert before <= moment(topic["last_msg_recv_timestamp"]) <= after
    assert topic["topic"] == "T"
    assert topic["number_of_users_subscribed"] == 2
    assert 100 < int(str(topic["relative_timeout"])) <= 200
    clients = {row["client"]: row for row in rows(stream.subscriber, "stream_clients")}
    assert moment(clients["SUB"]["connection_timestamp"]) < before
    assert clients["SUB2"]["connection_timestamp"] is None
    assert {row["number_of_subscriptions"] for row in clients.values()} == {1}
    subscriptions = rows(stream.subscriber, "stream_subscriptions")
    assert [(row["client"], row["topic"], row["timeout"]) for row in subscriptions] == [
        ("SUB", "T", 100), ("SUB2", "T", 200),
    ]  # fmt: skip
    for row in subscriptions:
        assert moment(row["subscription_timestamp"]) <= moment(row["last_ping_timestamp"]) < before


def test_the_last_message_is_shown_after_it_is_gone(stream: Stream) -> None:
    for _ in range(3):
        before = datetime.now(UTC)
        stream.publish("x")
        [shown] = rows(stream.subscriber, "stream_topics")
        assert before <= moment(shown["last_msg_recv_timestamp"])
        stream.prune()
        assert stream.stored() == []
        assert rows(stream.subscriber, "stream_topics") == [shown]


def test_a_topic_without_subscription_has_the_timeout_of_its_retention(
    stream: Stream, world: World
) -> None:
    before = [row["relative_timeout"] for row in rows(stream.subscriber, "stream_topics")]
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 500")
    after = [row["relative_timeout"] for row in rows(stream.subscriber, "stream_topics")]
    assert (before, after) == ([0], [500])


def test_the_longest_timeout_is_shown_even_when_the_clock_is_put_back(stream: Stream) -> None:
    stream.got(timeout=2**31 - 1)
    stream.age(-5)
    [topic] = rows(stream.subscriber, "stream_topics")
    assert topic["relative_timeout"] == 2**31 - 1


def test_a_topic_made_after_a_flush_has_nothing_of_the_one_that_had_its_number(
    stream: Stream, world: World
) -> None:
    stream.publish("x")
    stream.prune()
    # As Django's flush does, which numbers anew.
    names = ", ".join(f"psqlmessages_{name}" for name in (*TABLES, "streammessage"))
    world.owner.connection.execute(f"TRUNCATE {names}")
    assert world.owner.query("SELECT count(*) FROM messages._stream_last") == 0


def test_a_subscription_that_died_is_in_no_view(stream: Stream) -> None:
    stream.got(timeout=10)
    stream.age(10)
    assert rows(stream.subscriber, "stream_clients") == []
    assert rows(stream.subscriber, "stream_subscriptions") == []
    [topic] = rows(stream.subscriber, "stream_topics")
    assert (topic["number_of_users_subscribed"], topic["relative_timeout"]) == (0, 0)


def test_each_role_sees_the_streams_of_topics_that_a_rule_lets_it_use(
    stream: Stream, world: World
) -> None:
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
    owner = [row["client"] for row in rows(world.owner, "stream_clients")]
    assert owner == ["SECRET", "SUB"]


@pytest.mark.parametrize(
    ("view", "column"),
    [("stream_topics", "topic"), ("stream_clients", "client"), ("stream_subscriptions", "client")],
)
def test_no_view_leaks_a_row_to_a_function_in_the_query(
    stream: Stream, world: World, view: str, column: str
) -> None:
    world.rules("hostile H Topic OPEN RW 5")
    program = world.program("hostile")
    stream.got()
    program.got("H", "OPEN")
    program.connection.execute(
        "CREATE FUNCTION pg_temp.leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001"
        " AS $$ BEGIN RAISE NOTICE '%', $1; RETURN true; END $$"
    )
    program.connection.execute(f"SELECT FROM messages.{view} WHERE pg_temp.leak({column})")
    assert program.warnings == [f"NOTICE: {'OPEN' if column == 'topic' else 'H'}"]
