"""Plans: at 10,000 topics and subscriptions and a million messages nothing is read whole."""

from collections.abc import Iterator
from time import perf_counter

import pytest

from tests.conftest import TestedServer
from tests.sql.conftest import TABLES, Program, World

TOPICS, MESSAGES = 10_000, 1_000_000
# A million messages are made first.
pytestmark = pytest.mark.timeout(900)
BULK = [
    """
    INSERT INTO psqlmessages_auth (role, ident, type, dest, mode, timeout)
    SELECT 'user1', 'N' || n, 'Topic', 'T' || n, 'RW', 5 FROM generate_series(1, %(topics)s) AS n
    """,
    """
    INSERT INTO psqlmessages_subscription (ident, topic, position, timeout)
    SELECT 'N' || n, 'T' || n, 0, 100000 FROM generate_series(1, %(topics)s) AS n
    """,
    "SELECT messages._rebuild_topics(ARRAY(SELECT id FROM psqlmessages_topic))",
    """
    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, payload)
    SELECT t.id, nextval('messages._stream_id'), mod(n, 2), 'N1', clock_timestamp(), 'x'
    FROM generate_series(1, %(messages)s / %(topics)s) AS n, psqlmessages_topic AS t
    """,
]
READ = """
    SELECT relname::text, seq_scan, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
    FROM pg_stat_xact_user_tables
    WHERE relname ^@ 'psqlmessages_streammessage_'
        OR relname IN ('psqlmessages_topic', 'psqlmessages_auth', 'psqlmessages_subscription')
"""
# A reading returns 100, and each is read once.
MOST_ROWS = 250


def test_a_plan_made_while_the_tables_were_empty_serves_when_they_are_full(
    server: TestedServer,
) -> None:
    world = World(server)
    world.rules("user1 A Topic T RW 5", "user1 B Topic T RW 5")
    program = world.program("user1")
    try:
        for _ in range(8):
            program.ok("publish", "A", "T", "x")
            program.got("B", "T")
            program.ok("subscription", "B", "T")
        program.ok("publish_many", "A", "T", ["x"] * 50_000)
        assert [scans_of(program, each) for each in ("subscribe", "subscription")] == [0, 0]
    finally:
        world.close()


def scans_of(program: Program, function: str) -> int:
    """How many sequential scans of messages a call makes."""
    scans = "SELECT sum(seq_scan) FROM pg_stat_xact_user_tables WHERE relname ^@ %s"
    arguments = (60, 100) if function == "subscribe" else ()
    program.connection.execute("BEGIN")
    before = program.query(scans, "psqlmessages_streammessage_") or 0
    program.ok(function, "B", "T", *arguments)
    after = program.query(scans, "psqlmessages_streammessage_") or 0
    program.connection.execute("ROLLBACK")
    return int(after - before)


@pytest.fixture(scope="module")
def full(server: TestedServer) -> Iterator[World]:
    """All those topics, subscriptions and messages; two of the four tables are empty."""
    world = World(server)
    try:
        begun = perf_counter()
        # Nothing is tended meanwhile.
        world.owner.connection.execute(
            "UPDATE messages._stream SET slot = 2, tended_at = 'infinity'"
        )
        values = {"topics": TOPICS, "messages": MESSAGES}
        for statement in BULK:
            world.owner.connection.execute(statement, values)
        world.owner.connection.execute("ANALYZE psqlmessages_auth, psqlmessages_topic")
        world.owner.connection.execute("ANALYZE psqlmessages_subscription")
        print(f"\n{MESSAGES} messages made in {perf_counter() - begun:.1f} s")
        yield world
    finally:
        tables = ", ".join(f"psqlmessages_{name}" for name in (*TABLES, "streammessage"))
        world.owner.connection.execute(f"TRUNCATE {tables}, messages._stream_last")
        world.owner.connection.execute("UPDATE messages._stream SET slot = 0, tended_at = now()")
        world.owner.connection.execute("ANALYZE")
        world.close()


@pytest.fixture
def program(full: World) -> Iterator[Program]:
    """A new connection, whose plans are its own."""
    program = full.program("user1")
    yield program
    program.connection.execute("ROLLBACK")


def read(program: Program) -> dict[str, tuple[int, int]]:
    """Sequential scans in the transaction under way, and rows read in any way."""
    rows = program.connection.execute(READ).fetchall()
    return {name: (scans or 0, read) for name, scans, read in rows}


def assert_reads_little(program: Program, function: str, *arguments: object) -> None:
    """Call a function: no table may be read from end to end, nor more than a few rows."""
    program.connection.execute("BEGIN")
    before = read(program)
    program.ok(function, *arguments)
    after = read(program)
    program.connection.execute("ROLLBACK")
    wrong = {
        name: (counts, before.get(name))
        for name, counts in after.items()
        if counts[0] > before.get(name, (0, 0))[0]
        or counts[1] > before.get(name, (0, 0))[1] + MOST_ROWS
    }
    assert not wrong, f"{function} (scans, rows), after and before: {wrong}"


CALLS = [
    ("publish", ("N7", "T7", "x")),
    ("publish_many", ("N7", "T7", ["x"] * 10)),
    ("subscribe", ("N7", "T7", 60, 100)),
    ("subscribe", ("N7", "T8888", 60, 100)),
    ("subscription", ("N7", "T7")),
    ("unsubscribe", ("N7", "T7")),
    ("topic_send_as", ("N7", "T7", "x")),
]


@pytest.mark.parametrize("repeated", [1, 8])
@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_no_call_of_streams_reads_a_big_table_whole(
    full: World, program: Program, function: str, arguments: tuple[object, ...], repeated: int
) -> None:
    if arguments[1] == "T8888":
        full.rules("user1 N7 Topic T8888 RW 5")
    for _ in range(repeated - 1):
        with program.connection.transaction(force_rollback=True):
            program.ok(function, *arguments)
    assert_reads_little(program, function, *arguments)
    full.owner.connection.execute(
        "DELETE FROM psqlmessages_auth WHERE ident = 'N7' AND dest = 'T8888'"
    )


def test_the_measure_notices_where_indexes_are_switched_off(program: Program) -> None:
    for kind in "indexscan", "indexonlyscan", "bitmapscan":
        program.connection.execute(f"SET enable_{kind} = off")
    with pytest.raises(AssertionError, match="scans, rows"):
        assert_reads_little(program, "subscribe", "N7", "T7", 60, 100)


def test_what_calls_and_removal_take_at_that_scale_is_printed(
    full: World, program: Program
) -> None:
    for function, arguments in CALLS[:3]:
        begun = perf_counter()
        program.ok(function, *arguments)
        print(f"\n{function:22}{(perf_counter() - begun) * 1000:8.1f} ms", end="")
    owner = full.owner
    for what in ("_is_needed(0)", "_needed_bytes(0)", "_move_needed(0)", "_expire_subscriptions()"):
        begun = perf_counter()
        owner.query(f"SELECT messages.{what}")
        print(f"\n{what:22}{(perf_counter() - begun) * 1000:8.1f} ms", end="")
    owner.connection.execute("UPDATE psqlmessages_subscription SET position = 9000000000000000")
    for what in ("_is_needed(0)", "_needed_bytes(0)", "_empty_stream_table(0)"):
        begun = perf_counter()
        owner.query(f"SELECT messages.{what}")
        print(f"\n{what:22}{(perf_counter() - begun) * 1000:8.1f} ms (all passed)", end="")
    print()
