"""Our sides of benchmarks.queues: a Node that reserves, its consume, and pop in SQL."""

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


class Reserving(Side):
    """Node.push, reserve and commit: a reservation and a commit for each call."""

    name = "Node.push, reserve, commit"
    tables = ("psqlmessages_element", "psqlmessages_queuecount")
    queue: ClassVar[str] = "RESERVE"

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.node = Node(self.queue, dsn)
        self.node.open()

    def fill(self, count: int, at_once: int) -> None:
        """Call push or push_many."""
        if at_once == 1:
            for _ in range(count):
                self.node.push(self.queue, BODY)
            return
        for _ in range(count // at_once):
            self.node.push_many(self.queue, [BODY] * at_once)

    def empty(self, count: int, at_once: int) -> None:
        """Call reserve, then commit."""
        for _ in range(count // at_once):
            elements = self.node.reserve(self.queue, at_once)
            expect(len(elements), at_once)
            self.node.commit(*elements)

    def close(self) -> None:
        """End the node."""
        self.node.close()
        super().close()


class WorkingSingly(Reserving):
    """A worker that takes and ends each element by itself."""

    name = "Node.push, consume singly"
    queue = "SINGLY"
    most = 200

    def empty(self, count: int, at_once: int) -> None:
        """Take them from consume until nothing is left."""
        elements = self.node.consume(self.queue, batch=1, idle=NOW, group=NOW)
        expect(sum(1 for _ in elements), count)


class Working(Reserving):
    """A worker that takes some at once and ends what is done in groups."""

    name = "Node.push, consume"
    queue = "CONSUME"

    def empty(self, count: int, at_once: int) -> None:
        """Take them from consume until nothing is left, ten at once at least."""
        elements = self.node.consume(self.queue, batch=max(at_once, 10), idle=NOW)
        expect(sum(1 for _ in elements), count)


class Popping(Side):
    """The functions of SQL, called by psycopg; taken and removed in one transaction."""

    name = "push, pop in a transaction (SQL)"
    tables = Reserving.tables

    def fill(self, count: int, at_once: int) -> None:
        """Call push or push_many."""
        run = self.connection.execute
        if at_once == 1:
            for _ in range(count):
                run("SELECT messages.push('POP', 'POP', %s)", [BODY]).fetchone()
            return
        sql = "SELECT messages.push_many('POP', 'POP', %b::text[])"
        for _ in range(count // at_once):
            run(sql, [[BODY] * at_once]).fetchone()

    def empty(self, count: int, at_once: int) -> None:
        """Call pop; what is done with the elements would stand beside it."""
        for _ in range(count // at_once):
            with self.connection.transaction():
                rows = self.connection.execute(
                    "SELECT * FROM messages.pop('POP', 'POP', %s)", [at_once]
                ).fetchall()
                expect(len(rows), at_once)


def is_durable(dsn: str, connection: psycopg.Connection) -> bool:
    """Tell whether what a node pushes and commits is on the disk when it answers.

    Of twenty looks some may see what the server writes for itself, which waits for nobody.
    """
    asked = "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn"
    written = "SELECT pg_current_wal_insert_lsn()"
    seen = 0
    with Node("DURABLE", dsn) as node:
        for _ in range(20):
            node.push("DURABLE", BODY)
            (element,) = node.reserve("DURABLE")
            node.commit(element)
            row = connection.execute(written).fetchone()
            seen += connection.execute(asked, row).fetchone()[0]
    return seen >= 15
