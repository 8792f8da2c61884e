"""Steady publishing with expiry: do rate and table size stay constant?

python -m benchmarks.steady [--quick] [--json FILE]

Two databases of one server take turns of a tenth of a second, so disturbances of the machine affect
both: an old database, and a new one that is created again each minute. In each, one connection
publishes durable messages of 1 KB as fast as it can. Another process reads with a subscription
whose timeout is 10 seconds. After six minutes, three for each, the old database is compared with
one in its first minute. A round is ten seconds. The rate is compared in the last minute, the size
in the last three minutes. A quick run measures nothing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from statistics import mean
from time import perf_counter
from types import TracebackType
from typing import Self

import psycopg

from benchmarks.databases import create_database
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server
from project.postgres import Server

MINUTES, SECONDS = 6, 10
WINDOWS_PER_MINUTE = 60 // SECONDS
TURN, TURNS = 0.1, 5
BODY = "x" * 1000
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'PUB', 'Topic', 'STEADY', 'W', 5),
        ('psqlmessages', 'SUB', 'Topic', 'STEADY', 'R', 5),
        ('psqlmessages', 'GONE', 'Topic', 'STEADY', 'R', 5)
"""
PUBLISH = "SELECT messages.publish('PUB', 'STEADY', %s)"
READ = "SELECT count(*) FROM messages.subscribe(%s, 'STEADY', 10)"
SIZE = """
    SELECT sum(pg_total_relation_size(c.oid)) / 1048576.0 FROM pg_class AS c
    WHERE c.relname IN ('psqlmessages_subscription', 'psqlmessages_topic', '_stream')
       OR c.relname ^@ 'psqlmessages_streammessage_' AND c.relkind = 'r'
"""
PROCESSES = multiprocessing.get_context("spawn")


@dataclass
class Window:
    """Ten seconds of turns of a database: messages/s, and the maximum MB of its tables."""

    rate: float
    size: float


def read(url: str, must_stop: Event, count: multiprocessing.Queue[int]) -> None:
    """Read until stopped, then the remaining messages; put their number into ``count``."""
    rows, found, is_last = 0, 1, False
    with psycopg.connect(url, autocommit=True) as connection:
        while found or not is_last:
            is_last = must_stop.is_set()
            found = connection.execute(READ, ["SUB"]).fetchone()[0]  # type: ignore[index]
            rows += found
            if not found:
                connection.execute("SELECT pg_sleep(0.02)")
    count.put(rows)


