"""Load: many at once push, take, commit and give back; nothing is lost or doubled."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial

import psycopg
import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import Program, World
from tests.sql.simultaneous import together

WORKERS, PUSHES = 6, 120


@pytest.fixture
def held(world: World) -> Iterator[psycopg.Connection]:
    with psycopg.connect(world.server.url()) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM pg_class")
        yield connection


def work(program: Program, seed: int, is_over: threading.Event) -> list[str]:
    """Take elements until the event is set; return the bodies that were committed or popped."""
    dice, done = random.Random(seed), list[str]()  # noqa: S311
    while not is_over.is_set():
        is_pop, is_lost = dice.random() < 0.3, dice.random() < 0.2
        seconds = 0.5 if dice.random() < 0.05 else 60
        with program.connection.transaction(force_rollback=is_lost):
            if is_pop:
                rows = program.elements("pop", "GET", "Q", 3)
            else:
                rows = program.elements("reserve", "GET", "Q", dice.randint(1, 5), seconds)
            if is_lost:
                program.query("SELECT pg_sleep(%s)", 0.1 * dice.random())
        if is_lost:
            continue
        if is_pop:
            done += [row.body for row in rows]
        # The leases of short reservations expire.
        for row in rows if seconds == 60 and not is_pop else []:
            act = dice.choice(["commit", "commit", "rollback", "release"])
            given = (None,) if act == "rollback" else ()
            assert program.ok(act, "GET", *given, row.lease)["Done"] == [True]
            if act == "commit":
                done.append(row.body)
    return done


@pytest.mark.versions
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("held")
def test_nothing_is_lost_or_doubled_under_load(queue: Queue, world: World):
    is_over = threading.Event()

    def push_all() -> list[str]:
        try:
            programs = [world.program("user1") for _ in range(4)]
            together(*(partial(push, program, number) for number, program in enumerate(programs)))
            world.wait_for("SELECT count(*) = 0 FROM psqlmessages_element")
        finally:
            is_over.set()
        return []

    readers = [partial(work, world.program("user2"), seed, is_over) for seed in range(WORKERS)]
    done = Counter(body for bodies in together(push_all, *readers) for body in bodies)
    assert done == Counter(f"{n}.{i}" for n in range(4) for i in range(PUSHES))
    counts = queue.counts()
    assert (counts["puts"], counts["gets"] + counts["commits"]) == (4 * PUSHES, 4 * PUSHES)


def push(program: Program, number: int) -> None:
    for i in range(PUSHES):
        body = f"{number}.{i}"
        with program.connection.transaction(force_rollback=True):
            program.ok("push", "PUT", "Q", f"never {body}")
        for _ in range(2 if i % 3 == 0 else 1):
            key = body if i % 3 == 0 else None
            mature = "epoch" if i % 20 == 7 else None
            with program.connection.transaction():
                program.ok("push", "PUT", "Q", body, None, None, mature, None, 0, key)
                if i % 10 == number:
                    program.query("SELECT pg_sleep(0.1)")


@pytest.mark.usefixtures("held")
def test_readers_skip_removed_elements_while_a_transaction_is_open(queue: Queue, world: World):
    """Counted in index entries and scans: timings say little on a busy machine."""
    read = "SELECT {} FROM pg_stat_user_indexes WHERE indexrelname = '{}'"
    by_order = read.format("idx_tup_read", "element_by_availability")
    by_key = read.format("idx_scan", "psqlmessages_element_pkey")
    for _ in range(20):
        queue.pusher.ok("push_many", "PUT", "Q", ["x"] * 200)
        assert len(queue.pop(200)) == 200
    # Vacuum then counts no rows, and PostgreSQL takes every index for an empty one.
    world.owner.execute("VACUUM ANALYZE psqlmessages_element")
    queue.pusher.ok("push_many", "PUT", "Q", ["y"] * 50)
    # After a stall, the start of the readers would move later: it may take a twentieth of the time.
    world.execute("UPDATE messages._scan_start SET seconds = 0")
    for program in world.owner, queue.reader:
        program.execute("SELECT pg_stat_force_next_flush()")
    entries, scans = world.owner.query(by_order), world.owner.query(by_key)
    for _ in range(50):
        assert len(queue.reserve(1)) == 1
    queue.reader.execute("SELECT pg_stat_force_next_flush()")
    assert world.owner.query(by_order) - entries < 50 * 400
    assert world.owner.query(by_key) - scans >= 50
