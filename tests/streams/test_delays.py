"""Open transactions of one role delay no call of another."""

from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor as Threads
from contextlib import suppress
from itertools import islice

import psycopg
import pytest

from tests.sql.conftest import Program, World
from tests.streams.conftest import PREPARED

# The role `hostile` publishes to OWN, and uses SHARED like the others. It has no rule for T and Q.
RULES = (
    "hostile H Topic OWN RW 10", "hostile H Topic SHARED RW 10", "hostile H Queue SHARED RW 10",
    "user1 V Topic T RW 10", "user1 V Topic SHARED RW 10", "user1 V Queue Q RW 10",
    "user1 V Queue SHARED RW 10", "user2 DEAD Topic T R 10", "user2 L Topic T R 10",
)  # fmt: skip
CONNECTIONS = 20
LIMIT = "2s"
# The test holds this lock: a statement that takes it waits as long as the test wants.
WAIT = "pg_advisory_lock_shared(77)"
CALLED = "SELECT messages.publish('H', 'OWN', 'x')"
# Runs deferred triggers before the commit, by a statement whose text does not say so.
EARLY = "DO $$ BEGIN EXECUTE 'SET CON' || 'STRAINTS ALL IMMEDIATE'; END $$"
CLASS = "SELECT messages._publish_lock_class(id) FROM psqlmessages_topic WHERE name = '{}'"
DEFERRED = """
    CREATE TABLE {0} (id int);
    CREATE FUNCTION {1}() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM """ + WAIT + """; RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON {0} DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION {1}();
"""  # fmt: skip
SETS = """
    CREATE FUNCTION pg_temp.sets() RETURNS text LANGUAGE {} AS
    $$ {} SET CONSTRAINTS ALL IMMEDIATE; {} $$
"""
# Each begins in autocommit; only the last statement may hang.
TRICKS: dict[str, tuple[str, ...]] = {
    "SET CONSTRAINTS": ("BEGIN", CALLED, "SET CONSTRAINTS ALL IMMEDIATE"),
    "a comment inside": ("BEGIN", CALLED, "SET/**/CONSTRAINTS ALL IMMEDIATE"),
    "a comment in front": (
        "BEGIN", CALLED, f"/*{'x' * 2000}*/ SET CONSTRAINTS messages.run_housekeeping IMMEDIATE",
    ),
    "all in one string": (f"BEGIN; {CALLED}; SET/**/CONSTRAINTS ALL IMMEDIATE; SELECT {WAIT}",),
    "constraints set before": ("BEGIN", "SET CONSTRAINTS ALL IMMEDIATE", CALLED),
    "a function that sets constraints": (
        SETS.format("plpgsql", "BEGIN", "RETURN ''; END"), "BEGIN", CALLED, "SELECT pg_temp.sets()",
    ),
    "a function of SQL": (
        SETS.format("sql", "", "SELECT ''"), "BEGIN", CALLED, "SELECT pg_temp.sets()",
    ),
    "one statement": (
        SETS.format("plpgsql", "BEGIN", f"PERFORM {WAIT}; RETURN ''; END"),
        f"{CALLED}, pg_temp.sets()",
    ),
    "a transaction that is prepared": ("BEGIN", CALLED, "PREPARE/**/TRANSACTION 'delays'"),
    "a trigger of a temporary table": (
        DEFERRED.format("pg_temp.own", "pg_temp.waits"),
        "BEGIN", CALLED, "INSERT INTO pg_temp.own VALUES (1)", "COMMIT",
    ),
    "a trigger of a table": (
        DEFERRED.format("delays.own", "delays.waits"),
        "BEGIN", CALLED, "INSERT INTO delays.own VALUES (1)", "COMMIT",
    ),
    "a cursor WITH HOLD": (
        "BEGIN", CALLED, f"DECLARE held CURSOR WITH HOLD FOR SELECT {WAIT}", "COMMIT",
    ),
    "a cursor WITH HOLD in one string": (
        f"{CALLED}; DECLARE held CURSOR WITH HOLD FOR SELECT {WAIT}",
    ),
    "a planner that searches for ever": (
        "BEGIN", CALLED, "SET geqo_threshold = 2; SET geqo_generations = 2147483647", "COMMIT",
    ),
    "a foreign key": ("BEGIN", CALLED, "INSERT INTO delays.child VALUES (1)", "COMMIT"),
    "evaluate": ("BEGIN", "SELECT messages.evaluate()", EARLY),
    "deinit": (
        "BEGIN", "SELECT messages.deinit('V')",
        f"DECLARE held CURSOR WITH HOLD FOR SELECT {WAIT}", "COMMIT",
    ),
    "a procedure": (
        f"DO $$ BEGIN PERFORM messages.push('H', 'SHARED', 'x'); COMMIT; PERFORM {WAIT}; END $$",
    ),
    "readers": (
        "BEGIN", "SELECT messages.stream_horizons('H', '{SHARED}')",
        "SELECT messages.subscribe_from('H', '{SHARED}', '{0}', 60)",
        "SELECT messages.subscribe('H', 'SHARED', 60)",
        "SELECT messages.subscription('H', 'SHARED')",
    ),
    "writers": (
        "BEGIN", CALLED, "SELECT messages.push('H', 'SHARED', 'x', key => 'hostile')",
        "SELECT messages.publish_many('H', 'OWN', '{a,b}')",
    ),
    "takers": (
        "SELECT messages.push('H', 'SHARED', 'x')", "BEGIN",
        "SELECT messages.reserve('H', 'SHARED', 60)", "SELECT messages.pop('H', 'SHARED')",
        "SELECT messages.sizes('H', 'SHARED')",
    ),
    "LOCK TABLE": ("BEGIN", "LOCK TABLE messages.stored, messages.queued IN ACCESS SHARE MODE"),
    "locks of publishers": (
        "BEGIN", CALLED, "SELECT pg_advisory_lock_shared({T}, 0)",
        "SELECT pg_advisory_lock_shared({SHARED}, 0)",
    ),
    "locks on numbers": (
        "SELECT count(pg_advisory_lock({T}, n)) FROM generate_series(0, 2000) AS n",
    ),
}  # fmt: skip


