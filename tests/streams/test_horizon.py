"""The horizon: no message is passed over because it commits late, and nobody else holds it back."""

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import Stream

pytestmark = pytest.mark.versions
LAST = "SELECT last_value FROM messages._stream_id"


@pytest.mark.parametrize("before", ["nothing", "a write", "a savepoint"])
def test_a_lower_id_that_commits_later_is_not_passed_over(stream: Stream, before: str):
    stream.got()
    with stream.late() as late:
        if before == "a write":
            late.query("SELECT pg_current_xact_id()")
        late.ok("publish", "PUB", "T", "late")
        if before == "a savepoint":
            # The second is covered by the lock that the first has taken.
            with late.connection.transaction(force_rollback=True):
                late.ok("publish", "PUB", "T", "never")
        late.ok("publish", "PUB", "T", "later")
        stream.publish("early")
        assert stream.got() == []
    assert stream.got() == ["late", "later", "early"]


def test_ended_transactions_delay_no_later_call(stream: Stream):
    stream.got()
    with stream.late("never", end="ROLLBACK"):
        stream.publish("after a rollback")
        assert stream.got() == []
    assert stream.got() == ["after a rollback"]
    with stream.late() as late:
        with late.connection.transaction(force_rollback=True):
            late.ok("publish", "PUB", "T", "never")
        stream.publish("after a savepoint's")
        assert stream.got() == ["after a savepoint's"]
    idle = stream.world.program("user1")
    idle.execute("BEGIN")
    idle.ok("publish", "PUB", "T", "never")
    stream.publish("after a kill")
    assert stream.got() == []
    stream.world.kill(idle)
    assert stream.got() == ["after a kill"]


def test_a_transaction_on_other_topics_delays_no_reader(stream: Stream):
    stream.publish("x", topic="NEW.1")
    # Of its class of locks, see `_publish_lock_class`.
    stream.execute(
        "UPDATE psqlmessages_topic SET id = 70000 WHERE name = 'T';"
        "INSERT INTO psqlmessages_topic (id, name) OVERRIDING SYSTEM VALUE"
        " VALUES (70000 + 65536, 'TWIN')"
    )
    stream.world.rules("user1 PUB Topic TWIN W 5", "user2 SUB Topic TWIN R 5")
    stream.got()
    stream.got(topic="TWIN")
    stream.execute("BEGIN")
    stream.execute("CREATE TEMP TABLE unrelated AS SELECT 1")
    with stream.late("late", topic="NEW.1"), stream.late("late", topic="TWIN"):
        stream.publish("x")
        assert (stream.got(), stream.got(topic="TWIN")) == (["x"], [])
    assert stream.got(topic="TWIN") == ["late"]
    stream.execute("ROLLBACK")


def test_a_new_subscription_gets_later_commits_of_open_publishers(stream: Stream):
    with stream.late("late") as late:
        assert stream.got() == []
        late.ok("publish", "PUB", "T", "later")
    assert stream.got() == ["late", "later"]


def test_a_subscription_that_starts_afresh_repeats_nothing(stream: Stream):
    stream.got(timeout=10)
    stream.publish("read")
    with stream.late(end="ROLLBACK") as holding:
        assert stream.got(timeout=10) == ["read"]
        holding.ok("publish", "PUB", "T", "never")
        stream.age(10)
        stream.got(timeout=10)
    assert stream.got(timeout=10) == []


def test_ids_pass_the_bounds_of_the_locks_numbers(stream: Stream):
    for near in (2**31, 2**32, 2**33 - 1, 2**40):
        stream.query("SELECT setval('messages._stream_id', %s)", near - 5)
        stream.got()
        with stream.late("late"):
            stream.publish(*"abcdefghij")
            assert stream.got() == [], near
        assert stream.got() == ["late", *"abcdefghij"], near


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_prepared_transaction_is_not_passed_over(stream: Stream, end: str):
    stream.got()
    stream.publisher.execute("BEGIN")
    stream.publish("prepared")
    stream.publisher.execute("PREPARE TRANSACTION 'streams'")
    stream.world.program("user1").ok("publish", "PUB", "T", "x")
    held_back = stream.got()
    removed = [stream.prune(), stream.tend()]
    stream.publisher.execute(f"{end} PREPARED 'streams'")
    expected = ["prepared", "x"] if end == "COMMIT" else ["x"]
    assert (held_back, removed, stream.got()) == ([], [0, 0], expected)


def take(program: Program, mode: str, lock_class: int, first: int, last: int) -> None:
    program.query(
        f"SELECT count(pg_advisory_lock{mode}(%s, n::bit(32)::int))"
        " FROM generate_series(%s::bigint, %s::bigint) AS n",
        lock_class, first, last,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["", "_shared"])
