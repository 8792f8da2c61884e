"""How soon a reader that waits at an idle queue has what is pushed, in another process.

The clock is one for all processes of a machine, so a delay is the reader's time less the pusher's.
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

from psqlmessages import Node

MINUTE = timedelta(minutes=1)
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
        node.reserve("jobs")
        tell()
        while True:
            for element in node.reserve("jobs", timeout=MINUTE):
                tell()
                node.commit(element)


def read_by_sql(dsn: str, tell: Tell) -> None:
    """Do by psycopg what docs/queues.md tells: take; nothing? listen, take, wait."""
    take = "SELECT id FROM messages.pop('READER', 'jobs')"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT messages.queue_listen('READER', 'jobs')")
        tell()
        while True:
            while connection.execute(take).fetchone():
                tell()
            for _ in connection.notifies(stop_after=1):
                pass


READERS = {
    "psqlmessages": read_by_node,
    "psqlmessages, SQL": read_by_sql,
    "by hand": read_by_hand,
    "NOTIFY hop": read_hops,
}


def run_reader(name: str, dsn: str, pipe: Connection) -> None:
    """Read in a process of its own; each element is told by the time at which it was there."""
    READERS[name](dsn, lambda: pipe.send(perf_counter()))


@contextmanager
def reader(name: str, dsn: str) -> Iterator[Connection]:
    """Start a reader and wait until it waits."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
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
        "psqlmessages": lambda: node.push("jobs", "x"),
        "psqlmessages, SQL": lambda: run("SELECT messages.push('PUSHER', 'jobs', 'x')"),
        "by hand": lambda: run(PUSH_BY_HAND),
        "NOTIFY hop": lambda: run("SELECT pg_notify('hop', '')"),
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


def report(dsn: str, rounds: int, count: int = 40) -> None:
    """Print the medians of two pushes, and their ratio to the hop of a bare NOTIFY."""
    found: dict[str, list[tuple[list[float], ...]]] = {name: [] for name in READERS}
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        closing(Node("PUSHER", dsn)) as node,
    ):
        node.open()
        connection.execute(BY_HAND)
        for _ in range(rounds):
            for name, push in pushers(node, connection).items():
                with reader(name, dsn) as pipe:
                    push(), pipe.recv()
                    found[name].append(delays(push, pipe, count))
    print("\npush until the waiting reader of another process has it; again, pushed 10 ms later")
    for name in found:
        print(f"  {name:18}" + "".join(column(found, name, place) for place in (0, 1)))


def column(found: dict[str, list[tuple[list[float], ...]]], name: str, place: int) -> str:
    """Write the median of one of the two pushes, and its ratios round by round."""
    ours = [median(of_round[place]) for of_round in found[name]]
    ratios = [
        median(
            mine / median(of_round[place])
            for mine, of_round in zip(ours, found[other], strict=True)
        )
        for other in ("NOTIFY hop", "by hand")
    ]
    times = median(ours) * 1000
    return f"  p50 {times:6.2f} ms, / hop {ratios[0]:5.2f}, / by hand {ratios[1]:5.2f}"
