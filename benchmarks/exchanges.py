"""Benchmark of exchanges: from one queue into two, by a regular expression on a header.

python -m benchmarks.exchanges [--rounds 5] [--share 1]

Elements of 1 KB wait in a queue; measured is how long it takes until both others have a copy of
each and the first is empty. Exchanges run as users run them, in a process of their own. Beside
them stand the loop of keuss, 16 of it, on PostgreSQL and on a Redis that keeps nothing on disk,
and one statement by hand that routes 100 at a time. All use one PostgreSQL over TCP and take
turns; every commit waits for the disk. keuss needs Node.js with npm, and redis-server; what is
not there is left out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from threading import Event
from time import perf_counter
from typing import Any, Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks import keuss
from benchmarks.servers import ROOT, own_server

BATCH, SOURCE_BATCH = 100, 1000
BODY = "x" * 1000
HEADERS = '{"country": "de"}'
WEST, NORTH = "^(it|de|fr)$", "^(de|nl|dk)$"
PATIENCE_SECONDS, POLL_SECONDS = 60, 0.005
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT current_user, ident, 'Queue', dest, mode, 60
    FROM (VALUES
        ('filler', '*', 'RW'),
        ('exchange.one', 'one', 'R'), ('exchange.one', 'west', 'W'), ('exchange.one', 'north', 'W'),
        ('exchange.two', 'two', 'R'), ('exchange.two', 'west', 'W'), ('exchange.two', 'north', 'W')
    ) AS r (ident, dest, mode)
"""
DEFINITION = """
  {name}:
    consumer: {{parallel: {parallel}, wsize: {wsize}, reserve: true}}
    src: {{ns: default, queue: {name}}}
    dst:
      - {{ns: default, queue: west, selector: 'msg.headers["country"].matches("{west}")'}}
      - {{ns: default, queue: north, selector: 'msg.headers["country"].matches("{north}")'}}
"""
FILL = """
    SELECT messages.push_many('filler', %s, array_fill(%s::text, ARRAY[%s]),
                              headers => array_fill(%s::text, ARRAY[%s]))
"""
TABLES = ("psqlmessages_element", "psqlmessages_queuecount")
HAND_TABLES = ("hand_source", "hand_west", "hand_north")
BY_HAND = """
    CREATE TABLE {0} (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        body text NOT NULL,
        headers jsonb NOT NULL,
        available_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE INDEX ON {0} (available_at, id)
"""
ROUTE_BY_HAND = """
    WITH taken AS (
        DELETE FROM hand_source WHERE id = ANY (ARRAY(
            SELECT id FROM hand_source WHERE available_at <= now()
            ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
        RETURNING id, body, headers
    ), west AS (
        INSERT INTO hand_west (body, headers)
        SELECT body, headers FROM taken WHERE headers ->> 'country' ~ %s ORDER BY id
    ), north AS (
        INSERT INTO hand_north (body, headers)
        SELECT body, headers FROM taken WHERE headers ->> 'country' ~ %s ORDER BY id
    )
    SELECT count(*) FROM taken
"""


class Side(Protocol):
    """One of those that are compared."""

    def route(self, count: int) -> float:
        """Fill the source, and route all: the seconds that the routing took."""

    def close(self) -> None:
        """End what it has opened."""


