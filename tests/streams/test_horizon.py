"""The horizon: no message is passed over because it commits late, and nobody else holds it back."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import Stream


def test_a_lower_id_that_commits_later_is_not_passed_over(stream: Stream, world: World) -> None:
    stream.got()
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "late")
    stream.publish("early")
    held_back = stream.got()
    late.connection.execute("COMMIT")
    assert (held_back, stream.got()) == ([], ["late", "early"])


def test_a_lower_id_that_is_rolled_back_holds_up_nobody_after_that(
    stream: Stream, world: World
) -> None:
    stream.got()
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "never")
    stream.publish("x")
    late.connection.execute("ROLLBACK")
    assert stream.got() == ["x"]


def test_what_a_savepoint_gave_back_holds_up_nobody(stream: Stream) -> None:
    stream.got()
    connection = stream.publisher.connection
    with connection.transaction():
        with connection.transaction(force_rollback=True):
            stream.publish("never")
        other = stream.world.program("user1")
        other.ok("publish", "PUB", "T", "x")
        assert stream.got() == ["x"]


def test_the_second_publish_of_a_transaction_is_covered_by_the_first_ones_lock(
    stream: Stream, world: World
) -> None:
    stream.got()
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "one")
    with late.connection.transaction(force_rollback=True):
        late.ok("publish", "PUB", "T", "never")
    late.ok("publish", "PUB", "T", "two")
    stream.publish("x")
    held_back = stream.got()
    late.connection.execute("COMMIT")
    assert (held_back, stream.got()) == ([], ["one", "two", "x"])


def test_a_transaction_that_has_written_before_holds_back_readers_too(
    stream: Stream, world: World
) -> None:
    stream.got()
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.query("SELECT pg_current_xact_id()")
    late.ok("publish", "PUB", "T", "late")
    stream.publish("early")
    held_back = stream.got()
    late.connection.execute("COMMIT")
    assert (held_back, stream.got()) == ([], ["late", "early"])


def test_an_unrelated_transaction_that_writes_holds_nobody_back(
    stream: Stream, world: World
) -> None:
    world.owner.connection.execute("BEGIN")
    world.owner.connection.execute("CREATE TEMP TABLE unrelated AS SELECT 1")
    stream.got()
    stream.publish("x")
    assert stream.got() == ["x"]
    world.owner.connection.execute("ROLLBACK")


def test_a_publisher_of_another_topic_holds_nobody_back(stream: Stream, world: World) -> None:
    stream.publish("x", topic="NEW.1")
    stream.got()
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "NEW.1", "late")
    stream.publish("x")
    assert stream.got() == ["x"]
    late.connection.execute("COMMIT")


def test_topics_whose_locks_have_one_class_wait_for_their_own_publishers_only(
    stream: Stream, world: World
) -> None:
    world.owner.connection.execute(
        "UPDATE psqlmessages_topic SET id = 70000 WHERE name = 'T';"
        "INSERT INTO psqlmessages_topic (id, name) OVERRIDING SYSTEM VALUE"
        " VALUES (70000 + 65536, 'TWIN')"
    )
    world.rules("user1 PUB Topic TWIN W 5", "user2 SUB Topic TWIN R 5")
    stream.got()
    stream.got(topic="TWIN")
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "TWIN", "late")
    stream.publish("x")
    found = stream.got(), stream.got(topic="TWIN")
    late.connection.execute("COMMIT")
    assert (*found, stream.got(topic="TWIN")) == (["x"], [], ["late"])


def test_a_publisher_that_lies_idle_in_its_transaction_holds_back_its_topic_until_it_is_ended(
    stream: Stream, world: World
) -> None:
    stream.got()
    idle = world.program("user1")
    idle.connection.execute("BEGIN")
    idle.ok("publish", "PUB", "T", "never")
    stream.publish("x")
    assert stream.got() == []
    world.kill(idle)
    assert stream.got() == ["x"]


def test_who_subscribes_while_a_publisher_is_in_its_transaction_gets_what_it_commits(
    stream: Stream, world: World
) -> None:
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "late")
    assert stream.got() == []
    late.ok("publish", "PUB", "T", "later")
    late.connection.execute("COMMIT")
    assert stream.got() == ["late", "later"]


def test_a_subscription_that_starts_afresh_never_goes_back_over_what_it_read(
    stream: Stream, world: World
) -> None:
    stream.got(timeout=10)
    holding = world.program("user1")
    stream.publish("read")
    holding.connection.execute("BEGIN")
    assert stream.got(timeout=10) == ["read"]
    holding.ok("publish", "PUB", "T", "never")
    stream.age(10)
    stream.got(timeout=10)
    holding.connection.execute("ROLLBACK")
    assert stream.got(timeout=10) == []


@pytest.mark.parametrize("near", [2**31, 2**32, 2**33 - 1, 2**40])
def test_ids_pass_the_bounds_of_the_locks_numbers(stream: Stream, world: World, near: int) -> None:
    world.owner.query("SELECT setval('messages._stream_id', %s)", near - 5)
    stream.got()
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "late")
    stream.publish(*"abcdefghij")
    held_back = stream.got()
    late.connection.execute("COMMIT")
    assert (held_back, stream.got()) == ([], ["late", *"abcdefghij"])


@pytest.fixture
def prepared(stream: Stream, world: World) -> Iterator[Program]:
    """Another publisher, beside one whose transaction is prepared."""
    stream.got()
    stream.publisher.connection.execute("BEGIN")
    stream.publish("prepared")
    stream.publisher.connection.execute("PREPARE TRANSACTION 'streams'")
    yield world.program("user1")
    left = world.watcher.query("SELECT count(*) FROM pg_prepared_xacts")
    assert left == 0


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_prepared_transaction_is_not_passed_over(
    stream: Stream, world: World, prepared: Program, end: str
) -> None:
    prepared.ok("publish", "PUB", "T", "x")
    held_back = stream.got()
    removed = [stream.prune(), stream.tend()]
    stream.publisher.connection.execute(f"{end} PREPARED 'streams'")
    expected = ["prepared", "x"] if end == "COMMIT" else ["x"]
    assert (held_back, removed, stream.got()) == ([], [0, 0], expected)


@pytest.mark.parametrize(
    "early", ["PREPARE TRANSACTION 'streams'", "SET CONSTRAINTS ALL IMMEDIATE"]
)
def test_who_ends_a_transaction_in_two_steps_holds_up_neither_removal_nor_readers(
    stream: Stream, world: World, early: str
) -> None:
    stream.publish("x")
    world.owner.connection.execute(
        "UPDATE messages._stream SET tended_at = 'epoch', switched_at = 'epoch'"
    )
    stream.publisher.query("SELECT set_config('messages.evaluated', '', false)")
    stream.publisher.connection.execute("BEGIN")
    stream.publish("y")
    stream.publisher.connection.execute(early)
    world.owner.connection.execute("SET statement_timeout = '30s'")
    stream.subscriber.connection.execute("SET statement_timeout = '30s'")
    assert (stream.tend(), stream.got()) == (0, [])
    is_prepared = early.startswith("PREPARE")
    stream.publisher.connection.execute(
        "ROLLBACK PREPARED 'streams'" if is_prepared else "ROLLBACK"
    )
    assert stream.tend() == 1


# Hostile locks: any role may take any advisory lock.


CLASS = "SELECT messages._stream_lock(id) FROM psqlmessages_topic WHERE name = 'T'"


@pytest.fixture
def lock_class(stream: Stream, world: World) -> int:
    """The class of the locks of publishers to T."""
    return int(world.owner.query(CLASS))


def take(program: Program, mode: str, lock_class: int, first: int, last: int) -> None:
    """Take advisory locks of a class."""
    program.query(
        f"SELECT count(pg_advisory_lock{mode}(%s, n::bit(32)::int))"
        " FROM generate_series(%s::bigint, %s::bigint) AS n",
        lock_class, first, last,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["", "_shared"])
def test_a_hostile_lock_does_not_stop_readers(
    stream: Stream, world: World, lock_class: int, mode: str
) -> None:
    stream.got()
    hostile = world.program("hostile")
    take(hostile, mode, lock_class, 0, 10)
    now = world.owner.query("SELECT last_value FROM messages._stream_id")
    take(hostile, mode, lock_class, now - 10, now + 10)
    stream.publish("x", "y")
    assert stream.got() == ["x", "y"]


def test_a_hostile_lock_counts_for_no_one_elses_transaction(
    stream: Stream, world: World, lock_class: int
) -> None:
    stream.publish("x", topic="NEW.1")
    stream.got()
    take(world.program("hostile"), "_shared", lock_class, 0, 10)
    other = world.program("user1")
    with other.connection.transaction():
        other.ok("publish", "PUB", "NEW.1", "of another topic")
        stream.publish("x")
        assert stream.got() == ["x"]


def test_hostile_locks_do_not_block_publishers_and_no_message_is_lost(
    stream: Stream, world: World, lock_class: int
) -> None:
    stream.got()
    hostile = world.program("hostile")
    now = world.owner.query("SELECT last_value FROM messages._stream_id")
    take(hostile, "", lock_class, now - 1000, now + 1000)
    stream.publisher.connection.execute("SET statement_timeout = '30s'")
    late = world.program("user1")
    late.connection.execute("BEGIN")
    late.ok("publish", "PUB", "T", "late")
    stream.publish(*"abc")
    held_back = stream.got()
    late.connection.execute("COMMIT")
    assert (held_back, stream.got()) == ([], ["late", *"abc"])


def test_a_number_ahead_of_the_sequence_holds_nobody_back(stream: Stream, world: World) -> None:
    """As that of a publisher who came after a reader had read the sequence."""
    stream.got()
    now = world.owner.query("SELECT last_value FROM messages._stream_id")
    with world.owner.connection.transaction():
        world.owner.query(
            "SELECT messages._mark_publishing(%s, %s, s.secret) FROM messages._stream AS s",
            topic_id(world),
            now + 100,
        )
        stream.publish("x")
        assert stream.got() == ["x"]


def test_a_number_behind_what_was_read_brings_nothing_back(stream: Stream, world: World) -> None:
    """As that of a publisher who read the sequence, and took its lock only much later."""
    stream.got()
    before = world.owner.query("SELECT last_value FROM messages._stream_id")
    stream.publish("read")
    late = world.program("user1")
    with late.connection.transaction():
        late.ok("publish", "PUB", "NEW.1", "x")
        assert stream.got() == ["read"]
        mark(late, topic_id(world), before)
        late.ok("publish", "PUB", "T", "late")
        assert stream.got() == []
    assert stream.got() == ["late"]


def topic_id(world: World) -> int:
    """The id of T."""
    return int(world.owner.query("SELECT id FROM psqlmessages_topic WHERE name = 'T'"))


def mark(program: Program, topic: int, number: object) -> None:
    """Forge the mark of a transaction that has published to a topic from a number on."""
    program.query(
        "SELECT set_config('messages.publishing', %s, false)", f",{topic},,{topic}={number},"
    )


@pytest.mark.parametrize("ahead", [-5_000_000_000, -1, 0, 1, 5_000_000_000, "", "junk", "9" * 30])
def test_no_message_of_a_forged_mark_is_passed_over(
    stream: Stream, world: World, ahead: int | str
) -> None:
    stream.got()
    forger = world.program("user1")
    number = ahead
    if isinstance(ahead, int):
        number = world.owner.query("SELECT last_value FROM messages._stream_id") + ahead
    with forger.connection.transaction():
        forger.ok("publish", "PUB", "NEW.1", "x")
        mark(forger, topic_id(world), number)
        forger.ok("publish", "PUB", "T", "forged")
        stream.publish("x")
        assert stream.got() == []
    assert stream.got() == ["forged", "x"]


def test_a_mark_that_outlives_its_savepoint_is_not_believed(stream: Stream) -> None:
    stream.got()
    connection = stream.publisher.connection
    with connection.transaction():
        with connection.transaction(force_rollback=True):
            stream.publish("a", "b", "c")
            mark = stream.publisher.query("SELECT current_setting('messages.publishing')")
        stream.publisher.query("SELECT set_config('messages.publishing', %s, true)", mark)
        stream.publish("x")
        other = stream.world.program("user1")
        other.ok("publish", "PUB", "T", "y")
        assert stream.got() == []
    assert stream.got() == ["x", "y"]


@pytest.mark.parametrize("junk", ["", ",", ",,", "x" * 100_000, "🐘", "',0,'", "\n"])
def test_junk_in_the_mark_does_no_harm(stream: Stream, junk: str) -> None:
    stream.got()
    stream.publisher.query("SELECT set_config('messages.publishing', %s, false)", junk)
    with stream.publisher.connection.transaction():
        stream.publish("x", "y")
    assert stream.got() == ["x", "y"]


def test_the_locks_of_a_publisher_hold_nobody_back_in_the_hands_of_another(
    stream: Stream, world: World
) -> None:
    """Who may publish something else copies all locks that it sees."""
    stream.got()
    publishing, thief = world.program("user1"), world.program("user1")
    publishing.connection.execute("BEGIN")
    publishing.ok("publish", "PUB", "T", "first")
    with thief.connection.transaction():
        thief.ok("publish", "PUB", "NEW.1", "x")
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
        publishing.connection.execute("COMMIT")
        stream.publish("second")
        assert (copied, stream.got()) == (2, ["first", "second"])


def test_the_locks_of_others_cannot_be_given_back(stream: Stream) -> None:
    stream.got()
    with stream.publisher.connection.transaction():
        stream.publish("late")
        stream.publisher.query("SELECT pg_advisory_unlock_all()")
        other = stream.world.program("user1")
        other.ok("publish", "PUB", "T", "x")
        assert stream.got() == []
    assert stream.got() == ["late", "x"]


def test_the_mark_of_a_transaction_is_gone_with_it(stream: Stream) -> None:
    with stream.publisher.connection.transaction():
        # The first that a transaction writes needs no mark.
        stream.publish("x", "y")
        during = stream.publisher.query("SELECT current_setting('messages.publishing')")
    after = stream.publisher.query("SELECT current_setting('messages.publishing')")
    assert (during != "", after) == (True, "")


@pytest.mark.parametrize("role", ["hostile", "user2", "user1"])
def test_no_role_reads_pings_or_ends_the_subscription_of_another(
    stream: Stream, world: World, role: str
) -> None:
    world.rules("user3 MINE Topic MINE RW 5")
    owner = world.program("user3")
    owner.got("MINE", "MINE", 10)
    owner.ok("publish", "MINE", "MINE", "x")
    thief = world.program(role)
    before = owner.ok("subscription", "MINE", "MINE")
    for function, arguments in {
        "subscribe": [60], "unsubscribe": [], "subscription": [], "publish": ["x"],
        "publish_many": [["x"]],
    }.items():  # fmt: skip
        assert thief.error(function, "MINE", "MINE", *arguments)[0] == 2
    assert thief.error("connect_stream", "MINE")[0] == 5
    assert owner.ok("subscription", "MINE", "MINE") == before
    assert owner.got("MINE", "MINE") == ["x"]


def test_a_role_without_the_right_cannot_hold_up_a_reader(stream: Stream, world: World) -> None:
    stream.got()
    thief = world.program("user1")
    stream.subscriber.connection.execute("SET statement_timeout = '30s'")
    thief.connection.execute("BEGIN")
    with pytest.raises(psycopg.Error), thief.connection.transaction():
        thief.read("SUB", "T")
    stream.publish("x")
    assert stream.got() == ["x"]