@pytest.fixture
def world(world: World) -> Iterator[World]:
    world.rules(*RULES)
    superuser = world.superuser().connection
    superuser.execute(
        "CREATE SCHEMA delays; GRANT ALL ON SCHEMA delays TO hostile;"
        "CREATE TABLE delays.parent (id int PRIMARY KEY); INSERT INTO delays.parent VALUES (1);"
        "CREATE TABLE delays.child"
        " (id int REFERENCES delays.parent DEFERRABLE INITIALLY DEFERRED);"
        "GRANT ALL ON ALL TABLES IN SCHEMA delays TO hostile"
    )
    yield world
    superuser.execute("DROP SCHEMA delays CASCADE")


def play(world: World, trick: tuple[str, ...], background: Threads) -> Future[None]:
    """Run the statements of a trick; the last one in the background."""
    hostile = world.program("hostile")
    classes = {topic: world.owner.query(CLASS.format(topic)) for topic in ("T", "SHARED")}
    *steps, last = (
        step.replace("{T}", f"{classes['T']}").replace("({SHARED}", f"({classes['SHARED']}")
        for step in trick
    )
    for step in steps:
        hostile.execute(step)

    def end() -> None:
        with suppress(psycopg.Error):  # The test ends it.
            hostile.execute(last)

    condition = """
        SELECT state LIKE 'idle%%' OR wait_event IN ('advisory', 'transactionid')
        FROM pg_stat_activity WHERE pid = %s
    """
    ended, pid = background.submit(end), hostile.pid
    world.wait_for(condition, pid)
    return ended