class Ours:
    """An exchange that runs in a process; its source is paused while it is filled."""

    def __init__(self, dsn: str, source: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.source = source

    def route(self, count: int) -> float:
        """Fill the source, let it go, and wait until its last element is gone."""
        self.call("pause", self.source)
        for _ in range(count // SOURCE_BATCH):
            sizes = (BODY, SOURCE_BATCH, HEADERS, SOURCE_BATCH)
            answer = self.connection.execute(FILL, [self.source, *sizes]).fetchone()[0]
        clean(self.connection, TABLES)
        begun = perf_counter()
        self.call("resume", self.source)
        self.wait("SELECT NOT EXISTS (SELECT FROM psqlmessages_element WHERE id = %s)",
                  [answer["Ids"][-1]])  # fmt: skip
        while self.call("sizes", self.source)["Total"]:
            Event().wait(POLL_SECONDS)
        seconds = perf_counter() - begun
        copies = [self.call("drain", queue)["Removed"] for queue in ("west", "north")]
        if copies != [count, count]:
            raise AssertionError(f"{copies} copies of {count}")
        return seconds

    def wait(self, condition: str, parameters: list[Any]) -> None:
        """Ask until it is so."""
        patience = perf_counter() + PATIENCE_SECONDS
        while not self.connection.execute(condition, parameters).fetchone()[0]:
            if perf_counter() > patience:
                raise TimeoutError(condition)
            Event().wait(POLL_SECONDS)

    def call(self, function: str, queue: str) -> dict[str, Any]:
        """Call a function of SQL for a queue."""
        sql = f"SELECT messages.{function}('filler', %s)"
        answer = self.connection.execute(sql, [queue]).fetchone()[0]
        if answer["Err"] != "0":
            raise RuntimeError(f"{function} {queue}: {answer}")
        return answer

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


class ByHand:
    """One statement that routes 100 elements, again and again."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        for table in HAND_TABLES:
            self.connection.execute(BY_HAND.format(table))

    def route(self, count: int) -> float:
        """Fill the source and run the statement until nothing is left."""
        self.connection.execute(
            "INSERT INTO hand_source (body, headers) SELECT %s, %s FROM generate_series(1, %s)",
            [BODY, HEADERS, count],
        )
        clean(self.connection, HAND_TABLES)
        routed = 0
        begun = perf_counter()
        while routed < count:
            row = self.connection.execute(ROUTE_BY_HAND, [BATCH, WEST, NORTH]).fetchone()
            routed += row[0]
        seconds = perf_counter() - begun
        self.connection.execute("TRUNCATE hand_source, hand_west, hand_north")
        return seconds

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


def clean(connection: psycopg.Connection, tables: tuple[str, ...]) -> None:
    """Forget what the rounds before have left behind."""
    for table in tables:
        connection.execute(f"VACUUM ANALYZE {table}")


@contextmanager
def running(dsn: str) -> Iterator[None]:
    """Load the exchanges and run them in a process."""
    manage = [sys.executable, "manage.py", "psqlmessages", "exchange"]
    context: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "DATABASE_URL": dsn}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("exchanges:")
        for name, parallel, wsize in (("one", 1, 100), ("two", 2, 1000)):
            file.write(
                DEFINITION.format(name=name, parallel=parallel, wsize=wsize, west=WEST, north=NORTH)
            )
        file.flush()
        subprocess.run([*manage, "load", file.name], check=True, **context)
    process = subprocess.Popen([*manage, "run"], stdout=subprocess.DEVNULL, **context)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def keuss_on_postgres(folder: Path, dsn: str, stack: ExitStack) -> Side:
    """Open the loop of keuss on PostgreSQL; its pool has a connection for each of 16 loops."""
    parts = conninfo_to_dict(dsn)
    options = {
        "host": parts["host"],
        "port": int(parts["port"]),
        "database": parts["dbname"],
        "user": parts["user"],
        "password": parts["password"],
        "max": keuss.LOOPS,
    }
    return stack.enter_context(closing(keuss.Loop(folder, "postgres", {"postgres": options})))


def keuss_on_redis(folder: Path, stack: ExitStack) -> Side:
    """Open the loop of keuss on a Redis of its own."""
    port = stack.enter_context(keuss.own_redis(folder))
    options = {"redis": {"Redis": {"host": "127.0.0.1", "port": port}}}
    return stack.enter_context(closing(keuss.Loop(folder, "redis-oq", options)))


def sides_of(dsn: str, folder: Path, stack: ExitStack) -> dict[str, tuple[Side, int]]:
    """Open all that is here, each with the number of elements that take it about a second."""
    sides: dict[str, tuple[Side, int]] = {
        "psqlmessages, 1 loop of 100": (stack.enter_context(closing(Ours(dsn, "one"))), 20_000),
        "psqlmessages, 2 loops of 500": (stack.enter_context(closing(Ours(dsn, "two"))), 20_000),
        "one statement by hand": (stack.enter_context(closing(ByHand(dsn))), 20_000),
    }
    try:
        keuss.install(folder)
        sides["keuss on PostgreSQL"] = keuss_on_postgres(folder, dsn, stack), 2_000
        sides["keuss on Redis"] = keuss_on_redis(folder, stack), 20_000
    except keuss.NotHere as reason:
        print(f"keuss is left out: {reason}")
    return sides


def report(rates: dict[str, list[float]]) -> None:
    """Print the medians, and the ratios of both of ours to each."""
    ours = list(rates.values())[:2]
    print("\nfrom 1 queue to 2, 1 KB, a regular expression on a header, both match")
    for name, theirs in rates.items():
        ratios = (median(a / b for a, b in zip(mine, theirs, strict=True)) for mine in ours)
        print(
            f"  {name:30}{median(theirs):10,.0f} elements/s   ours / this "
            + ", ".join(f"{ratio:6.2f}" for ratio in ratios)
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1, help="of the elements that are usual")
    parser.add_argument("--keuss", type=Path, help="a folder where keuss is installed")
    options = parser.parse_args()
    with own_server() as server, tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        dsn = server.url()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(SETUP)
        sides = sides_of(dsn, options.keuss or Path(made), stack)
        stack.enter_context(running(dsn))
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(options.rounds + 1):
            for name, (side, usual) in sides.items():
                count = max(round(usual * options.share / SOURCE_BATCH), 1) * SOURCE_BATCH
                rate = count / side.route(count)
                # The first round warms up.
                if turn:
                    rates[name].append(rate)
        report(rates)


if __name__ == "__main__":
    main()
