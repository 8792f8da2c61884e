"""The peers of benchmarks.queues: plain SQL, pgmq, procrastinate, PgQueuer, used as documented.

A side fills its queue and empties it in batches. With a batch of 1, each element has its own call
and commit. Larger batches use the side's functions for many elements.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections.abc import Coroutine
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import psycopg

BODY = json.dumps({"payload": "x" * 985})

CREATE_TABLE = """
    CREATE TABLE plain_queue (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        body text NOT NULL,
        available_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        lease uuid
    );
    CREATE INDEX ON plain_queue (available_at, id)
"""
RESERVE = """
    UPDATE plain_queue SET lease = gen_random_uuid(), available_at = clock_timestamp() + '120 s'
     WHERE id = ANY (ARRAY(
        SELECT id FROM plain_queue WHERE available_at <= now()
         ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
    RETURNING id, body, lease
"""
LOCK = """
    SELECT id, body FROM plain_queue WHERE available_at <= now()
     ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED
"""


class Side:
    """A queue to compare: how to fill it and to empty it."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    # Maximum number of elements in a round; lower for sides that finish each separately.
    max_count: ClassVar[int] = 2000

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        # The time of the last element, if the side stops only later; otherwise 0.
        self.done_at = 0.0

    @classmethod
    def is_installed(cls) -> bool:
        """Return whether all packages that the side needs are installed."""
        return all(importlib.util.find_spec(package) for package in cls.packages)

    def fill(self, count: int, batch: int) -> None:
        """Add elements."""
        raise NotImplementedError

    def empty(self, count: int, batch: int) -> None:
        """Take and finish all elements."""
        raise NotImplementedError

    def seconds(self, count: int, batch: int) -> float:
        """Vacuum the tables, then measure filling and emptying."""
        for table in self.tables:
            self.connection.execute(f"VACUUM ANALYZE {table}")
        self.done_at = 0.0
        begun = perf_counter()
        self.fill(count, batch)
        self.empty(count, batch)
        return (self.done_at or perf_counter()) - begun

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()


class PlainLease(Side):
    """A table without rules; reserving and deleting an element are separate transactions."""

    name = "by hand, with a lease"
    tables = ("plain_queue",)

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.connection.execute("DROP TABLE IF EXISTS plain_queue")
        self.connection.execute(CREATE_TABLE)

    def fill(self, count: int, batch: int) -> None:
        """Run INSERT."""
        if batch == 1:
            for _ in range(count):
                self.connection.execute(
                    "INSERT INTO plain_queue (body) VALUES (%s) RETURNING id", [BODY]
                ).fetchone()
            return
        for _ in range(count // batch):
            self.connection.execute(
                "INSERT INTO plain_queue (body) SELECT unnest(%b::text[]) RETURNING id",
                [[BODY] * batch],
            ).fetchall()

    def empty(self, count: int, batch: int) -> None:
        """Run UPDATE … SKIP LOCKED, then DELETE."""
        for _ in range(count // batch):
            rows = self.connection.execute(RESERVE, [batch]).fetchall()
            expect(len(rows), batch)
            self.connection.execute(
                "DELETE FROM plain_queue WHERE id = ANY (%b) AND lease = ANY (%b)",
                [[row[0] for row in rows], [row[2] for row in rows]],
            )


class PlainTransaction(PlainLease):
    """The table of PlainLease; an element is taken and deleted in one transaction."""

    name = "by hand, one transaction"

    def empty(self, count: int, batch: int) -> None:
        """Run SELECT … SKIP LOCKED and DELETE in one transaction."""
        for _ in range(count // batch):
            with self.connection.transaction():
                rows = self.connection.execute(LOCK, [batch]).fetchall()
                expect(len(rows), batch)
                self.connection.execute(
                    "DELETE FROM plain_queue WHERE id = ANY (%b)", [[row[0] for row in rows]]
                )


class Pgmq(Side):
    """The SQL of pgmq's Python package: send, read, delete."""

    name = "pgmq"
    tables = ("pgmq.q_one",)
    packages = ("pgmq",)

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        # Only the SQL is used: the package need not be importable.
        found = importlib.util.find_spec("pgmq")
        folder = Path(found.submodule_search_locations[0])
        self.connection.execute("DROP SCHEMA IF EXISTS pgmq CASCADE")
        self.connection.execute((folder / "sql" / "pgmq.sql").read_text("utf-8"))
        self.connection.execute("SELECT pgmq.create('one')")

    def fill(self, count: int, batch: int) -> None:
        """Call send or send_batch."""
        if batch == 1:
            for _ in range(count):
                self.connection.execute("SELECT pgmq.send('one', %s::jsonb)", [BODY]).fetchone()
            return
        for _ in range(count // batch):
            self.connection.execute(
                "SELECT pgmq.send_batch('one', %b::jsonb[])", [[BODY] * batch]
            ).fetchall()

    def empty(self, count: int, batch: int) -> None:
        """Call read, then delete."""
        for _ in range(count // batch):
            rows = self.connection.execute(
                "SELECT * FROM pgmq.read('one', 120, %s)", [batch]
            ).fetchall()
            expect(len(rows), batch)
            self.connection.execute(
                "SELECT pgmq.delete('one', %b::bigint[])", [[row[0] for row in rows]]
            ).fetchall()


class AsyncSide(Side):
    """A side with an asyncio API."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of this side."""
        return self.runner.run(coroutine)

    def close(self) -> None:
        """Close the event loop and the connections."""
        self.runner.close()
        super().close()


class Procrastinate(AsyncSide):
    """Tasks of procrastinate: defer them, and run its worker with a concurrency of 1 or 10."""

    name = "procrastinate"
    tables = ("procrastinate_jobs", "procrastinate_events")
    packages = ("procrastinate", "psycopg_pool")
    max_count = 200

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        import procrastinate

        logging.getLogger("procrastinate").setLevel(logging.WARNING)
        self.done = 0
        self.app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=4, max_size=20)
        )

        @self.app.task(name="work")
        async def work(payload: str) -> None:
            self.done += 1
            self.done_at = perf_counter()

        self.work = work
        self.run(self._open())

    async def _open(self) -> None:
        await self.app.open_async()
        await self.app.schema_manager.apply_schema_async()

    def fill(self, count: int, batch: int) -> None:
        """Call defer_async or batch_defer_async."""
        self.run(self._fill(count, batch))

    async def _fill(self, count: int, batch: int) -> None:
        payload = BODY
        if batch == 1:
            for _ in range(count):
                await self.work.defer_async(payload=payload)
            return
        for _ in range(count // batch):
            await self.work.batch_defer_async(*[{"payload": payload}] * batch)

    def empty(self, count: int, batch: int) -> None:
        """Run a worker, which deletes finished jobs, until no job is left."""
        self.done = 0
        self.run(
            self.app.run_worker_async(
                wait=False,
                concurrency=1 if batch == 1 else 10,
                delete_jobs="always",
                install_signal_handlers=False,
            )
        )
        expect(self.done, count)

    def close(self) -> None:
        """Close the connection pool."""
        self.run(self.app.close_async())
        super().close()


class PgQueuer(AsyncSide):
    """Jobs of PgQueuer: enqueue them, and run its manager."""

    name = "PgQueuer"
    tables = ("pgqueuer", "pgqueuer_log")
    packages = ("pgqueuer", "asyncpg")

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        import asyncpg
        from pgqueuer.queries import Queries

        logging.getLogger("pgqueuer").setLevel(logging.WARNING)
        self.done = 0
        self.asyncpg = self.run(asyncpg.connect(dsn))
        self.queries = Queries.from_asyncpg_connection(self.asyncpg)
        self.run(self.queries.install())

    def fill(self, count: int, batch: int) -> None:
        """Call enqueue with one payload, or with lists."""
        self.run(self._fill(count, batch))

    async def _fill(self, count: int, batch: int) -> None:
        payload = BODY.encode()
        if batch == 1:
            for _ in range(count):
                await self.queries.enqueue("work", payload)
            return
        for _ in range(count // batch):
            await self.queries.enqueue(["work"] * batch, [payload] * batch, [0] * batch)

    def empty(self, count: int, batch: int) -> None:
        """Run a queue manager until no job is left."""
        self.done = 0
        self.run(self._empty(batch))
        expect(self.done, count)

    async def _empty(self, batch: int) -> None:
        from pgqueuer.qm import QueueManager
        from pgqueuer.types import QueueExecutionMode

        manager = QueueManager(self.queries)

        @manager.entrypoint("work")
        async def work(job: Any) -> None:
            self.done += 1
            self.done_at = perf_counter()

        # Ten is PgQueuer's default.
        await manager.run(batch_size=max(batch, 10), mode=QueueExecutionMode.drain)

    def close(self) -> None:
        """Close the connection."""
        self.run(self.asyncpg.close())
        super().close()


def expect(count: int, expected: int) -> None:
    """Raise AssertionError if the number of elements is wrong."""
    if count != expected:
        raise AssertionError(f"{count} elements instead of {expected}")