class Calls:
    """The calls of another role; one that waits for a lock raises."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.victim, self.node = world.program("user1"), self._node()
        self.victim.execute(f"SET lock_timeout = '{LIMIT}'")

    def _node(self) -> Program:
        node = self.world.program("user2")
        node.execute(f"SET lock_timeout = '{LIMIT}'")
        node.ok("init", "DEAD")
        node.ok("topic_listen", "T")
        return node

    def let_housekeeping_be_due(self) -> None:
        """Let the next call have a table to empty and a dead node to find."""
        self.victim.ok("publish", "V", "T", "old")
        self.victim.got("V", "T")
        self.world.kill(self.node)
        long_ago = "maintained_at = 'epoch', switched_at = 'epoch'"
        self.world.execute(f"UPDATE messages._stream SET {long_ago}")

    def make(self) -> None:
        """Make all calls, to an own topic and queue and to shared ones."""
        victim = self.victim
        for topic in "T", "SHARED":
            victim.ok("publish", "V", topic, "new")
            victim.ok("subscription", "V", topic)
            assert "new" in victim.got("V", topic)
        for queue in "Q", "SHARED":
            victim.ok("push", "V", queue, "new")
            if taken := victim.elements("reserve", "V", queue):
                victim.ok("commit", "V", [taken[0].lease])
            victim.ok("push", "V", queue, "new")
            victim.elements("pop", "V", queue)
        victim.ok("topic_send", "T", "new")
        self.node = self._node()


@pytest.fixture
def calls(world: World) -> Calls:
    """The calls of V, which is subscribed, and sends to T, to which L listens."""
    world.node("user2", "L").ok("topic_listen", "T")
    calls = Calls(world)
    calls.victim.ok("init", "V")
    calls.victim.ok("topic_notify", "T")
    for topic in "T", "SHARED":
        calls.victim.got("V", topic)
    return calls


@pytest.fixture
def background(world: World) -> Iterator[Threads]:
    """Threads for statements that wait for locks of this fixture."""
    holder = world.superuser().connection
    holder.execute("BEGIN; SELECT pg_advisory_lock(77); SELECT FROM delays.parent FOR UPDATE")
    with Threads(CONNECTIONS) as threads:
        yield threads
        end_all(world)
    holder.execute("ROLLBACK")


def end_all(world: World) -> None:
    """End the sessions and prepared transactions of the role."""
    world.end_backends("usename = 'hostile'")
    for (gid,) in world.watcher.execute(PREPARED).fetchall():
        world.watcher.execute(f"ROLLBACK PREPARED '{gid}'")


def test_nothing_left_open_delays_a_call(world: World, calls: Calls, background: Threads):
    failed = {}
    for name, trick in TRICKS.items():
        calls.let_housekeeping_be_due()
        ended = play(world, trick, background)
        try:
            calls.make()
        except (psycopg.Error, AssertionError) as error:
            failed[name] = str(error)
        end_all(world)
        ended.result()
    assert failed == {}


def test_a_temporary_table_delays_no_call(world: World, calls: Calls, background: Threads):
    temporary = world.program("hostile")
    temporary.execute(
        "CREATE TEMPORARY TABLE own (id int) ON COMMIT DELETE ROWS;"
        "CREATE TEMPORARY VIEW shown AS SELECT * FROM own"
    )
    view = temporary.query("SELECT 'pg_temp.shown'::regclass::oid")
    other = world.program("hostile")
    other.execute(f"BEGIN; SELECT pg_get_viewdef({view})")
    calls.let_housekeeping_be_due()
    temporary.execute(f"BEGIN; {CALLED}; SELECT FROM pg_temp.own")
    ended = background.submit(temporary.connection.execute, "COMMIT")
    waits = "SELECT count(*) > 0 FROM pg_locks WHERE pid = %s AND NOT granted"
    world.wait_for(waits, temporary.pid)
    calls.make()
    other.execute("ROLLBACK")
    ended.result()


# The nightly one opens the number of docs/explanation/reliability.md: each compiles all functions.
@pytest.mark.parametrize("connections", [5, pytest.param(CONNECTIONS, marks=pytest.mark.nightly)])
def test_a_crowd_delays_no_call(world: World, calls: Calls, background: Threads, connections: int):
    calls.let_housekeeping_be_due()
    for trick in islice(TRICKS.values(), connections):
        play(world, trick, background)
    calls.make()
