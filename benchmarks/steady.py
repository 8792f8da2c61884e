"""Steady publishing for ten minutes: whether speed and size stay where they were.

python -m benchmarks.steady [--quick] [--json FILE]

One connection publishes 1 KB after 1 KB as fast as it can, each durable; another process reads, in
a subscription that dies 10 seconds after its last reading. In each second the same connection also
INSERTs by hand for a fifth of it, which tells how fast the machine is then: what has to stay is how
publishing compares with that. Every ten seconds: both rates, and the largest size of the tables. It
has no rounds: its last minute stands against its first. Quick: nothing.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from statistics import mean
from time import perf_counter

import psycopg

from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import own_server

MINUTES = 10
A_MINUTE = 6
BODY = "x" * 1000
SLICES, PUBLISHING, BY_HAND = 10, 0.8, 0.2
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'PUB', 'Topic', 'STEADY', 'W', 5),
        ('psqlmessages', 'SUB', 'Topic', 'STEADY', 'R', 5),
        ('psqlmessages', 'GONE', 'Topic', 'STEADY', 'R', 5);
    CREATE TABLE by_hand (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload text)
"""
PUBLISH = "SELECT messages.publish('PUB', 'STEADY', %s)"
INSERT = "INSERT INTO by_hand (payload) VALUES (%s) RETURNING id"
READ = "SELECT count(*) FROM messages.subscribe(%s, 'STEADY', 10)"
SIZE = """
    SELECT sum(pg_total_relation_size(c.oid)) / 1048576.0 FROM pg_class AS c
    WHERE c.relname IN ('psqlmessages_subscription', 'psqlmessages_topic', '_stream')
       OR c.relname ^@ 'psqlmessages_streammessage_' AND c.relkind = 'r'
"""


@dataclass
class Window:
    """Ten seconds: messages a second, INSERTs by hand a second, MB of tables at their largest."""

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


class Turn:
    """A statement run again and again, in turns with others: how often, in how many seconds."""

    def __init__(self, connection: psycopg.Connection, statement: str) -> None:
        self.connection = connection
        self.statement = statement
        self.times, self.seconds = 0, 0.0

    def run(self, seconds: float) -> None:
        """Go on for so long."""
        begun = perf_counter()
        while (gone := perf_counter() - begun) < seconds:
            self.connection.execute(self.statement, [BODY])
            self.times += 1
        self.seconds += gone

    @property
    def rate(self) -> float:
        """How often in a second."""
        return self.times / self.seconds


def publish(url: str, minutes: int) -> tuple[list[Window], int]:
    """Publish for so long; the windows, and how many were published."""
    windows, published = [], 0
    with psycopg.connect(url, autocommit=True) as connection:
        for number in range(minutes * A_MINUTE):
            if number % 3 == 0:
                # It comes, and dies ten seconds later.
                connection.execute(READ, ["GONE"])
            ours, by_hand, sizes = Turn(connection, PUBLISH), Turn(connection, INSERT), []
            for _ in range(SLICES):
                ours.run(PUBLISHING)
                by_hand.run(BY_HAND)
                # Tables are emptied in turn: looked at more seldom, the largest would be missed.
                sizes.append(float(connection.execute(SIZE).fetchone()[0]))  # type: ignore[index]
            published += ours.times
            connection.execute("TRUNCATE by_hand")
            windows.append(Window(ours.rate, by_hand.rate, max(sizes)))
    return windows, published


def rows(windows: list[Window], published: int, received: int) -> list[Row]:
    """Compare the last minute with the first, window by window."""
    parts = windows[-A_MINUTE:], windows[:A_MINUTE]
    rates = [[window.rate for window in part] for part in parts]
    beside = [[window.rate / window.by_hand for window in part] for part in parts]
    # A table is filled for so many seconds, not for so many messages: the faster, the larger.
    largest = [max(window.size for window in part) for part in parts]
    sizes = [[1000 * mb / mean(rate)] for mb, rate in zip(largest, rates, strict=True)]
    against = "its own first minute"
    return [
        Row.of(
            "steady: beside INSERTs", f"steady publish beside INSERTs by hand, minute {MINUTES}",
            against, "of their rate", *beside, reach=0.95,
            note="both by one connection in each second, so that the machine's speed counts not",
        ),
        Row.of(
            "steady: rate", f"steady publish, minute {MINUTES}", against, "messages/s", *rates,
            note="as the machine was in that minute",
        ),
        Row.of(
            "steady: size", f"largest size of the tables, minute {MINUTES}", against,
            "MB for each 1,000 messages/s", *sizes, reach=1.2, is_at_most=True,
            note=f"{largest[0]:.1f} to {largest[1]:.1f} MB; {published} published, {received} read",
        ),
    ]  # fmt: skip


def curve(windows: list[Window]) -> Curve:
    """Show rate and size by time."""
    lines: dict[str, list[tuple[float, float]]] = {
        "messages/s": [(10.0 * (n + 1), window.rate) for n, window in enumerate(windows)],
        "INSERTs by hand/s": [(10.0 * (n + 1), window.by_hand) for n, window in enumerate(windows)],
        "MB": [(10.0 * (n + 1), window.size) for n, window in enumerate(windows)],
    }
    return Curve("steady: by time", "steady publish", "seconds", "messages/s, MB", lines)


def measure(options: Options) -> Findings:
    """Publish for ten minutes."""
    if options.is_quick:
        return Findings(left_out=["steady publishing: it takes ten minutes"])
    context = multiprocessing.get_context("spawn")
    is_over, count = context.Event(), context.Queue()
    with own_server() as server:
        with psycopg.connect(server.url(), autocommit=True) as owner:
            owner.execute(SETUP)
            owner.execute(READ, ["SUB"])
        reader = context.Process(target=read, args=(server.url(), is_over, count), daemon=True)
        reader.start()
        windows, published = publish(server.url(), MINUTES)
        is_over.set()
        received = count.get(timeout=60)
        reader.join()
    if received != published:
        raise AssertionError(f"{published} were published, and {received} read")
    return Findings(rows(windows, published, received), [curve(windows)])


if __name__ == "__main__":
    run(measure, __doc__)
