"""Sides of the benchmark of exchanges: ours in a process, a statement by hand, and keuss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import Any, Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks import keuss
from benchmarks.brokers import own_redis
from benchmarks.servers import ROOT

MANAGE = (sys.executable, "manage.py", "psqlmessages")
BATCH = 100
BODY = "x" * 1000
HEADERS = '{"country": "de"}'
PATTERNS = ("^(it|de|fr)$", "^(de|nl|dk)$")
PATIENCE_SECONDS, POLL_SECONDS = 60, 0.005
_FILLED_CHARACTERS = 1_000_000
_FILL = """
    SELECT messages.push_many('filler', %s, array_fill(%s::text, ARRAY[%s]),
                              headers => array_fill(%s::text, ARRAY[%s]))
"""
_RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT DISTINCT current_user, r.ident, 'Queue', r.dest, r.mode, 60
    FROM unnest(%s::text[], %s::text[], %s::text[]) AS r (ident, dest, mode)
"""
_HAND_TABLES = ("hand_source", "hand_west", "hand_north")
_BY_HAND = """
    CREATE TABLE {0} (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        body text NOT NULL,
        headers jsonb NOT NULL,
        available_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE INDEX ON {0} (available_at, id)
"""
_ROUTE_BY_HAND = """
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


@dataclass(frozen=True)
class Graph:
    """An exchange of ours: its source has its name. ``consumer``: as in a file; empty: as is."""

    name: str
    destinations: tuple[str, ...] = ("west", "north")
    consumer: str = ""

    @property
    def definition(self) -> str:
        """As it stands in a file."""
        lines = [f"  {self.name}:", f"    src: {{queue: {self.name}}}"]
        if self.consumer:
            lines.append(f"    consumer: {self.consumer}")
        lines.append("    dst:")
        for number, queue in enumerate(self.destinations):
            pattern = PATTERNS[number % len(PATTERNS)]
            selector = f"""'msg.headers["country"].matches("{pattern}")'"""
            lines.append(f"    - {{queue: {queue}, selector: {selector}}}")
        return "\n".join(lines) + "\n"

    @property
    def rules(self) -> list[tuple[str, str, str]]:
        """What it may, as ident, queue and mode."""
        writes = [(f"exchange.{self.name}", queue, "W") for queue in self.destinations]
        return [(f"exchange.{self.name}", self.name, "R"), *writes]


class Ours:
    """An exchange that runs in a process; its source is paused while it is filled."""

    def __init__(self, dsn: str, graph: Graph, body: str = BODY) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.graph = graph
        self.body = body

    def route(self, count: int) -> float:
        """Fill the source, let it go, and wait until its last element is gone."""
        last = self.fill(count)
        clean(self.connection, ("psqlmessages_element", "psqlmessages_queuecount"))
        begun = perf_counter()
        self.call("resume", self.graph.name)
        self.wait("SELECT NOT EXISTS (SELECT FROM psqlmessages_element WHERE id = %s)", [last])
        while self.call("sizes", self.graph.name)["Total"]:
            Event().wait(POLL_SECONDS)
        seconds = perf_counter() - begun
        copies = [self.call("drain", queue)["Removed"] for queue in self.graph.destinations]
        if copies != [count] * len(copies):
            raise AssertionError(f"{copies} copies of {count}")
        return seconds

    def fill(self, count: int) -> int:
        """Push while nobody may take; answer the id of the last."""
        self.call("pause", self.graph.name)
        left, last = count, 0
        while left:
            size = min(left, max(1, _FILLED_CHARACTERS // len(self.body)))
            parameters = [self.graph.name, self.body, size, HEADERS, size]
            last = self.connection.execute(_FILL, parameters).fetchone()[0]["Ids"][-1]
            left -= size
        return last

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
        for table in _HAND_TABLES:
            self.connection.execute(_BY_HAND.format(table))

    def route(self, count: int) -> float:
        """Fill the source and run the statement until nothing is left."""
        self.connection.execute(
            "INSERT INTO hand_source (body, headers) SELECT %s, %s FROM generate_series(1, %s)",
            [BODY, HEADERS, count],
        )
        clean(self.connection, _HAND_TABLES)
        routed = 0
        begun = perf_counter()
        while routed < count:
            row = self.connection.execute(_ROUTE_BY_HAND, [BATCH, *PATTERNS]).fetchone()
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
def running(dsn: str, graphs: Sequence[Graph]) -> Iterator[None]:
    """Load exchanges, with the rules that they need, and run them in a process."""
    load(dsn, graphs)
    with process(dsn, "exchange", "run"):
        yield


def load(dsn: str, graphs: Sequence[Graph]) -> None:
    """Define exchanges, with the rules that they need."""
    rules = [("filler", "*", "RW"), *(rule for graph in graphs for rule in graph.rules)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_RULES, [list(column) for column in zip(*rules, strict=True)])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("exchanges:\n" + "".join(graph.definition for graph in graphs))
        file.flush()
        subprocess.run([*MANAGE, "exchange", "load", file.name], check=True, **_context(dsn))


@contextmanager
def process(dsn: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of ours as a process, as users do."""
    started = subprocess.Popen([*MANAGE, *arguments], stderr=subprocess.DEVNULL, **_context(dsn))
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(60)


def _context(dsn: str) -> dict[str, Any]:
    env = {**os.environ, "DATABASE_URL": dsn}
    return {"cwd": ROOT, "env": env, "stdout": subprocess.DEVNULL}


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
    """Open the loop of keuss on a Redis of its own, which keeps nothing on disk."""
    port = stack.enter_context(own_redis())
    options = {"redis": {"Redis": {"host": "127.0.0.1", "port": port}}}
    return stack.enter_context(closing(keuss.Loop(folder, "redis-oq", options)))
