"""Benchmark of waiting: how soon a reader of another process has what is pushed to an idle queue.

python -m benchmarks.waiting [--rounds 5] [--quick] [--json FILE]

Two elements are pushed 10 ms apart, and each is timed. The clock is one for all processes of a
machine, so a delay is the reader's time less the pusher's. The bare hop is of a NOTIFY that is
written nowhere; by hand, an element is inserted and notified, and taken by a DELETE.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from threading import Event
from time import perf_counter

import psycopg

from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server
from psqlmessages import Node

SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT current_user, a.ident, 'Queue', 'idle', 'RW', 60
    FROM unnest('{PUSHER,READER}'::text[]) AS a (ident)
"""
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
APART_SECONDS, IDLE_SECONDS = 0.010, 0.030
BY_HAND = """
    CREATE TABLE idle_by_hand (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        body text NOT NULL,
        available_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE INDEX ON idle_by_hand (available_at, id)
"""
PUSH_BY_HAND = """
    WITH pushed AS (INSERT INTO idle_by_hand (body) VALUES ('x') RETURNING id)
    SELECT pg_notify('idle_by_hand', '') FROM pushed
"""
TAKE_BY_HAND = """
    DELETE FROM idle_by_hand WHERE id = ANY (ARRAY(
        SELECT id FROM idle_by_hand WHERE available_at <= now()
        ORDER BY available_at, id LIMIT 1 FOR UPDATE SKIP LOCKED))
    RETURNING id
"""
NODE, SQL, HAND, HOP = "Node", "SQL", "by hand", "NOTIFY hop"
BARE = "ours is durable before it is told, and taken by a lease; the bare hop writes nothing"
DURABLE = "both are durable before they are told; by hand it is removed at once, ours is reserved"
POPPED = "both are durable before they are told, and removed as they are taken"
ROWS = (
    (NODE, HOP, 0, BARE),
    (NODE, HOP, 1, BARE),
    (NODE, HAND, 0, DURABLE),
    (NODE, HAND, 1, DURABLE),
    (SQL, HAND, 0, POPPED),
    (SQL, HAND, 1, POPPED),
)
Tell = Callable[[], None]


def read_hops(dsn: str, tell: Tell) -> None:
    """Listen, and nothing else."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN hop")
        tell()
        for _ in connection.notifies():
            tell()


def read_by_hand(dsn: str, tell: Tell) -> None:
    """Listen, and take from the table by hand."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN idle_by_hand")
        tell()
        while True:
            while connection.execute(TAKE_BY_HAND).fetchone():
                tell()
            for _ in connection.notifies(stop_after=1):
                pass


def read_by_node(dsn: str, tell: Tell) -> None:
    """Wait in Node.reserve, and commit when the time is taken."""
    with Node("READER", dsn) as node:
        node.reserve("idle")
        tell()
        while True:
            for element in node.reserve("idle", duration=DAY, timeout=MINUTE):
                tell()
                node.commit(element)


def read_by_sql(dsn: str, tell: Tell) -> None:
    """Do by psycopg what docs/reference/queues.md tells: take; nothing? listen, take, wait."""
    take = "SELECT id FROM messages.pop('READER', 'idle')"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT messages.queue_listen('READER', 'idle')")
        tell()
        while True:
            while connection.execute(take).fetchone():
                tell()
            for _ in connection.notifies(stop_after=1):
                pass


READERS = {
    NODE: read_by_node,
    SQL: read_by_sql,
    HAND: read_by_hand,
    HOP: read_hops,
}


def run_reader(name: str, dsn: str, pipe: Connection) -> None:
    """Read in a process of its own; each element is told by the time at which it was there."""
    READERS[name](dsn, lambda: pipe.send(perf_counter()))


@contextmanager
def reader(name: str, dsn: str) -> Iterator[Connection]:
    """Start a reader and wait until it waits."""
    ours, theirs = multiprocessing.Pipe()
    # Its server has imported the client once, for all readers.
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_reader, args=(name, dsn, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()


def pushers(node: Node, connection: psycopg.Connection) -> dict[str, Callable[[], object]]:
    """Give each side's push."""
    run = connection.execute
    return {
        NODE: lambda: node.push("idle", "x"),
        SQL: lambda: run("SELECT messages.push('PUSHER', 'idle', 'x')"),
        HAND: lambda: run(PUSH_BY_HAND),
        HOP: lambda: run("SELECT pg_notify('hop', '')"),
    }


def delays(push: Callable[[], object], pipe: Connection, count: int) -> tuple[list[float], ...]:
    """Push two elements 10 ms apart so often: seconds until the first was there, the second."""
    first, second = [], []
    idle = Event()
    for _ in range(count):
        idle.wait(IDLE_SECONDS)
        begun = perf_counter()
        push()
        idle.wait(max(begun + APART_SECONDS - perf_counter(), 0))
        again = perf_counter()
        push()
        first.append(pipe.recv() - begun)
        second.append(pipe.recv() - again)
    return first, second


def measure(options: Options) -> Findings:
    """Compare a node's push and reserve with the bare hop, and with the same by hand."""
    names = [name for name in READERS if name != SQL or not options.is_quick]
    found: dict[str, list[tuple[list[float], ...]]] = {name: [] for name in names}
    multiprocessing.get_context("forkserver").set_forkserver_preload(["psqlmessages"])
    with temporary_server() as server:
        dsn = server.url()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(SETUP)
            connection.execute(BY_HAND)
            with closing(Node("PUSHER", dsn)) as node:
                node.open()
                push = pushers(node, connection)
                for turn in range(options.rounds):
                    for name in reversed(names) if turn % 2 else names:
                        with reader(name, dsn) as pipe:
                            push[name](), pipe.recv()
                            count = 6 if options.is_quick else 40
                            found[name].append(delays(push[name], pipe, count))
    return Findings([row(found, *which) for which in ROWS if which[0] in found])


def row(
    found: dict[str, list[tuple[list[float], ...]]], name: str, other: str, place: int, note: str
) -> Row:
    """Set the medians of the first or the second push beside those of another side."""
    ours, theirs = (
        [median(of_round[place]) * 1000 for of_round in found[side]] for side in (name, other)
    )
    which = ("first", "second, 10 ms later,")[place]
    return Row.of(
        f"waiting: {which.split(',')[0]} push, {name} to {other}",
        f"{name}: push until the waiting reader has it, the {which} p50",
        other,
        "ms",
        ours,
        theirs,
        reach=1.5,
        is_at_most=True,
        note=note,
    )


if __name__ == "__main__":
    run(measure, __doc__)
