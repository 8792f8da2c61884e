"""Benchmark of waiting: the time from a push to an idle queue until another process has it.

python -m benchmarks.waiting [--rounds 5] [--quick] [--json FILE]

Two elements are pushed 10 ms apart, and each is timed. All processes of a machine have the same
clock, so a delay is the reader's time minus the pusher's. Peers are a NOTIFY that stores nothing,
and plain SQL, which inserts an element with a NOTIFY, and takes it with a DELETE.
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
CREATE_TABLE = """
    CREATE TABLE plain_queue (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        body text NOT NULL,
        available_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE INDEX ON plain_queue (available_at, id)
"""
PUSH_PLAIN = """
    WITH pushed AS (INSERT INTO plain_queue (body) VALUES ('x') RETURNING id)
    SELECT pg_notify('plain_queue', '') FROM pushed
"""
TAKE_PLAIN = """
    DELETE FROM plain_queue WHERE id = ANY (ARRAY(
        SELECT id FROM plain_queue WHERE available_at <= now()
        ORDER BY available_at, id LIMIT 1 FOR UPDATE SKIP LOCKED))
    RETURNING id
"""
NODE, SQL, PLAIN, NOTIFY = "Node", "SQL", "by hand", "NOTIFY hop"
STORES_NOTHING = "ours is durable and taken by a lease; the NOTIFY stores nothing"
DURABLE = "both are durable; the peer removes the element immediately, ours reserves it"
POPPED = "both are durable, and remove the element when they take it"
ROWS = (
    (NODE, NOTIFY, 0, STORES_NOTHING),
    (NODE, NOTIFY, 1, STORES_NOTHING),
    (NODE, PLAIN, 0, DURABLE),
    (NODE, PLAIN, 1, DURABLE),
    (SQL, PLAIN, 0, POPPED),
    (SQL, PLAIN, 1, POPPED),
)
Report = Callable[[], None]


def read_notifications(dsn: str, report: Report) -> None:
    """Listen to a channel."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN hop")
        report()
        for _ in connection.notifies():
            report()


def read_plain(dsn: str, report: Report) -> None:
    """Take from the plain table after each notification."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LISTEN plain_queue")
        report()
        while True:
            while connection.execute(TAKE_PLAIN).fetchone():
                report()
            for _ in connection.notifies(stop_after=1):
                pass


def read_with_node(dsn: str, report: Report) -> None:
    """Wait in Node.reserve; commit after the report."""
    with Node("READER", dsn) as node:
        node.reserve("idle")
        report()
        while True:
            for element in node.reserve("idle", duration=DAY, timeout=MINUTE):
                report()
                node.commit(element)


def read_with_sql(dsn: str, report: Report) -> None:
    """Wait with psycopg as documented: listen, then take until the queue is empty, then wait."""
    take = "SELECT id FROM messages.pop('READER', 'idle')"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT messages.queue_listen('READER', 'idle')")
        report()
        while True:
            while connection.execute(take).fetchone():
                report()
            for _ in connection.notifies(stop_after=1):
                pass


READERS = {
    NODE: read_with_node,
    SQL: read_with_sql,
    PLAIN: read_plain,
    NOTIFY: read_notifications,
}


def run_reader(name: str, dsn: str, pipe: Connection) -> None:
    """Run in the reading process: send the time of each received element."""
    READERS[name](dsn, lambda: pipe.send(perf_counter()))


@contextmanager
def start_reader(name: str, dsn: str) -> Iterator[Connection]:
    """Start a reader, and wait until it is ready."""
    ours, theirs = multiprocessing.Pipe()
    # The fork server imports the client once for all readers.
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
    """Return the push of each side."""
    run = connection.execute
    return {
        NODE: lambda: node.push("idle", "x"),
        SQL: lambda: run("SELECT messages.push('PUSHER', 'idle', 'x')"),
        PLAIN: lambda: run(PUSH_PLAIN),
        NOTIFY: lambda: run("SELECT pg_notify('hop', '')"),
    }


def measure_delays(
    push: Callable[[], object], pipe: Connection, count: int
) -> tuple[list[float], ...]:
    """Push two elements 10 ms apart, several times; return the delays of both in seconds."""
    first, second = [], []
    pause = Event()
    for _ in range(count):
        pause.wait(IDLE_SECONDS)
        first_at = perf_counter()
        push()
        pause.wait(max(first_at + APART_SECONDS - perf_counter(), 0))
        second_at = perf_counter()
        push()
        first.append(pipe.recv() - first_at)
        second.append(pipe.recv() - second_at)
    return first, second


def measure(options: Options) -> Findings:
    """Compare push and reserve with a NOTIFY, and with plain SQL."""
    names = [name for name in READERS if name != SQL or not options.is_quick]
    found: dict[str, list[tuple[list[float], ...]]] = {name: [] for name in names}
    multiprocessing.get_context("forkserver").set_forkserver_preload(["psqlmessages"])
    with temporary_server() as server:
        dsn = server.url()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(SETUP)
            connection.execute(CREATE_TABLE)
            with closing(Node("PUSHER", dsn)) as node:
                node.open()
                push = pushers(node, connection)
                for turn in range(options.rounds):
                    for name in reversed(names) if turn % 2 else names:
                        with start_reader(name, dsn) as pipe:
                            push[name](), pipe.recv()
                            count = 6 if options.is_quick else 40
                            found[name].append(measure_delays(push[name], pipe, count))
    return Findings([to_row(found, *row) for row in ROWS if row[0] in found])


def to_row(
    delays: dict[str, list[tuple[list[float], ...]]], name: str, peer: str, index: int, note: str
) -> Row:
    """Compare the medians of the first (0) or second (1) push with those of a peer."""
    ours, theirs = (
        [median(of_round[index]) * 1000 for of_round in delays[side]] for side in (name, peer)
    )
    which = ("first", "second, 10 ms later,")[index]
    return Row.of(
        f"waiting: {which.split(',')[0]} push, {name} to {peer}",
        f"{name}: push until the waiting reader has it, {which} p50", peer, "ms",
        ours, theirs, goal=1.5 if peer == NOTIFY else None, is_lower_better=True, note=note,
    )  # fmt: skip


if __name__ == "__main__":
    run(measure, __doc__)
