"""Steady publishing: whether speed and size stay where they were.

python -m benchmarks.steady [--minutes 10]

One connection publishes 1 KB after 1 KB as fast as it can, each durable; another process reads, in
a subscription that dies 10 seconds after its last reading. Every ten seconds: the rate, the size of
the tables, and the rate of INSERTs by hand just after, which tells how fast the machine is then.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from statistics import mean
from time import perf_counter

import psycopg

from benchmarks.servers import own_server

BODY = "x" * 1000
WINDOW, BY_HAND = 9.5, 0.5
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'PUB', 'Topic', 'STEADY', 'W', 5),
        ('psqlmessages', 'SUB', 'Topic', 'STEADY', 'R', 5),
        ('psqlmessages', 'GONE', 'Topic', 'STEADY', 'R', 5);
    CREATE TABLE by_hand (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload text)
"""
PUBLISH = "SELECT messages.publish('PUB', 'STEADY', %s)"
READ = "SELECT count(*) FROM messages.subscribe(%s, 'STEADY', 10)"
SIZE = """
    SELECT sum(pg_total_relation_size(c.oid)) / 1048576.0 FROM pg_class AS c
    WHERE c.relname IN ('psqlmessages_subscription', 'psqlmessages_topic', '_stream')
       OR c.relname ^@ 'psqlmessages_streammessage_' AND c.relkind = 'r'
"""


@dataclass
class Window:
    """Ten seconds: messages a second, INSERTs by hand a second, MB of tables."""

    rate: float
    by_hand: float
    size: float


def read(url: str, is_over: Event, count: multiprocessing.Queue[int]) -> None:
    """Read until told to stop, then what is left; tell how many there were."""
    rows, found = 0, 1
    with psycopg.connect(url, autocommit=True) as connection:
        while found or not is_over.is_set():
            found = connection.execute(READ, ["SUB"]).fetchone()[0]  # type: ignore[index]
            rows += found
            if not found:
                connection.execute("SELECT pg_sleep(0.02)")
    count.put(rows)


def repeat(connection: psycopg.Connection, statement: str, seconds: float) -> tuple[int, float]:
    """Run a statement again and again; how often, and how often in a second."""
    begun, times = perf_counter(), 0
    while perf_counter() - begun < seconds:
        connection.execute(statement, [BODY])
        times += 1
    return times, times / (perf_counter() - begun)


def measure(url: str, minutes: float) -> tuple[list[Window], int]:
    """Publish for so long; the windows, and how many were published."""
    windows, published = [], 0
    with psycopg.connect(url, autocommit=True) as connection:
        for number in range(round(minutes * 6)):
            if number % 3 == 0:
                # It comes, and dies ten seconds later.
                connection.execute(READ, ["GONE"])
            times, rate = repeat(connection, PUBLISH, WINDOW)
            published += times
            insert = "INSERT INTO by_hand (payload) VALUES (%s) RETURNING id"
            _, by_hand = repeat(connection, insert, BY_HAND)
            connection.execute("TRUNCATE by_hand")
            size = float(connection.execute(SIZE).fetchone()[0])  # type: ignore[index]
            windows.append(Window(rate, by_hand, size))
            print(
                f"{(number + 1) * 10:5} s {rate:8.0f} /s {by_hand:8.0f} /s by hand {size:8.1f} MB"
            )
    return windows, published


def report(windows: list[Window], published: int, received: int) -> None:
    """Compare the last minute with the first."""
    first, last = windows[:6], windows[-6:]
    rates = [mean(window.rate for window in part) for part in (first, last)]
    by_hand = [mean(window.by_hand for window in part) for part in (first, last)]
    largest = [max(window.size for window in part) for part in (first, last)]
    print(
        f"\n{published} published, {received} read"
        f"\nrate, last minute / first: {rates[1] / rates[0]:.2f}"
        f" (INSERTs by hand: {by_hand[1] / by_hand[0]:.2f})"
        f"\nlargest size: {largest[0]:.0f} MB in the first minute, {largest[1]:.0f} MB in the last"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    is_over, count = context.Event(), context.Queue()
    with own_server() as server:
        with psycopg.connect(server.url(), autocommit=True) as owner:
            owner.execute(SETUP)
            owner.execute(READ, ["SUB"])
        reader = context.Process(target=read, args=(server.url(), is_over, count), daemon=True)
        reader.start()
        windows, published = measure(server.url(), options.minutes)
        is_over.set()
        received = count.get(timeout=60)
        reader.join()
    report(windows, published, received)


if __name__ == "__main__":
    main()