def test_hostile_locks_block_no_call_and_lose_no_message(stream: Stream, mode: str):
    of = "SELECT messages._publish_lock_class(id) FROM psqlmessages_topic WHERE name = 'T'"
    lock_class = stream.query(of)
    stream.publish("x", topic="NEW.1")
    stream.got()
    stream.limit_waits()
    hostile = stream.world.program("hostile")
    take(hostile, mode, lock_class, 0, 10)
    now = stream.query(LAST)
    take(hostile, mode, lock_class, now - 1000, now + 1000)
    stream.publish("x", "y")
    assert stream.got() == ["x", "y"]
    with stream.late("late"):
        stream.publish(*"abc")
        assert stream.got() == []
    assert stream.got() == ["late", *"abc"]
    # Nor do they count for the transaction of someone else, who writes messages too.
    with stream.late("of another topic", topic="NEW.1"):
        stream.publish("x")
        assert stream.got() == ["x"]


def test_a_forged_mark_passes_over_no_message_and_junk_does_no_harm(stream: Stream):
    stream.got()
    topic = stream.query("SELECT id FROM psqlmessages_topic WHERE name = 'T'")
    for ahead in (-5_000_000_000, -1, 0, 1, 5_000_000_000, "", "junk", "9" * 30):
        number = stream.query(LAST) + ahead if isinstance(ahead, int) else ahead
        with stream.late("x", topic="NEW.1") as forger:
            # The mark of a transaction that has published to the topic from this number on.
            mark = f",{topic},,{topic}={number},"
            forger.query("SELECT set_config('messages.publishing', %s, false)", mark)
            forger.ok("publish", "PUB", "T", "forged")
            stream.publish("x")
            assert stream.got() == [], ahead
        assert stream.got() == ["forged", "x"], ahead
    for junk in ("", ",", ",,", "x" * 100_000, "🐘", "',0,'", "\n"):
        stream.publisher.query("SELECT set_config('messages.publishing', %s, false)", junk)
        with stream.publisher.connection.transaction():
            stream.publish("x", "y")
        assert stream.got() == ["x", "y"], junk


def test_a_mark_that_outlives_its_savepoint_is_not_believed(stream: Stream):
    stream.got()
    connection = stream.publisher.connection
    with connection.transaction():
        with connection.transaction(force_rollback=True):
            stream.publish("a", "b", "c")
            mark = stream.publisher.query("SELECT current_setting('messages.publishing')")
        stream.publisher.query("SELECT set_config('messages.publishing', %s, true)", mark)
        stream.publish("x")
        stream.world.program("user1").ok("publish", "PUB", "T", "y")
        assert stream.got() == []
    assert stream.got() == ["x", "y"]
    assert stream.publisher.query("SELECT current_setting('messages.publishing')") == ""


def test_the_locks_of_a_publisher_taken_by_another_delay_no_reader(stream: Stream):
    """Who may publish something else copies all locks that it sees."""
    stream.got()
    publishing = stream.world.program("user1")
    publishing.execute("BEGIN")
    publishing.ok("publish", "PUB", "T", "first")
    with stream.late("x", topic="NEW.1") as thief:
        copied = thief.query(
            """
            SELECT count(CASE objsubid
                WHEN 1 THEN pg_advisory_lock_shared((classid::bigint << 32) | objid::bigint)
                ELSE pg_advisory_lock_shared(high, low)
            END)
            FROM pg_locks
            CROSS JOIN LATERAL (
                SELECT classid::bigint::bit(32)::int, objid::bigint::bit(32)::int
            ) AS key (high, low)
            WHERE locktype = 'advisory' AND pid = %s
            """,
            publishing.pid,
        )
        publishing.execute("COMMIT")
        stream.publish("second")
        assert (copied, stream.got()) == (2, ["first", "second"])


def test_the_locks_of_others_cannot_be_given_back(stream: Stream):
    stream.got()
    with stream.late("late") as late:
        late.query("SELECT pg_advisory_unlock_all()")
        stream.publish("x")
        assert stream.got() == []
    assert stream.got() == ["late", "x"]


def test_no_role_touches_anothers_subscription(stream: Stream, world: World):
    world.rules("user3 MINE Topic MINE RW 5")
    owner = world.program("user3")
    owner.got("MINE", "MINE", 10)
    owner.ok("publish", "MINE", "MINE", "x")
    before = owner.ok("subscription", "MINE", "MINE")
    for thief in map(world.program, ("hostile", "user2", "user1")):
        for function, arguments in {
            "subscribe": [60], "unsubscribe": [], "subscription": [], "publish": ["x"],
            "publish_many": [["x"]],
        }.items():  # fmt: skip
            assert thief.error(function, "MINE", "MINE", *arguments)[0] == 2
        assert thief.error("connect_stream", "MINE")[0] == 5
    assert owner.ok("subscription", "MINE", "MINE") == before
    assert owner.got("MINE", "MINE") == ["x"]


def test_a_role_without_the_right_cannot_hold_up_a_reader(stream: Stream):
    stream.got()
    stream.limit_waits()
    with stream.late(end="ROLLBACK") as thief:
        with pytest.raises(psycopg.Error), thief.connection.transaction():
            thief.read("SUB", "T")
        stream.publish("x")
        assert stream.got() == ["x"]


def test_an_uncommitted_subscription_holds_up_no_saving_of_rules(stream: Stream):
    stream.limit_waits()
    for turn in range(2):  # one subscribes, the other reads again
        with stream.subscriber.connection.transaction():
            stream.got()
            stream.world.rules(f"user3 X{turn} Topic X R 5")
