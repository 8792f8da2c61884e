"""Plans: with many queues and elements nothing is read whole, whatever is known of the tables."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.conftest import TestedServer
from tests.sql.conftest import Program, World
from tests.sql.reads import counting

pytestmark = pytest.mark.versions

SIZES = {"queues": 100, "each": 500}
FILL = (
    """
    INSERT INTO psqlmessages_queue (name, channel)
    SELECT 'Q' || n, 'c' || n FROM generate_series(1, %(queues)s) AS n
    """,
    """
    INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, body)
    SELECT q.id, now(), now() + make_interval(mins => mod(n, 2) * 10), 'x'
    FROM generate_series(1, %(each)s) AS n, psqlmessages_queue AS q
    """,
    """
    INSERT INTO psqlmessages_elementkey (queue_id, key, element_id, expires_at)
    SELECT q.id, 'k' || n, n, now() + interval '1 h'
    FROM generate_series(1, 20) AS n, psqlmessages_queue AS q
    """,
)
VACUUM = "VACUUM ANALYZE psqlmessages_element, psqlmessages_elementkey"
STATISTICS = """
    SELECT ARRAY[relpages > 0, reltuples = 0] FROM pg_class
    WHERE oid = 'psqlmessages_element'::regclass
"""


@pytest.fixture(scope="module", params=["emptied", "analyzed", "as if empty"])
def full(server: TestedServer, request) -> Iterator[World]:
    """Many queues with as many elements, half of them mature."""
    world = World(server)
    owner = world.owner.connection
    owner.execute("ALTER TABLE psqlmessages_element SET (autovacuum_enabled = off)")
    if request.param == "emptied":
        # VACUUM cannot shorten the file while another transaction sees the deleted rows.
        for statement in FILL[:2]:
            owner.execute(statement, SIZES)
        with psycopg.connect(server.url()) as other:
            other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            other.execute("SELECT")
            owner.execute("DELETE FROM psqlmessages_element; DELETE FROM psqlmessages_queue")
            owner.execute(VACUUM)
    else:
        owner.execute(VACUUM)
    assert world.owner.query(STATISTICS) == [request.param == "emptied", True]
    for statement in FILL:
        owner.execute(statement, SIZES)
    if request.param == "analyzed":
        owner.execute("ANALYZE psqlmessages_element, psqlmessages_elementkey, psqlmessages_queue")
    world.rules("user1 W Queue Q* RW 1", "user1 W Queue __deadletter__ RW 1")
    yield world
    owner.execute("ALTER TABLE psqlmessages_element RESET (autovacuum_enabled)")
    owner.execute("DELETE FROM psqlmessages_element")
    world.close()


@pytest.fixture
def program(full: World) -> Iterator[Program]:
    program = full.program("user1")
    program.connection.execute("BEGIN")
    yield program
    program.connection.execute("ROLLBACK")


@contextmanager
def at_most(program: Program, rows: int, what: str) -> Iterator[None]:
    """Assert that no table is read whole, and no more rows than that."""
    with counting(program) as found:
        yield
    for name in "element", "elementkey":
        scans, read = found.get(name, (0, 0))
        assert not scans, f"{what} reads all of {name}"
        assert read <= rows, f"{what} reads {read} rows of {name}"


def test_a_call_reads_few_rows(program: Program):
    """The tenth time, so that the plans are those that stay."""
    calls: list[tuple[str, tuple[object, ...], int]] = [
        ("push", ("x",), 10), ("push", ("x", None, None, None, None, 0, "k5"), 10),
        ("push_many", (["x"] * 10,), 10), ("pop", (), 60), ("pop", (10,), 200),
        ("reserve", (), 60), ("reserve", (10,), 200), ("take", (10,), 80),
        ("queue_listen", (), 30), ("remove", (1,), 10),
    ]  # fmt: skip
    for number, (function, arguments, rows) in enumerate(calls, 50):
        for _ in range(9):
            program.ok(function, "W", f"Q{number}", *arguments)
        with at_most(program, rows, function):
            program.ok(function, "W", f"Q{number}", *arguments)


@pytest.mark.parametrize("call", [("commit",), ("rollback", None), ("release",)])
def test_acknowledging_reads_few_rows(program: Program, call: tuple[str, ...]):
    function, *given = call
    leases = [row.lease for row in program.elements("reserve", "W", "Q50", 20)]
    # Once each, and then again and again the last one.
    for lease in leases[:9] + leases[-1:] * 9:
        program.ok(function, "W", *given, lease)
    with at_most(program, 20, function):
        program.ok(function, "W", *given, leases[-1])


@pytest.mark.parametrize("same", [[None] * 10, None], ids=["with all columns", "in brief"])
def test_delivering_reads_few_rows(program: Program, same: list[None] | None):
    for _ in range(8):
        ids = [str(row.id) for row in program.elements("take", "W", "Q50", 10)]
        copies = [ids, ["m"] * 10, ["Q51"] * 10, *[same] * 5]
        with at_most(program, 150, "deliver"):
            program.ok("deliver", "W", "Q50", ids, same and [], *copies)


def test_housekeeping_reads_few_rows(full: World, program: Program):
    del program
    owner = full.owner
    owner.connection.execute("UPDATE psqlmessages_queue SET max_tries = 3")
    with owner.connection.transaction(force_rollback=True):
        owner.connection.execute("UPDATE messages._queues SET maintained_at = 'epoch'")
        with at_most(owner, 50, "tending"):
            owner.query("SELECT messages._maintain_queues()")
