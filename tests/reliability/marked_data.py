"""Data of user1 and user2 in every store, which contain a mark, so that leaks are recognized."""

import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from psycopg import Connection
from psycopg.pq import Trace

from tests.sql.conftest import World

# All data of others contain this text.
MARK = "CANARY-7c1f-of-others"
STAGED = "COPY messages.staged (staging, place, bodies, encs, headers, keys) FROM STDIN"
SECONDS = 3_000
# A message of the trace begins at a line, and may contain line breaks.
MESSAGE = re.compile(r"^(?=[FB]\t\d+\t)", re.MULTILINE)
OTHER_TABLES = (
    "messages.staged", "messages._batch", "psqlmessages_traffic", "psqlmessages_pipelinejob",
    "psqlmessages_destination", "psqlmessages_exchange",
)  # fmt: skip
# Table, foreign key and name column of the owner of a row.
OWNERS = {
    "topic": ("topic", "topic_id", "name"),
    "client": ("client", "client_id", "ident"),
    "queue": ("queue", "queue_id", "name"),
}
# Rows that do not belong to the hostile role, whose names begin with H.
OTHERS = "SELECT t.* FROM psqlmessages_{} AS t WHERE t.{} NOT LIKE 'H%'"
PARTS = """
    SELECT t.* FROM psqlmessages_{} AS t JOIN psqlmessages_{} AS o ON o.id = t.{}
    WHERE o.{} NOT LIKE 'H%'
"""
ROWS = {
    "rules": "SELECT * FROM psqlmessages_auth",
    "topics": "SELECT id, name FROM psqlmessages_topic WHERE name NOT LIKE 'H%'",
    "nodes": OTHERS.format("client", "ident"),
    "listeners": PARTS.format("membership", *OWNERS["client"]),
    "observers": PARTS.format("observation", *OWNERS["client"]),
    "bodies": PARTS.format("body", *OWNERS["topic"]),
    "messages of streams": PARTS.format("streammessage", *OWNERS["topic"]),
    "subscriptions": OTHERS.format("subscription", "ident"),
    "queues": OTHERS.format("queue", "name"),
    "elements": PARTS.format("element", *OWNERS["queue"]),
    "keys": PARTS.format("elementkey", *OWNERS["queue"]),
    "staged rows": "SELECT * FROM messages.staged WHERE role <> 'hostile'",
    "exchanges": "SELECT * FROM psqlmessages_exchange",
    "destinations": "SELECT * FROM psqlmessages_destination",
    "traffic": "SELECT * FROM psqlmessages_traffic",
    "jobs": "SELECT * FROM psqlmessages_pipelinejob",
}
INSERTS = [
    """
    INSERT INTO psqlmessages_exchange
        (name, source_namespace, source_queue, parallel, wsize, reserve, is_running, changed_at)
    VALUES (%(mark)s::text, 'default', %(mark)s::text, 1, 100, true, false, now())
    """,
    """
    INSERT INTO psqlmessages_destination (exchange_id, position, namespace, queue, selector)
    SELECT id, 0, 'default', %(mark)s::text, %(selector)s::text FROM psqlmessages_exchange
    """,
    """
    INSERT INTO psqlmessages_traffic
        (topic, sender, window_seconds, starts_at, count, bytes, size_p50, size_p95, size_p99,
         latency_p50, latency_p95, latency_p99)
    SELECT %(mark)s::text, %(mark)s::text, 60, date_trunc('minute', now()), 1, 1, 1, 1, 1, 1, 1, 1
    """,
    """
    INSERT INTO psqlmessages_pipelinejob (name, state, error)
    VALUES (%(mark)s::text, 'running', %(mark)s::text)
    """,
]


