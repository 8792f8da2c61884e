"""Curves of streams: how calls depend on the stored messages, and on the topic's subscriptions.

A point is the fastest round, which other work of the machine has disturbed least.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import psycopg

from benchmarks.results import Curve
from benchmarks.rounds import Act, measure_rates
from benchmarks.servers import temporary_server

STORED = (10_000, 100_000, 1_000_000)
SUBSCRIPTIONS = (1, 10, 100, 1000)
BODY, BATCH, MESSAGES_PER_CALL = "x" * 100, 500, 100_000
SECONDS = 0.3
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'PUB', 'Topic', 'STORED', 'W', 5),
        ('psqlmessages', 'FIRST', 'Topic', 'STORED', 'R', 5),
        ('psqlmessages', 'MIDDLE', 'Topic', 'STORED', 'R', 5),
        ('psqlmessages', 'END', 'Topic', 'STORED', 'R', 5)
"""
FILL = "SELECT messages.publish_many('PUB', 'STORED', array_fill(%s::text, ARRAY[%s]))"
PUBLISH = "SELECT messages.publish('PUB', 'STORED', %s)"
READ = "SELECT * FROM messages.subscribe(%s, 'STORED', 3600, 500)"
MOVE = "SELECT messages.subscribe_from(%s, '{STORED}', ARRAY[%s]::bigint[], 3600)"
LAST_ID = "SELECT last_value FROM messages._stream_id"


def measure(rounds: int) -> list[Curve]:
    """Measure all curves, on a temporary server."""
    with (
        temporary_server() as server,
        psycopg.connect(server.url(), autocommit=True) as connection,
        psycopg.connect(server.superuser_url(), autocommit=True) as superuser,
    ):
        return [
            _by_subscriptions(connection, rounds),
            *_by_stored(connection, rounds, lambda: superuser.execute("CHECKPOINT")),
        ]


def _by_subscriptions(connection: psycopg.Connection, rounds: int) -> Curve:
    for count in SUBSCRIPTIONS:
        connection.execute(
            "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES"
            " ('psqlmessages', 'PUB', 'Topic', %(topic)s, 'W', 5),"
            " ('psqlmessages', 'SUB*', 'Topic', %(topic)s, 'R', 5)",
            {"topic": f"OF{count}"},
        )
        for number in range(count):
            connection.execute(
                "SELECT messages.subscribe(%s, %s, 3600)", [f"SUB{number}", f"OF{count}"]
            )
    sides = {
        str(count): lambda topic=f"OF{count}": connection.execute(
            "SELECT messages.publish('PUB', %s, %s)", [topic, BODY]
        )
        for count in SUBSCRIPTIONS
    }
    found = measure_rates(sides, rounds, SECONDS)
    connection.execute("DELETE FROM psqlmessages_subscription")
    points = [(count, 1e6 / max(found[str(count)])) for count in SUBSCRIPTIONS]
    return Curve(
        "streams: publish by subscriptions", "publish one by one", "subscriptions to the topic",
        "µs per call", {"publish": points},
    )  # fmt: skip


def _by_stored(connection: psycopg.Connection, rounds: int, checkpoint: Act) -> Iterator[Curve]:
    connection.execute(SETUP)
    lines: dict[str, list[tuple[float, float]]] = {
        "publish": [], "500 from the end": [], "500 from the middle": []
    }  # fmt: skip
    removals: list[tuple[float, float]] = []
    for stored in STORED:
        for ident in ("FIRST", "MIDDLE", "END"):
            connection.execute(READ, [ident])
        first, last = _fill(connection, stored)
        checkpoint()
        connection.execute(MOVE, ["MIDDLE", (first + last) // 2])
        connection.execute(MOVE, ["END", last - BATCH])
        sides = {
            "publish": lambda: connection.execute(PUBLISH, [BODY]),
            "500 from the end": lambda: _read(connection, "END"),
            "500 from the middle": lambda: _read(connection, "MIDDLE"),
        }
        for name, found in measure_rates(sides, rounds, SECONDS).items():
            lines[name].append((stored, 1e6 / max(found)))
        removals.append((stored, _measure_removal(connection)))
    yield Curve(
        "streams: by stored messages", "publish, and read 500 (rolled back)", "messages stored",
        "µs per call", lines, "bodies of 100 B",
    )  # fmt: skip
    title = "removal of all messages"
    yield Curve("streams: removal", title, "messages removed", "ms", {"prune": removals})


def _fill(connection: psycopg.Connection, count: int) -> tuple[int, int]:
    first = _query_number(connection, LAST_ID)
    for _ in range(0, count, MESSAGES_PER_CALL):
        connection.execute(FILL, [BODY, min(count, MESSAGES_PER_CALL)])
    return first, _query_number(connection, LAST_ID)


def _read(connection: psycopg.Connection, ident: str) -> None:
    connection.execute("BEGIN")
    found = connection.execute(READ, [ident]).fetchall()
    connection.execute("ROLLBACK")
    if len(found) != BATCH:
        raise AssertionError(f"{len(found)} rows instead of {BATCH}")


def _measure_removal(connection: psycopg.Connection) -> float:
    """Move all subscriptions to the end; return the ms that the removal of all messages takes."""
    last = _query_number(connection, LAST_ID)
    for ident in ("FIRST", "MIDDLE", "END"):
        connection.execute(MOVE, [ident, last])
    begun = perf_counter()
    connection.execute("SELECT messages._prune_streams()")
    taken = (perf_counter() - begun) * 1000
    left = _query_number(connection, "SELECT count(*) FROM psqlmessages_streammessage")
    if left:
        raise AssertionError(f"{left} messages were not removed")
    return taken


def _query_number(connection: psycopg.Connection, statement: str) -> int:
    row = connection.execute(statement).fetchone()
    return int(row[0]) if row else 0
