"""Scaling: the cost of calls with many nodes, sessions and rules, and the time to reconnect."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from threading import Event
from time import monotonic

import psycopg

from benchmarks import many_rules, reconnects
from benchmarks.databases import create_database
from benchmarks.listeners import CHANNEL, TOPIC, listening
from benchmarks.results import Curve, Findings, Options, Row, run
from benchmarks.rounds import Act, measure_rates
from benchmarks.servers import temporary_server
from project.postgres import Server
from psqlmessages import Node

SETTINGS = {"max_connections": "500"}
BODY = "x" * 10
NOTIFY = f"SELECT pg_notify('{CHANNEL}', %s)"
RULES = [("SENDER", "Topic", TOPIC, "W"), ("LISTENER.*", "Topic", TOPIC, "R")]
NODES, QUICK_NODES = (1, 10, 100, 1000), (1, 100)
SESSIONS, QUICK_SESSIONS = (1, 10, 50, 100), (10,)
SECONDS, QUICK_SECONDS = 0.5, 0.2
TIMEOUT_SECONDS = 30


def measure(options: Options) -> Findings:
    """Measure sends to many nodes and sessions, calls with many rules, and reconnects."""
    findings = Findings()
    with temporary_server(SETTINGS) as server:
        with ExitStack() as stack:
            findings.add(by_nodes(server, stack, options))
        with ExitStack() as stack:
            findings.add(by_sessions(server, stack, options))
        if not options.is_quick:
            findings.add(many_rules.measure(server, options.rounds))
            findings.add(reconnects.measure(server))
    return findings


def by_nodes(server: Server, stack: ExitStack, options: Options) -> Findings:
    """Send to 1, 10, 100 and 1,000 nodes that share one session."""
    sides: dict[str, Act] = {}
    sizes = QUICK_NODES if options.is_quick else NODES
    for count in sizes:
        dsn = create_database(server, f"nodes{count}", RULES)
        pipe = stack.enter_context(listening(dsn, 1, count))
        node = open_sender(dsn, stack)
        node.topic_send(TOPIC, BODY)
        expect_count(pipe, 1)
        sides[str(count)] = partial(node.topic_send, TOPIC, BODY)
    found = measure_rates(sides, options.rounds, QUICK_SECONDS if options.is_quick else SECONDS)
    costs = {count: [1e6 / rate for rate in found[str(count)]] for count in sizes}
    row = Row.of(
        f"scaling: send to {sizes[-1]:,} nodes of one session",
        f"topic_send to {sizes[-1]:,} nodes of one session", "to one node", "µs",
        costs[sizes[-1]], costs[1], goal=1.5, is_lower_better=True,
        note="one notification for all nodes",
    )  # fmt: skip
    curve = Curve(
        "scaling: nodes on one session", "topic_send to nodes that share a session", "nodes",
        "µs per send", {"topic_send": to_points(costs)},
    )  # fmt: skip
    return Findings([row], [curve])


def by_sessions(server: Server, stack: ExitStack, options: Options) -> Findings:
    """Compare sends with pg_notify to the same number of sessions."""
    sides: dict[str, Act] = {}
    sizes = QUICK_SESSIONS if options.is_quick else SESSIONS
    for count in sizes:
        dsn = create_database(server, f"sessions{count}", RULES)
        stack.enter_context(listening(dsn, count))
        node = open_sender(dsn, stack)
        sides[f"ours {count}"] = partial(node.topic_send, TOPIC, BODY)
        bare = create_database(server, f"bare{count}")
        stack.enter_context(listening(bare, count, is_bare=True))
        connection = stack.enter_context(psycopg.connect(bare, autocommit=True))
        sides[f"bare {count}"] = partial(connection.execute, NOTIFY, [BODY])
    found = measure_rates(sides, options.rounds, QUICK_SECONDS if options.is_quick else SECONDS)
    rows = [
        Row.of(
            f"scaling: send to {count} sessions", f"topic_send to {count} sessions",
            "pg_notify to as many", "sends/s", found[f"ours {count}"], found[f"bare {count}"],
            goal=0.7,
        )
        for count in sizes
    ]  # fmt: skip
    lines = {
        name: to_points({count: found[f"{side} {count}"] for count in sizes})
        for name, side in (("topic_send", "ours"), ("pg_notify", "bare"))
    }
    title = "sends to nodes, each with its own session"
    return Findings(rows, [Curve("scaling: sessions", title, "sessions", "sends/s", lines)])


def open_sender(dsn: str, stack: ExitStack) -> Node:
    """Open a node that may send to the topic."""
    node = stack.enter_context(Node("SENDER", dsn))
    node.topic_notify(TOPIC)
    return node


def expect_count(pipe: Connection, count: int) -> None:
    """Wait for this number of notifications; raise RuntimeError if there are more or fewer."""
    pause, deadline = Event(), monotonic() + TIMEOUT_SECONDS
    while (received := query_count(pipe)) < count:
        if monotonic() > deadline:
            raise RuntimeError(f"{received} of {count} notifications arrived")
        pause.wait(0.01)
    if received > count:
        raise RuntimeError(f"{received} notifications arrived instead of {count}")


def query_count(pipe: Connection) -> int:
    """Return the number of messages that the listeners have received."""
    pipe.send(None)
    return int(pipe.recv())


def to_points(figures: Mapping[int, list[float]]) -> list[tuple[float, float]]:
    """Return the points of a curve: the median for each size."""
    return [(size, sorted(found)[len(found) // 2]) for size, found in figures.items()]


if __name__ == "__main__":
    run(measure, __doc__)
