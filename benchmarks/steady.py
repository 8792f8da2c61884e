"""Steady publishing with expiry: whether speed and size stay where they were.

python -m benchmarks.steady [--quick] [--json FILE]

Two databases of one server take turns of a tenth of a second: one ages, the other is made anew each
minute. To each, one connection publishes 1 KB after 1 KB as fast as it can, each durable; another
process reads, in a subscription that dies 10 seconds after its last reading. What the machine does
meanwhile, it does to both. After 20 minutes, ten for each, the old one stands beside one in its
first minute: how fast, and how large its tables were. It has no rounds: each ten seconds are one,
of the last minute for the speed and of the last ten for the size. Quick: nothing.
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

from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.servers import temporary_server
from project.postgres import Server

MINUTES, SECONDS = 20, 10
A_MINUTE = 60 // SECONDS
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
    """Ten seconds of turns: messages a second in its own, MB of tables at their largest."""

    rate: float
    size: float


def read(url: str, is_over: Event, count: multiprocessing.Queue[int]) -> None:
    """Read until told to stop, then what is left; tell how many there were."""
    rows, found, is_last = 0, 1, False
    with psycopg.connect(url, autocommit=True) as connection:
        while found or not is_last:
            is_last = is_over.is_set()
            found = connection.execute(READ, ["SUB"]).fetchone()[0]  # type: ignore[index]
            rows += found
            if not found:
                connection.execute("SELECT pg_sleep(0.02)")
    count.put(rows)


class Steady:
    """A database that is published to and read from: it ends when all was read."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.published = 0
        self.is_over = PROCESSES.Event()
        self.count: multiprocessing.Queue[int] = PROCESSES.Queue()
        self.connection.execute(READ, ["SUB"])
        self.reader = PROCESSES.Process(target=read, args=(url, self.is_over, self.count))
        self.reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | object) -> None:
        self.is_over.set()
        received = self.count.get(timeout=60)
        self.reader.join()
        self.connection.close()
        if kind is None and received != self.published:
            raise AssertionError(f"{self.published} were published, and {received} read")

    def turn(self) -> tuple[int, float]:
        """Publish for a tenth of a second: how many, and how long it took."""
        times, begun = 0, perf_counter()
        while (gone := perf_counter() - begun) < TURN:
            self.connection.execute(PUBLISH, [BODY])
            times += 1
        self.published += times
        return times, gone

    def leave_one_to_die(self) -> None:
        """Read once in a second subscription, which dies ten seconds later."""
        self.connection.execute(READ, ["GONE"])

    @property
    def size(self) -> float:
        """The MB of its tables."""
        return float(self.connection.execute(SIZE).fetchone()[0])  # type: ignore[index]


def ten_seconds(sides: tuple[Steady, Steady]) -> list[Window]:
    """Let them take turns; a window of each."""
    times, seconds, sizes = [0, 0], [0.0, 0.0], [0.0, 0.0]
    for _ in range(SECONDS):
        for _ in range(TURNS):
            for place, side in enumerate(sides):
                more, gone = side.turn()
                times[place] += more
                seconds[place] += gone
        # Tables are emptied in turn: looked at more seldom, the largest would be missed.
        sizes = [max(size, side.size) for size, side in zip(sizes, sides, strict=True)]
    return [Window(times[place] / seconds[place], sizes[place]) for place in (0, 1)]


def publish(server: Server) -> tuple[list[list[Window]], int]:
    """Publish until the old one is old: the windows of both, and how many were published."""
    windows, published = [], 0
    with psycopg.connect(server.url(), autocommit=True) as owner:
        owner.execute(SETUP)
    with Steady(copy(server, "old")) as old:
        for minute in range(MINUTES):
            with Steady(copy(server, f"minute_{minute}")) as new:
                for number in range(A_MINUTE):
                    if number % 3 == 0:
                        old.leave_one_to_die()
                        new.leave_one_to_die()
                    windows.append(ten_seconds((old, new)))
            published += new.published
    return windows, published + old.published


def copy(server: Server, database: str) -> str:
    """Make another database like the first, and return its address."""
    with psycopg.connect(server.url("postgres"), autocommit=True) as owner:
        owner.execute(f"CREATE DATABASE {database} TEMPLATE {server.owner}")
    return server.url(database)


def rows(windows: list[list[Window]], published: int) -> list[Row]:
    """Compare the old database with those in their first minute, window by window."""
    first, last = windows[:A_MINUTE], windows[-A_MINUTE:]
    what, against = f"steady publish, minute {MINUTES}", "a database in its first minute"
    # Tables are emptied in turn, so sizes rise and fall: a minute is too short to compare them.
    half = windows[len(windows) // 2 :]
    sizes = [[window[side].size for window in half] for side in (0, 1)]
    return [
        Row.of(
            "steady: rate", what, against, "messages/s", *rates(last), reach=0.95,
            note="in turns of a tenth of a second, on one server; each is published to for half of "
            f"the {MINUTES} minutes",
        ),
        Row.of(
            "steady: rate, minute 1", "the same, minute 1", against, "messages/s", *rates(first),
            note="both are new: what the comparison itself makes of two equal ones",
        ),
        Row.of(
            "steady: size", f"size of the tables, minutes {MINUTES // 2 + 1} to {MINUTES}", against,
            "MB", *sizes, reach=1.2, is_at_most=True,
            note=f"the largest of each ten seconds; of all {max(sizes[0]):.0f} MB and "
            f"{max(sizes[1]):.0f} MB; {published} published, and as many read",
        ),
    ]  # fmt: skip


def rates(windows: list[list[Window]]) -> list[list[float]]:
    """Name the rates of the old database, and those of the new."""
    return [[window[side].rate for window in windows] for side in (0, 1)]


def curves(windows: list[list[Window]]) -> list[Curve]:
    """Show by minute the rate, and the largest size."""
    minutes = [windows[at : at + A_MINUTE] for at in range(0, len(windows), A_MINUTE)]
    names = "a database that ages", "one made anew each minute"

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
    """Publish for twenty minutes."""
    if options.is_quick:
        return Findings(left_out=[f"steady publishing: it takes {MINUTES} minutes"])
    with temporary_server() as server:
        windows, published = publish(server)
    return Findings(rows(windows, published), curves(windows))


if __name__ == "__main__":
    run(measure, __doc__)