class MarkedData:
    """Fills every store twice: under names that are easy to guess, and under marked names.

    `leaked` has headers, leases, ids and tokens of the former, which an attacker may know.
    """

    def __init__(self, world: World, mark: str, *, body: str = "") -> None:
        self.world, self.mark, self.body = world, mark, body or mark
        self.empty()
        self.leaked: list[str] = []
        self._fill("")
        self._fill(mark)
        values = {"mark": mark, "selector": f"b == {json.dumps(mark)}"}
        for statement in INSERTS:
            world.owner.connection.execute(statement, values)
        self.before = self.rows()

    def empty(self) -> None:
        """Empty the tables that the fixture `world` does not empty."""
        for table in OTHER_TABLES:
            self.world.owner.connection.execute(f"DELETE FROM {table}")

    def _fill(self, prefix: str) -> None:
        world = self.world
        names = ("N1", "N2", "T1", "Q1", "DEAD")
        writer, reader, topic, queue, dead = (prefix + name for name in names)
        for role, ident in (("user1", writer), ("user2", reader)):
            for kind, dest in (("Topic", topic), ("Queue", queue), ("Queue", dead)):
                world.rule(role, ident, kind, dest, "RW", SECONDS)
        world.rule("user1", writer, "Rpc", reader, "W", SECONDS)
        world.rule("user2", reader, "Rpc", writer, "W", SECONDS)
        world.rule("user2", reader, "Topic", f"{prefix}*", "O", SECONDS)
        sender = world.node("user1", writer)
        receiver = world.node("user2", reader, listen=topic, observe=f"{topic}*")
        sender.ok("topic_notify", topic)
        sender.payloads()
        receiver.payloads()
        token = prefix or "token"
        for body in (self.body, self.body * 1_000):
            sender.ok("topic_send", topic, body, token)
            sender.ok("topic_send_many", topic, [body, body], token)
            sender.ok("rpc", reader, token, body)
        # Subscribe before publishing: messages that all subscriptions have read can be removed.
        receiver.read(reader, topic, SECONDS)
        sender.ok("publish", writer, topic, self.body)
        sender.ok("publish_many", writer, topic, [self.body] * 3)
        headers = json.dumps({"h": self.mark, "x-hop-count": "2"})
        pushes = [
            sender.ok("push", writer, queue, self.body, None, headers, None, None, 0, key)
            for key in (f"{self.mark}{number}" for number in range(6))
        ]
        sender.ok("push", writer, queue, self.body, None, headers, None, 1_000.0)
        world.owner.connection.execute(
            "UPDATE psqlmessages_queue SET max_tries = 1, dead_letter_queue = %s WHERE name = %s",
            (dead, queue),
        )
        rows = receiver.elements("reserve", reader, queue, 2, float(SECONDS))
        receiver.ok("rollback", reader, None, [rows[0].lease])
        first, column = 11 if prefix else 1, [self.body]
        with sender.connection.cursor().copy(STAGED) as copy:
            for number in (first, first + 1):
                copy.write_row((UUID(int=number), 0, column, None, [headers], column))
        payloads = receiver.payloads()
        if not prefix:
            self.leaked += [str(push["Id"]) for push in pushes]
            self.leaked.append(rows[1].lease)
            # Without the bodies, which contain the mark.
            self.leaked += [payload.partition("\n")[0] for payload in payloads]

    def rows(self) -> dict[str, list[Any]]:
        execute = self.world.owner.connection.execute
        return {
            store: sorted(map(str, execute(statement).fetchall()))
            for store, statement in ROWS.items()
        }

    def secrets(self) -> set[str]:
        """Return the mark, and what other roles must not know: channels, leases, the MAC key."""
        found = self.world.owner.connection.execute(
            "SELECT channel::text FROM psqlmessages_session WHERE role <> 'hostile'"
            " UNION ALL SELECT channel FROM psqlmessages_queue WHERE name NOT LIKE 'H%'"
            " UNION ALL SELECT encode(pad, 'hex') FROM messages._secret,"
            " LATERAL (VALUES (inner_pad), (outer_pad)) AS v (pad)"
            " UNION ALL SELECT e.lease::text FROM psqlmessages_element AS e"
            " JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name NOT LIKE 'H%'"
        ).fetchall()
        known = " ".join(self.leaked)
        return {self.mark, *(text for (text,) in found if text and text not in known)}


@contextmanager
def fill_stores(
    world: World, *rules: str, mark: str = MARK, body: str = ""
) -> Iterator[MarkedData]:
    """Fill every store with data of others; the hostile role has only these rules."""
    world.rules(*rules)
    marked = MarkedData(world, mark, body=body)
    assert all(marked.before.values()), "a store is empty"
    yield marked
    marked.empty()


class TracedConnection:
    """Traces what the server sends to a connection.

    `found` has the messages that contained a secret, `messages` the number of messages searched.
    """

    def __init__(self, connection: Connection, path: Path) -> None:
        self._connection, self._path = connection, path
        # A descriptor of its own, to empty the file while libpq writes.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.messages = 0
        self.found: list[str] = []
        self._trace()

    def find(self, secrets: Collection[str]) -> list[str]:
        """Return the messages that the server has sent since the last call and contain a secret."""
        # This flushes the trace to the file.
        self._connection.pgconn.untrace()
        text = self._path.read_text(errors="replace")
        os.ftruncate(self._descriptor, 0)
        self._trace()
        sent = [message for message in MESSAGE.split(text) if message.startswith("B\t")]
        self.messages += len(sent)
        found = [message for message in sent if any(secret in message for secret in secrets)]
        self.found += found
        return found

    def _trace(self) -> None:
        self._connection.pgconn.trace(self._descriptor)
        self._connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.pgconn.untrace()
        os.close(self._descriptor)
