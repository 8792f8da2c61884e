"""Driving readers as Spark does, without it: the same calls in the same order, much quicker."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from psqlmessages.pipeline import reading
from psqlmessages.pipeline.source import MessagesSource
from tests.sql.conftest import World

Rows = list[dict[str, Any]]
Offset = dict[str, Any]


class Query:
    """A streaming query: `checkpoint` is what a restart begins with, as Spark's logs have it."""

    def __init__(self, schema: StructType | None = None, **options: Any) -> None:
        self.options = {name: str(value) for name, value in options.items()}
        self.schema = schema
        self.start: Offset | None = None
        self.end: Offset | None = None
        self.reader = self.fresh_reader()

    def fresh_reader(self) -> DataSourceStreamReader:
        """Make a reader that was told nothing yet, as each of Spark's processes has one."""
        source = MessagesSource(self.options)
        declared = source.schema()
        assert isinstance(declared, StructType)
        return source.streamReader(self.schema or declared)

    def begin(self) -> Offset:
        """Start a query without a checkpoint."""
        self.start = self.reader.initialOffset()
        return self.start

    def plan(self) -> bool:
        """Ask for the next batch, and write it to the log; False where there is none."""
        assert self.start is not None
        limit = self.reader.getDefaultReadLimit()
        self.end = through_json(self.reader.latestOffset(self.start, limit))
        return self.end != self.start

    def read(self) -> Rows:
        """Read the planned batch, each partition as an executor has it."""
        assert self.start is not None
        assert self.end is not None
        rows: Rows = []
        for partition in self.reader.partitions(self.start, self.end):
            executor = pickle.loads(pickle.dumps(self.fresh_reader()))  # noqa: S301
            for batch in executor.read(pickle.loads(pickle.dumps(partition))):  # noqa: S301
                rows += batch.to_pylist()
        return rows

    def done(self) -> None:
        """Write the batch to the log of those that are done."""
        self.start = self.end

    def batch(self) -> Rows:
        """Plan, read and commit one batch; its rows in the order of their ids."""
        if self.start is None:
            self.begin()
        if not self.plan():
            return []
        rows = self.read()
        self.done()
        self.reader.commit(self.end or {})
        return sorted(rows, key=lambda row: row["id"])

    def bodies(self) -> list[str]:
        """Read one batch; its bodies."""
        return [row["body"] for row in self.batch()]

    def available_now(self) -> list[list[str]]:
        """Run until all that is there now is read; the bodies of each batch."""
        if self.start is None:
            self.begin()
        assert isinstance(self.reader, SupportsTriggerAvailableNow)
        self.reader.prepareForTriggerAvailableNow()
        batches: list[list[str]] = []
        while bodies := self.bodies():
            batches.append(bodies)
        return batches

    def restart(self) -> None:
        """Begin anew from the checkpoint, as after a crash."""
        self.stop()
        self.reader = self.fresh_reader()

    def stop(self) -> None:
        """End it, and let go of the connections of this process."""
        self.reader.stop()
        reading.disconnect()


def through_json(offset: Offset) -> Offset:
    """Return an offset as it comes back from Spark's log."""
    back: Offset = json.loads(json.dumps(offset))
    return back


def keep(world: World, topic: str, ident: str = "READ", role: str | None = None) -> None:
    """Let READ read a topic whose messages are kept for an hour."""
    role = role or world.owner.query("SELECT session_user")
    world.rule(role, ident, "Topic", topic, "R", 60)
    if not topic.endswith("*"):
        world.owner.connection.execute(
            "UPDATE psqlmessages_topic SET retention = 3600 WHERE name = %s", (topic,)
        )


@contextmanager
def away(world: World, role: str) -> Iterator[None]:
    """Keep a role from the database, as a server that is down does, and let it back again."""
    name = sql.Identifier(role)
    superuser: psycopg.Connection[Any] = world.superuser().connection
    superuser.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT 0").format(name))
    try:
        superuser.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = %s",
            (role,),
        )
        yield
    finally:
        superuser.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT -1").format(name))


def said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until a line is in the log."""
    tick = threading.Event()
    for _ in range(6000):
        if any(text in record.getMessage() for record in list(caplog.records)):
            return
        tick.wait(0.01)
    raise AssertionError(f"never said: {text}")
