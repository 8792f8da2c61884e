"""The costs of calls with many rules: databases that differ only in their rules take turns."""

from __future__ import annotations

import json
from contextlib import ExitStack
from statistics import median
from time import perf_counter

import psycopg

from benchmarks.databases import create_database
from benchmarks.results import Curve, Findings, Row
from project.postgres import Server

SIZES = (10, 100, 1_000, 10_000, 100_000)
TIMES = 40
USED_RULES = [
    ("CALLER", "Rpc", "ANSWERER", "W"),
    ("ANSWERER", "Rpc", "CALLER", "W"),
    ("CALLER", "Topic", "RULED", "RW"),
    ("ANSWERER", "Topic", "RULED", "R"),
    ("CALLER", "Queue", "RULED", "RW"),
]
# Each node has ten rules: a topic of its own, a node to call, a pattern, and seven topics that
# other nodes have too.
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


class RulesDatabase:
    """A database with a number of rules, and two nodes."""

    def __init__(self, server: Server, size: int, stack: ExitStack) -> None:
        dsn = create_database(server, f"ruled{size}", USED_RULES)
        self.caller = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self.answerer = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self.caller.execute(FILL, [size - len(USED_RULES) - 1])
        self.caller.execute("VACUUM ANALYZE")
        for connection, ident in (self.caller, "CALLER"), (self.answerer, "ANSWERER"):
            connection.execute("SET synchronous_commit = off")
            run_function(connection, "init", ident)
        run_function(self.caller, "topic_notify", "RULED")
        run_function(self.answerer, "topic_listen", "RULED")
        acts = (self.send, self.listen, self.init, self.call, self.publish, self.push_and_commit)
        self.acts = dict(zip(FUNCTIONS, acts, strict=True))

    def send(self) -> None:
        """Send to one listener."""
        run_function(self.caller, "topic_send", "RULED", BODY)

    def listen(self) -> None:
        """Listen to a topic."""
        run_function(self.caller, "topic_listen", "RULED")

    def init(self) -> None:
        """Register the only node of a session."""
        run_function(self.caller, "init", "CALLER")

    def call(self) -> None:
        """Call and answer, without waiting for another process."""
        run_function(self.caller, "rpc", "ANSWERER", "TOKEN", BODY)
        run_function(self.answerer, "return", "CALLER", self.read_token(), BODY)

    def read_token(self) -> str:
        """Read the token of the received call."""
        for notification in self.answerer.notifies():
            header = json.loads(notification.payload.partition("\n")[0])
            if header["Type"] == "Rpc":
                return str(header["Token"])
        raise RuntimeError("the connection ended")

    def publish(self) -> None:
        """Store a message."""
        run_function(self.caller, "publish", "CALLER", "RULED", BODY)

    def push_and_commit(self) -> None:
        """Push, reserve and commit an element."""
        run_function(self.caller, "push", "CALLER", "RULED", BODY)
        reserve = "SELECT lease FROM messages.reserve('CALLER', 'RULED')"
        row = self.caller.execute(reserve).fetchone()
        run_function(self.caller, "commit", "CALLER", row[0])

    def seconds(self, function: str) -> float:
        """Measure a call; set up the state that this call needs, and restore the former one."""
        if function == "init":
            run_function(self.caller, "deinit", "CALLER")
        begun = perf_counter()
        self.acts[function]()
        taken = perf_counter() - begun
        if function == "init":
            run_function(self.caller, "topic_notify", "RULED")
        elif function == "topic_listen":
            run_function(self.caller, "topic_unlisten", "RULED")
        return taken


def run_function(connection: psycopg.Connection, function: str, *arguments: str) -> None:
    """Call an SQL function; raise RuntimeError if it returns an error."""
    placeholders = ", ".join(["%s"] * len(arguments))
    row = connection.execute(f"SELECT messages.{function}({placeholders})", arguments).fetchone()
    if row is None or row[0]["Err"] != "0":
        raise RuntimeError(f"{function}{arguments}: {row}")


def measure(server: Server, rounds: int) -> Findings:
    """Measure each function at each number of rules."""
    with ExitStack() as stack:
        databases = {size: RulesDatabase(server, size, stack) for size in SIZES}
        found: dict[str, dict[int, list[float]]]
        found = {function: {size: [] for size in SIZES} for function in FUNCTIONS}
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
    return Findings(
        [to_row(function, found[function]) for function in FUNCTIONS],
        [Curve("scaling: rules", "calls by number of rules", "rules", "µs per call", lines)],
    )


def to_row(function: str, found: dict[int, list[float]]) -> Row:
    """Compare the largest number of rules with the smallest."""
    small, large = SIZES[0], SIZES[-1]
    return Row.of(
        f"scaling: {function} at {large:,} rules", f"{function} at {large:,} rules",
        f"at {small}", "µs", found[large], found[small], goal=1.5, is_lower_better=True,
        note="call and answer, without waiting for another process" if function == "call" else "",
    )  # fmt: skip
