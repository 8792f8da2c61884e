"""The peers of benchmarks.queues: by hand, pgmq, procrastinate, PgQueuer, each as its pages tell.

A side fills its queue and empties it, so many at once: 1 means a call and its commit for each
element, more means what the side offers for many.
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

BY_HAND = """
    CREATE TABLE by_hand (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        body text NOT NULL,
        available_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        lease uuid
    );
    CREATE INDEX ON by_hand (available_at, id)
"""
RESERVE_BY_HAND = """
    UPDATE by_hand SET lease = gen_random_uuid(), available_at = clock_timestamp() + '120 s'
     WHERE id = ANY (ARRAY(
        SELECT id FROM by_hand WHERE available_at <= now()
         ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
    RETURNING id, body, lease
"""
LOCK_BY_HAND = """
    SELECT id, body FROM by_hand WHERE available_at <= now()
     ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED
"""


class Side:
    """One of those that are compared: how it fills its queue and empties it."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    # The most elements to measure with: fewer for who ends each by itself, however many are there.
    most: ClassVar[int] = 2000

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        # When the last element was done, where the side's worker ends later than that.
        self.done_at = 0.0

    @classmethod
    def is_here(cls) -> bool:
        """Tell whether all packages it needs are installed."""
        return all(importlib.util.find_spec(package) for package in cls.needs)

    def fill(self, count: int, at_once: int) -> None:
        """Add so many elements."""
        raise AssertionError("each side has its own")

    def empty(self, count: int, at_once: int) -> None:
        """Take and finish so many elements: all that are there."""
        raise AssertionError("each side has its own")

    def seconds(self, count: int, at_once: int) -> float:
        """Measure filling and emptying, on tables that are clean."""
        for table in self.tables:
            self.connection.execute(f"VACUUM ANALYZE {table}")
        self.done_at = 0.0
        begun = perf_counter()
        self.fill(count, at_once)
        self.empty(count, at_once)
        return (self.done_at or perf_counter()) - begun

    def close(self) -> None:
        """End its connections."""
        self.connection.close()


class ByHand(Side):
    """A table by hand; who takes an element holds a lease on it, in a transaction of its own."""

    name = "by hand, with a lease"
    tables = ("by_hand",)

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.connection.execute("DROP TABLE IF EXISTS by_hand")
        self.connection.execute(BY_HAND)

    def fill(self, count: int, at_once: int) -> None:
        """INSERT."""
        if at_once == 1:
            for _ in range(count):
                self.connection.execute(
                    "INSERT INTO by_hand (body) VALUES (%s) RETURNING id", [BODY]
                ).fetchone()
            return
        for _ in range(count // at_once):
            self.connection.execute(
                "INSERT INTO by_hand (body) SELECT unnest(%b::text[]) RETURNING id",
                [[BODY] * at_once],
            ).fetchall()

    def empty(self, count: int, at_once: int) -> None:
        """UPDATE … SKIP LOCKED, then DELETE."""
        for _ in range(count // at_once):
            rows = self.connection.execute(RESERVE_BY_HAND, [at_once]).fetchall()
            expect(len(rows), at_once)
            self.connection.execute(
                "DELETE FROM by_hand WHERE id = ANY (%b) AND lease = ANY (%b)",
                [[row[0] for row in rows], [row[2] for row in rows]],
            )


class ByHandAtOnce(ByHand):
    """The same where who takes an element holds a transaction open until it is done with it."""

    name = "by hand, one transaction"

    def empty(self, count: int, at_once: int) -> None:
        """SELECT … SKIP LOCKED and DELETE, in one transaction."""
        for _ in range(count // at_once):
            with self.connection.transaction():
                rows = self.connection.execute(LOCK_BY_HAND, [at_once]).fetchall()
                expect(len(rows), at_once)
                self.connection.execute(
                    "DELETE FROM by_hand WHERE id = ANY (%b)", [[row[0] for row in rows]]
                )


class Pgmq(Side):
    """The SQL that pgmq's Python package brings: send, read, delete."""

    name = "pgmq"
    tables = ("pgmq.q_one",)
    needs = ("pgmq",)

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        # Its SQL only: the package itself need not be importable.
        found = importlib.util.find_spec("pgmq")
        folder = Path(found.submodule_search_locations[0])
        self.connection.execute("DROP SCHEMA IF EXISTS pgmq CASCADE")
        self.connection.execute((folder / "sql" / "pgmq.sql").read_text("utf-8"))
        self.connection.execute("SELECT pgmq.create('one')")

    def fill(self, count: int, at_once: int) -> None:
        """Call send or send_batch."""
        if at_once == 1:
            for _ in range(count):
                self.connection.execute("SELECT pgmq.send('one', %s::jsonb)", [BODY]).fetchone()
            return
        for _ in range(count // at_once):
            self.connection.execute(
                "SELECT pgmq.send_batch('one', %b::jsonb[])", [[BODY] * at_once]
            ).fetchall()

    def empty(self, count: int, at_once: int) -> None:
        """Call read, then delete."""
        for _ in range(count // at_once):
            rows = self.connection.execute(
                "SELECT * FROM pgmq.read('one', 120, %s)", [at_once]
            ).fetchall()
            expect(len(rows), at_once)
            self.connection.execute(
                "SELECT pgmq.delete('one', %b::bigint[])", [[row[0] for row in rows]]
            ).fetchall()


class AsyncSide(Side):
    """A side that lives in an event loop."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the loop of this side."""
        return self.runner.run(coroutine)

    def close(self) -> None:
        """End loop and connections."""
        self.runner.close()
        super().close()


class Procrastinate(AsyncSide):
    """Defer a task, and let its worker run it: one at a time, or many at once."""

    name = "procrastinate"
    tables = ("procrastinate_jobs", "procrastinate_events")
    needs = ("procrastinate", "psycopg_pool")
    most = 200

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        import procrastinate

        logging.getLogger("procrastinate").setLevel(logging.WARNING)
        self.seen = 0
        self.app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=4, max_size=20)
        )

        @self.app.task(name="work")
        async def work(payload: str) -> None:
            self.seen += 1
            self.done_at = perf_counter()

        self.work = work
        self.run(self._open())

    async def _open(self) -> None:
        await self.app.open_async()
        await self.app.schema_manager.apply_schema_async()

    def fill(self, count: int, at_once: int) -> None:
        """Call defer_async or batch_defer_async."""
        self.run(self._fill(count, at_once))

    async def _fill(self, count: int, at_once: int) -> None:
        payload = BODY
        if at_once == 1:
            for _ in range(count):
                await self.work.defer_async(payload=payload)
            return
        for _ in range(count // at_once):
            await self.work.batch_defer_async(*[{"payload": payload}] * at_once)

    def empty(self, count: int, at_once: int) -> None:
        """Run its worker until nothing is left; what is done is deleted."""
        self.seen = 0
        self.run(
            self.app.run_worker_async(
                wait=False,
                concurrency=1 if at_once == 1 else 10,
                delete_jobs="always",
                install_signal_handlers=False,
            )
        )
        expect(self.seen, count)

    def close(self) -> None:
        """End its pool."""
        self.run(self.app.close_async())
        super().close()


class PgQueuer(AsyncSide):
    """Enqueue jobs, and let its manager run them."""

    name = "PgQueuer"
    tables = ("pgqueuer", "pgqueuer_log")
    needs = ("pgqueuer", "asyncpg")

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        import asyncpg
        from pgqueuer.queries import Queries

        logging.getLogger("pgqueuer").setLevel(logging.WARNING)
        self.seen = 0
        self.link = self.run(asyncpg.connect(dsn))
        self.queries = Queries.from_asyncpg_connection(self.link)
        self.run(self.queries.install())

    def fill(self, count: int, at_once: int) -> None:
        """Call enqueue, with one or with lists."""
        self.run(self._fill(count, at_once))

    async def _fill(self, count: int, at_once: int) -> None:
        payload = BODY.encode()
        if at_once == 1:
            for _ in range(count):
                await self.queries.enqueue("work", payload)
            return
        for _ in range(count // at_once):
            await self.queries.enqueue(["work"] * at_once, [payload] * at_once, [0] * at_once)

    def empty(self, count: int, at_once: int) -> None:
        """Run its manager until nothing is left."""
        self.seen = 0
        self.run(self._empty(at_once))
        expect(self.seen, count)

    async def _empty(self, at_once: int) -> None:
        from pgqueuer.qm import QueueManager
        from pgqueuer.types import QueueExecutionMode

        manager = QueueManager(self.queries)

        @manager.entrypoint("work")
        async def work(job: Any) -> None:
            self.seen += 1
            self.done_at = perf_counter()

        # Its own default where elements come one by one.
        await manager.run(batch_size=max(at_once, 10), mode=QueueExecutionMode.drain)

    def close(self) -> None:
        """End its connection."""
        self.run(self.link.close())
        super().close()


def expect(found: int, wanted: int) -> None:
    """Take care that all was there."""
    if found != wanted:
        raise AssertionError(f"{found} elements instead of {wanted}")


PEERS: tuple[type[Side], ...] = (ByHand, ByHandAtOnce, Pgmq, Procrastinate, PgQueuer)
