"""Plans: at thousands of topics and subscriptions and many messages nothing is read whole."""

from collections.abc import Iterator

import pytest

from tests.conftest import TestedServer
from tests.sql.conftest import TABLES, World
from tests.sql.reads import large_reads, reads

pytestmark = [pytest.mark.versions, pytest.mark.timeout(900)]
TOPICS = 2_000
# The nightly run makes a million messages first.
SIZES = [100_000, pytest.param(1_000_000, marks=pytest.mark.nightly)]
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
    "ANALYZE psqlmessages_auth, psqlmessages_topic, psqlmessages_subscription",
]
LARGE = ("streammessage_", "topic", "auth", "subscription")
# A reading returns 50 to 100, and each is read once.
MOST_ROWS = 250
CALLS = [
    ("publish", ("N7", "T7", "x")), ("publish_many", ("N7", "T7", ["x"] * 10)),
    ("subscribe", ("N7", "T7", 60, 100)), ("subscribe", ("N7", "T888", 60, 100)),
    ("subscription", ("N7", "T7")), ("unsubscribe", ("N7", "T7")),
    ("topic_send_as", ("N7", "T7", "x")),
]  # fmt: skip


def test_a_plan_made_while_the_tables_were_empty_serves_when_they_are_full(world: World):
    world.rules("user1 A Topic T RW 5", "user1 B Topic T RW 5")
    program = world.program("user1", is_fresh=True)
    for _ in range(8):
        program.ok("publish", "A", "T", "x")
        program.got("B", "T")
        program.ok("subscription", "B", "T")
    program.ok("publish_many", "A", "T", ["x"] * 20_000)
    for function, arguments in (("subscribe", ("B", "T", 60, 100)), ("subscription", ("B", "T"))):
        found = reads(program, function, *arguments).items()
        scans = [scans for name, (scans, _) in found if name.startswith("streammessage_")]
        assert scans
        assert not any(scans)


@pytest.fixture(scope="module", params=SIZES)
def full(server: TestedServer, request) -> Iterator[World]:
    """All those topics, subscriptions and messages; two of the four tables are empty."""
    world = World(server)
    try:
        # Nothing is tended meanwhile.
        world.execute("UPDATE messages._stream SET slot = 2, maintained_at = 'infinity'")
        world.rules("user1 N7 Topic T888 RW 5")
        for statement in BULK:
            values = {"topics": TOPICS, "messages": request.param}
            world.execute(statement, values if "%" in statement else None)
        yield world
    finally:
        tables = ", ".join(f"psqlmessages_{name}" for name in (*TABLES, "streammessage"))
        world.execute(f"TRUNCATE {tables}, messages._last_removed_message")
        world.execute("UPDATE messages._stream SET slot = 0, maintained_at = now()")
        world.execute("ANALYZE")
        world.close()


def test_no_call_of_streams_scans_a_large_table(full: World):
    wrong = {}
    for function, arguments in CALLS:
        # A new connection, whose plans are its own: first for these arguments, then for any.
        program = full.program("user1", is_fresh=True)
        for turn in range(8):
            if found := large_reads(program, LARGE, MOST_ROWS, function, *arguments):
                wrong[function, arguments, turn] = found
    assert wrong == {}, "scans and rows"
