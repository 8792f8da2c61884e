"""Our sides of benchmarks.queues: reserve and consume of a Node, and pop in SQL."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

import psycopg

from benchmarks.queue_peers import BODY, Side, expect
from psqlmessages import Node

SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT current_user, q.name, 'Queue', q.name, 'RW', 60
    FROM unnest('{RESERVE,SINGLY,CONSUME,POP,DURABLE}'::text[]) AS q (name)
"""
NOW = timedelta(0)


class ReserveSide(Side):
    """Node.push, reserve and commit: each call reserves and commits ``batch`` elements."""

    name = "Node.push, reserve, commit"
    tables = ("psqlmessages_element", "psqlmessages_queuecount")
    queue: ClassVar[str] = "RESERVE"

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.node = Node(self.queue, dsn)
        self.node.open()

    def fill(self, count: int, batch: int) -> None:
        """Call push or push_many."""
        if batch == 1:
            for _ in range(count):
                self.node.push(self.queue, BODY)
            return
        for _ in range(count // batch):
            self.node.push_many(self.queue, [BODY] * batch)

    def empty(self, count: int, batch: int) -> None:
        """Call reserve, then commit."""
        for _ in range(count // batch):
            elements = self.node.reserve(self.queue, batch)
            expect(len(elements), batch)
            self.node.commit(*elements)

    def close(self) -> None:
        """Close the node."""
        self.node.close()
        super().close()


class SingleConsumeSide(ReserveSide):
    """A consumer that reserves and commits each element separately."""

    name = "Node.push, consume singly"
    queue = "SINGLY"
    max_count = 200

    def empty(self, count: int, batch: int) -> None:
        """Consume until the queue is empty."""
        elements = self.node.consume(self.queue, batch=1, idle=NOW, group=NOW)
        expect(sum(1 for _ in elements), count)


class ConsumeSide(ReserveSide):
    """A consumer that reserves and commits elements in groups."""

    name = "Node.push, consume"
    queue = "CONSUME"

    def empty(self, count: int, batch: int) -> None:
        """Consume until the queue is empty, in batches of at least ten."""
        elements = self.node.consume(self.queue, batch=max(batch, 10), idle=NOW)
        expect(sum(1 for _ in elements), count)


class PopSide(Side):
    """The SQL functions, called by psycopg: pop in an explicit transaction."""

    name = "push, pop in a transaction (SQL)"
    tables = ReserveSide.tables

    def fill(self, count: int, batch: int) -> None:
        """Call push or push_many."""
        run = self.connection.execute
        if batch == 1:
            for _ in range(count):
                run("SELECT messages.push('POP', 'POP', %s)", [BODY]).fetchone()
            return
        sql = "SELECT messages.push_many('POP', 'POP', %b::text[])"
        for _ in range(count // batch):
            run(sql, [[BODY] * batch]).fetchone()

    def empty(self, count: int, batch: int) -> None:
        """Call pop, in a transaction that could also contain the work."""
        for _ in range(count // batch):
            with self.connection.transaction():
                rows = self.connection.execute(
                    "SELECT * FROM messages.pop('POP', 'POP', %s)", [batch]
                ).fetchall()
                expect(len(rows), batch)


def is_durable(dsn: str, connection: psycopg.Connection) -> bool:
    """Return whether pushes and commits of a node are on the disk when the calls return.

    Some of the twenty checks may fail: background processes of the server also write WAL.
    """
    is_flushed = "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn"
    insert_position = "SELECT pg_current_wal_insert_lsn()"
    flushed = 0
    with Node("DURABLE", dsn) as node:
        for _ in range(20):
            node.push("DURABLE", BODY)
            (element,) = node.reserve("DURABLE")
            node.commit(element)
            row = connection.execute(insert_position).fetchone()
            flushed += connection.execute(is_flushed, row).fetchone()[0]
    return flushed >= 15
