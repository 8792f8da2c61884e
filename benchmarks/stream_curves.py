"""Curves of streams: what a call costs by stored messages, and by subscriptions to its topic.

Points are of the fastest round: what else the machine does at that time says nothing of sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import psycopg

from benchmarks.results import Curve
from benchmarks.rounds import Act, rates
from benchmarks.servers import temporary_server

STORED = (10_000, 100_000, 1_000_000, 10_000_000)
SUBSCRIPTIONS = (1, 10, 100, 1000)
BODY, BATCH, AT_ONCE = "x" * 100, 500, 100_000
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
PLACE = "SELECT messages.subscribe_from(%s, '{STORED}', ARRAY[%s]::bigint[], 3600)"
LAST = "SELECT last_value FROM messages._stream_id"


def measured(rounds: int) -> list[Curve]:
    """Measure them, on a server of their own."""
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
    found = rates(sides, rounds, SECONDS)
    connection.execute("DELETE FROM psqlmessages_subscription")
    points = [(count, 1e6 / max(found[str(count)])) for count in SUBSCRIPTIONS]
    return Curve(
        "streams: publish by subscriptions", "publish one by one", "subscriptions to the topic",
        "µs a call", {"publish": points},
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
        connection.execute(PLACE, ["MIDDLE", (first + last) // 2])
        connection.execute(PLACE, ["END", last - BATCH])
        sides = {
            "publish": lambda: connection.execute(PUBLISH, [BODY]),
            "500 from the end": lambda: _read(connection, "END"),
            "500 from the middle": lambda: _read(connection, "MIDDLE"),
        }
        for name, found in rates(sides, rounds, SECONDS).items():
            lines[name].append((stored, 1e6 / max(found)))
        removals.append((stored, _removal(connection)))
    yield Curve(
        "streams: by stored messages", "publish, and read 500 (rolled back)", "messages stored",
        "µs a call", lines, "bodies of 100 B",
    )  # fmt: skip
    yield Curve(
        "streams: removal", "removal of all at once", "messages removed", "ms", {"prune": removals},
    )  # fmt: skip


def _fill(connection: psycopg.Connection, count: int) -> tuple[int, int]:
    first = _one(connection, LAST)
    for _ in range(0, count, AT_ONCE):
        connection.execute(FILL, [BODY, min(count, AT_ONCE)])
    return first, _one(connection, LAST)


def _read(connection: psycopg.Connection, ident: str) -> None:
    with _rolled_back(connection):
        found = connection.execute(READ, [ident]).fetchall()
    if len(found) != BATCH:
        raise AssertionError(f"{len(found)} rows instead of {BATCH}")


@contextmanager
def _rolled_back(connection: psycopg.Connection) -> Iterator[None]:
    connection.execute("BEGIN")
    yield
    connection.execute("ROLLBACK")


def _removal(connection: psycopg.Connection) -> float:
    """Tell how many ms it takes to remove all that is stored, when nobody needs it any more."""
    last = _one(connection, LAST)
    for ident in ("FIRST", "MIDDLE", "END"):
        connection.execute(PLACE, [ident, last])
    begun = perf_counter()
    connection.execute("SELECT messages._prune_streams()")
    taken = (perf_counter() - begun) * 1000
    left = _one(connection, "SELECT count(*) FROM psqlmessages_streammessage")
    if left:
        raise AssertionError(f"{left} messages were not removed")
    return taken


def _one(connection: psycopg.Connection, statement: str) -> int:
    row = connection.execute(statement).fetchone()
    return int(row[0]) if row else 0
