"""What calls cost with many rules: databases that differ in nothing else take turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import psycopg

from benchmarks.copies import copy
from benchmarks.results import Curve, Findings, Row
from project.postgres import Server

SIZES = (10, 100, 1_000, 10_000, 100_000)
TIMES = 40
OWN = [
    ("ASKER", "Rpc", "ANSWERER", "W"),
    ("ANSWERER", "Rpc", "ASKER", "W"),
    ("ASKER", "Topic", "RULED", "RW"),
    ("ANSWERER", "Topic", "RULED", "R"),
    ("ASKER", "Queue", "RULED", "RW"),
]
# Of each ten: a node's own topic, seven shared ones, a pattern, and one node it may ask.
FILL = """
    INSERT INTO psqlmessages_auth (role, ident, type, dest, mode, timeout)
    SELECT session_user, 'N' || n.node,
           CASE n.rule WHEN 1 THEN 'Rpc' ELSE 'Topic' END,
           CASE n.rule WHEN 0 THEN 'T' || n.node WHEN 1 THEN 'N' || n.node * 7 %% 10007
               WHEN 2 THEN 'P' || n.node || '.*' ELSE 'S' || n.node + n.rule * 1000 END,
           CASE n.rule WHEN 1 THEN 'W' ELSE 'RW' END, 5
    FROM (SELECT number / 10 AS node, number %% 10 AS rule
          FROM generate_series(0, %s::int) AS number) AS n
"""
BODY = "x" * 100
FUNCTIONS = ("topic_send", "topic_listen", "init", "call", "publish", "push, reserve, commit")
Call = Callable[..., Any]


class Ruled:
    """A database with so many rules, and two nodes of it."""

    def __init__(self, server: Server, size: int, stack: ExitStack) -> None:
        dsn = copy(server, f"ruled{size}", OWN)
        self.asker = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self.answerer = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self.asker.execute(FILL, [size - len(OWN) - 1])
        self.asker.execute("VACUUM ANALYZE")
        for connection, ident in (self.asker, "ASKER"), (self.answerer, "ANSWERER"):
            connection.execute("SET synchronous_commit = off")
            call(connection, "init", ident)
        call(self.asker, "topic_notify", "RULED")
        call(self.answerer, "topic_listen", "RULED")
        self.acts = dict(
            zip(
                FUNCTIONS,
                (self.send, self.listen, self.init, self.call, self.publish, self.take),
                strict=True,
            )
        )

    def send(self) -> None:
        """Send to one listener."""
        call(self.asker, "topic_send", "RULED", BODY)

    def listen(self) -> None:
        """Listen; ``undo`` ends it."""
        call(self.asker, "topic_listen", "RULED")

    def init(self) -> None:
        """Come as the only node of a session."""
        call(self.asker, "init", "ASKER")

    def call(self) -> None:
        """Ask and answer, without waiting for a process to wake."""
        call(self.asker, "rpc", "ANSWERER", "TOKEN", BODY)
        call(self.answerer, "return", "ASKER", self.token(), BODY)

    def token(self) -> str:
        """Read the token that arrived."""
        for notification in self.answerer.notifies():
            header = json.loads(notification.payload.partition("\n")[0])
            if header["Type"] == "Rpc":
                return str(header["Token"])
        raise RuntimeError("the connection ended")

    def publish(self) -> None:
        """Store a message."""
        call(self.asker, "publish", "ASKER", "RULED", BODY)

    def take(self) -> None:
        """Pass an element through a queue."""
        call(self.asker, "push", "ASKER", "RULED", BODY)
        row = self.asker.execute("SELECT lease FROM messages.reserve('ASKER', 'RULED')").fetchone()
        call(self.asker, "commit", "ASKER", row[0])

    def seconds(self, function: str) -> float:
        """Time one act, in the state it needs."""
        if function == "init":
            call(self.asker, "deinit", "ASKER")
        begun = perf_counter()
        self.acts[function]()
        taken = perf_counter() - begun
        if function == "init":
            call(self.asker, "topic_notify", "RULED")
        elif function == "topic_listen":
            call(self.asker, "topic_unlisten", "RULED")
        return taken


def call(connection: psycopg.Connection, function: str, *arguments: str) -> None:
    """Call a function that must succeed."""
    places = ", ".join(["%s"] * len(arguments))
    row = connection.execute(f"SELECT messages.{function}({places})", arguments).fetchone()
    if row is None or row[0]["Err"] != "0":
        raise RuntimeError(f"{function}{arguments}: {row}")


def measure(server: Server, rounds: int) -> Findings:
    """Measure each function at each number of rules."""
    with ExitStack() as stack:
        databases = {size: Ruled(server, size, stack) for size in SIZES}
        found = {function: {size: [] for size in SIZES} for function in FUNCTIONS}  # type: dict[str, dict[int, list[float]]]
        for number in range(rounds + 1):
            for function in FUNCTIONS:
                times = [
                    [database.seconds(function) for database in databases.values()]
                    for _ in range(TIMES)
                ]
                for size, column in zip(SIZES, zip(*times, strict=True), strict=True):
                    if number:
                        found[function][size].append(median(column) * 1e6)
    lines = {
        function: [(size, median(figures)) for size, figures in by_size.items()]
        for function, by_size in found.items()
    }
    title = "calls with so many rules"
    return Findings(
        [row(function, found[function]) for function in FUNCTIONS],
        [Curve("scaling: rules", title, "rules", "µs per call", lines)],
    )


def row(function: str, found: dict[int, list[float]]) -> Row:
    """Compare the most rules with the fewest."""
    least, most = SIZES[0], SIZES[-1]
    return Row.of(
        f"scaling: {function} at {most:,} rules", f"{function} at {most:,} rules",
        f"at {least}", "µs", found[most], found[least], reach=1.5, is_at_most=True,
        note="init and call without waiting for another process" if function == "call" else "",
    )  # fmt: skip
