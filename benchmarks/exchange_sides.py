"""Sides of the benchmark of exchanges: `exchange run`, one SQL statement, and keuss."""

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
from benchmarks.brokers import run_redis
from benchmarks.servers import ROOT

MANAGE = (sys.executable, "manage.py", "psqlmessages")
BATCH = 100
BODY = "x" * 1000
HEADERS = '{"country": "de"}'
PATTERNS = ("^(it|de|fr)$", "^(de|nl|dk)$")
TIMEOUT_SECONDS, POLL_SECONDS = 60, 0.005
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
_PLAIN_TABLES = ("plain_source", "plain_west", "plain_north")
_CREATE_TABLE = """
    CREATE TABLE {0} (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        body text NOT NULL,
        headers jsonb NOT NULL,
        available_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE INDEX ON {0} (available_at, id)
"""
_ROUTE = """
    WITH taken AS (
        DELETE FROM plain_source WHERE id = ANY (ARRAY(
            SELECT id FROM plain_source WHERE available_at <= now()
            ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
        RETURNING id, body, headers
    ), west AS (
        INSERT INTO plain_west (body, headers)
        SELECT body, headers FROM taken WHERE headers ->> 'country' ~ %s ORDER BY id
    ), north AS (
        INSERT INTO plain_north (body, headers)
        SELECT body, headers FROM taken WHERE headers ->> 'country' ~ %s ORDER BY id
    )
    SELECT count(*) FROM taken
"""


class Side(Protocol):
    """A way to route elements."""

    def route(self, count: int) -> float:
        """Fill the source, route all elements, and return the seconds of the routing."""

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True)
class Exchange:
    """An exchange, which has the name of its source queue. ``consumer`` is YAML; "": defaults."""

    name: str
    destinations: tuple[str, ...] = ("west", "north")
    consumer: str = ""

    @property
    def definition(self) -> str:
        """The exchange as YAML."""
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
        """The rules that the exchange needs, as (ident, queue, mode)."""
        writes = [(f"exchange.{self.name}", queue, "W") for queue in self.destinations]
        return [(f"exchange.{self.name}", self.name, "R"), *writes]


class RunningExchange:
    """Our side: an exchange that another process runs. Its source is paused while it is filled."""

    def __init__(self, dsn: str, exchange: Exchange, body: str = BODY) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.exchange = exchange
        self.body = body

    def route(self, count: int) -> float:
        """Fill the source, resume it, and wait until it is empty; return the seconds of routing."""
        last = self.fill(count)
        vacuum(self.connection, ("psqlmessages_element", "psqlmessages_queuecount"))
        begun = perf_counter()
        self.call("resume", self.exchange.name)
        self.wait("SELECT NOT EXISTS (SELECT FROM psqlmessages_element WHERE id = %s)", [last])
        while self.call("sizes", self.exchange.name)["Total"]:
            Event().wait(POLL_SECONDS)
        seconds = perf_counter() - begun
        copies = [self.call("drain", queue)["Removed"] for queue in self.exchange.destinations]
        if copies != [count] * len(copies):
            raise AssertionError(f"{copies} copies of {count}")
        return seconds

    def fill(self, count: int) -> int:
        """Pause the source and fill it; return the last id."""
        self.call("pause", self.exchange.name)
        left, last = count, 0
        while left:
            size = min(left, max(1, _FILLED_CHARACTERS // len(self.body)))
            parameters = [self.exchange.name, self.body, size, HEADERS, size]
            last = self.connection.execute(_FILL, parameters).fetchone()[0]["Ids"][-1]
            left -= size
        return last

    def wait(self, condition: str, parameters: list[Any]) -> None:
        """Poll until a query returns true."""
        deadline = perf_counter() + TIMEOUT_SECONDS
        while not self.connection.execute(condition, parameters).fetchone()[0]:
            if perf_counter() > deadline:
                raise TimeoutError(condition)
            Event().wait(POLL_SECONDS)

    def call(self, function: str, queue: str) -> dict[str, Any]:
        """Call an SQL function for a queue."""
        sql = f"SELECT messages.{function}('filler', %s)"
        answer = self.connection.execute(sql, [queue]).fetchone()[0]
        if answer["Err"] != "0":
            raise RuntimeError(f"{function} {queue}: {answer}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class PlainSql:
    """A peer on tables without rules: one SQL statement that routes 100 elements."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        for table in _PLAIN_TABLES:
            self.connection.execute(_CREATE_TABLE.format(table))

    def route(self, count: int) -> float:
        """Fill the source, and repeat the statement until the source is empty."""
        self.connection.execute(
            "INSERT INTO plain_source (body, headers) SELECT %s, %s FROM generate_series(1, %s)",
            [BODY, HEADERS, count],
        )
        vacuum(self.connection, _PLAIN_TABLES)
        routed = 0
        begun = perf_counter()
        while routed < count:
            row = self.connection.execute(_ROUTE, [BATCH, *PATTERNS]).fetchone()
            routed += row[0]
        seconds = perf_counter() - begun
        self.connection.execute(f"TRUNCATE {', '.join(_PLAIN_TABLES)}")
        return seconds

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def vacuum(connection: psycopg.Connection, tables: tuple[str, ...]) -> None:
    """Remove the dead rows of earlier rounds."""
    for table in tables:
        connection.execute(f"VACUUM ANALYZE {table}")


@contextmanager
def exchange_worker(dsn: str, exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Define exchanges and their rules, and run them in a process."""
    load(dsn, exchanges)
    with command_process(dsn, "exchange", "run"):
        yield


def load(dsn: str, exchanges: Sequence[Exchange]) -> None:
    """Define exchanges and their rules."""
    rules = [("filler", "*", "RW"), *(rule for exchange in exchanges for rule in exchange.rules)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_RULES, [list(column) for column in zip(*rules, strict=True)])
        for exchange in exchanges:
            # The first push creates the queue, because only an existing queue can be paused.
            connection.execute("SELECT messages.push('filler', %s, '')", [exchange.name])
            connection.execute("SELECT messages.drain('filler', %s)", [exchange.name])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("exchanges:\n" + "".join(exchange.definition for exchange in exchanges))
        file.flush()
        command = [*MANAGE, "exchange", "load", file.name]
        subprocess.run(command, check=True, **_process_options(dsn))


@contextmanager
def command_process(dsn: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of psqlmessages as a process during the block."""
    process = subprocess.Popen(
        [*MANAGE, *arguments], stderr=subprocess.DEVNULL, **_process_options(dsn)
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _process_options(dsn: str) -> dict[str, Any]:
    env = {**os.environ, "DATABASE_URL": dsn}
    return {"cwd": ROOT, "env": env, "stdout": subprocess.DEVNULL}


def keuss_on_postgres(folder: Path, dsn: str, stack: ExitStack) -> Side:
    """Start keuss on PostgreSQL; its pool has a connection for each of its 16 loops."""
    parts = conninfo_to_dict(dsn)
    options = {
        "host": parts["host"],
        "port": int(parts["port"]),
        "database": parts["dbname"],
        "user": parts["user"],
        "password": parts["password"],
        "max": keuss.LOOPS,
    }
    return stack.enter_context(closing(keuss.KeussLoop(folder, "postgres", {"postgres": options})))


def keuss_on_redis(folder: Path, stack: ExitStack) -> Side:
    """Start keuss on a temporary Redis that stores nothing on disk."""
    port = stack.enter_context(run_redis())
    options = {"redis": {"Redis": {"host": "127.0.0.1", "port": port}}}
    return stack.enter_context(closing(keuss.KeussLoop(folder, "redis-oq", options)))