class PublishedDatabase:
    """A database with a publisher and a reader; at its end, all messages must have been read."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.published = 0
        self.must_stop = PROCESSES.Event()
        self.count: multiprocessing.Queue[int] = PROCESSES.Queue()
        self.connection.execute(READ, ["SUB"])
        self.reader = PROCESSES.Process(target=read, args=(url, self.must_stop, self.count))
        self.reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | object) -> None:
        self.must_stop.set()
        received = self.count.get(timeout=60)
        self.reader.join()
        self.connection.close()
        if kind is None and received != self.published:
            raise AssertionError(f"{self.published} messages were published, and {received} read")

    def publish(self) -> tuple[int, float]:
        """Publish for a tenth of a second; return the number of messages and the seconds."""
        count, begun = 0, perf_counter()
        while (elapsed := perf_counter() - begun) < TURN:
            self.connection.execute(PUBLISH, [BODY])
            count += 1
        self.published += count
        return count, elapsed

    def add_expiring_subscription(self) -> None:
        """Read once with a second subscription, which expires ten seconds later."""
        self.connection.execute(READ, ["GONE"])

    @property
    def size(self) -> float:
        """The MB of the tables of streams."""
        return float(self.connection.execute(SIZE).fetchone()[0])  # type: ignore[index]


def measure_window(sides: tuple[PublishedDatabase, PublishedDatabase]) -> list[Window]:
    """Let the databases take turns for ten seconds; return a window for each."""
    counts, seconds, sizes = [0, 0], [0.0, 0.0], [0.0, 0.0]
    for _ in range(SECONDS):
        for _ in range(TURNS):
            for index, side in enumerate(sides):
                count, elapsed = side.publish()
                counts[index] += count
                seconds[index] += elapsed
        # Tables are emptied in turn. Fewer measurements would miss the maximum.
        sizes = [max(size, side.size) for size, side in zip(sizes, sides, strict=True)]
    return [Window(counts[index] / seconds[index], sizes[index]) for index in (0, 1)]


def measure_windows(server: Server) -> tuple[list[list[Window]], int]:
    """Measure all minutes; return the windows of both databases, and the number of messages."""
    windows, published = [], 0
    with psycopg.connect(server.url(), autocommit=True) as owner:
        owner.execute(SETUP)
    with PublishedDatabase(create_database(server, "old")) as old:
        for minute in range(MINUTES):
            with PublishedDatabase(create_database(server, f"minute_{minute}")) as new:
                for number in range(WINDOWS_PER_MINUTE):
                    if number % 3 == 0:
                        old.add_expiring_subscription()
                        new.add_expiring_subscription()
                    windows.append(measure_window((old, new)))
            published += new.published
    return windows, published + old.published


def compare(windows: list[list[Window]], published: int) -> list[Row]:
    """Compare the old database with new ones, window by window."""
    first, last = windows[:WINDOWS_PER_MINUTE], windows[-WINDOWS_PER_MINUTE:]
    subject, peer = f"steady publish, minute {MINUTES}", "a database in its first minute"
    # Sizes rise and fall, as tables are emptied in turn: compare more than a minute.
    half = windows[len(windows) // 2 :]
    sizes = [[window[side].size for window in half] for side in (0, 1)]
    return [
        Row.of(
            "steady: rate", subject, peer, "messages/s", *rates(last), goal=0.95,
            note="in turns of a tenth of a second, on one server; each database gets half of the "
            f"{MINUTES} minutes",
        ),
        Row.of(
            "steady: rate, minute 1", "the same, minute 1", peer, "messages/s", *rates(first),
            note="both databases are new, to show the error of the comparison itself",
        ),
        Row.of(
            "steady: size", f"size of the tables, minutes {MINUTES // 2 + 1} to {MINUTES}", peer,
            "MB", *sizes, goal=1.2, is_lower_better=True,
            note=f"the maximum of each ten seconds; overall {max(sizes[0]):.0f} MB and "
            f"{max(sizes[1]):.0f} MB; {published} messages published, and all read",
        ),
    ]  # fmt: skip


def rates(windows: list[list[Window]]) -> list[list[float]]:
    """Return the rates of the old database, and those of the new ones."""
    return [[window[side].rate for window in windows] for side in (0, 1)]


def curves(windows: list[list[Window]]) -> list[Curve]:
    """Return the rate and the maximum size by minute."""
    step = WINDOWS_PER_MINUTE
    minutes = [windows[at : at + step] for at in range(0, len(windows), step)]
    names = "an old database", "a new one each minute"

    def lines(figure: Callable[[list[Window]], float]) -> dict[str, list[tuple[float, float]]]:
        return {
            name: [
                (60.0 * number, figure([window[side] for window in minute]))
                for number, minute in enumerate(minutes, 1)
            ]
            for side, name in enumerate(names)
        }

    rate = lines(lambda minute: mean(window.rate for window in minute))
    size = lines(lambda minute: max(window.size for window in minute))
    return [
        Curve("steady: rate by time", "steady publish", "seconds", "messages/s", rate),
        Curve("steady: size by time", "steady publish: the tables", "seconds", "MB", size),
    ]


def measure(options: Options) -> Findings:
    """Publish for six minutes."""
    if options.is_quick:
        return Findings(left_out=[f"steady publishing: it takes {MINUTES} minutes"])
    with temporary_server() as server:
        windows, published = measure_windows(server)
    return Findings(compare(windows, published), curves(windows))


if __name__ == "__main__":
    run(measure, __doc__)
