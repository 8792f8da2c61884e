"""Driving readers as Spark does, without it: the same calls in the same order, much quicker."""

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.types import StructType

from psqlmessages.pipeline import reader
from psqlmessages.pipeline.data_source import MessagesSource
from tests.django.waiting import wait_until
from tests.sql.conftest import World

Rows = list[dict[str, Any]]
Offset = dict[str, Any]
RULES = "user1 SEND {} * W 10", "user2 READ {} * R 10"


class Query:
    """A streaming query; `start` and `end` are the offsets of its checkpoint."""

    def __init__(self, schema: StructType | None = None, **options: Any) -> None:
        self.options = {name: str(value) for name, value in options.items()}
        self.schema = schema
        self.start: Offset | None = None
        self.end: Offset | None = None
        self.reader = self.fresh_reader()

    def fresh_reader(self) -> DataSourceStreamReader:
        source = MessagesSource(self.options)
        return source.streamReader(self.schema or source.schema())

    def begin(self, *, planned: bool = False) -> Offset:
        self.start = self.reader.initialOffset()
        if planned:
            self.plan()
        return self.start

    def plan(self) -> bool:
        limit = self.reader.getDefaultReadLimit()
        self.end = json.loads(json.dumps(self.reader.latestOffset(self.start, limit)))
        return self.end != self.start

    def read(self) -> Rows:
        """Read the planned batch, each partition in its own reader."""
        rows: Rows = []
        for partition in self.reader.partitions(self.start, self.end):
            executor = pickle.loads(pickle.dumps(self.fresh_reader()))  # noqa: S301
            for batch in executor.read(pickle.loads(pickle.dumps(partition))):  # noqa: S301
                rows += batch.to_pylist()
        return rows

    def done(self) -> None:
        self.start = self.end

    def batch(self) -> Rows:
        """Plan, read and commit one batch; return its rows by id."""
        if self.start is None:
            self.begin()
        if not self.plan():
            return []
        rows = self.read()
        self.done()
        self.reader.commit(self.end or {})
        return sorted(rows, key=lambda row: row["id"])

    def bodies(self) -> list[str]:
        return [row["body"] for row in self.batch()]

    def available_now(self) -> list[list[str]]:
        """Read everything that is available now; return the bodies of each batch."""
        if self.start is None:
            self.begin()
        self.reader.prepareForTriggerAvailableNow()
        batches: list[list[str]] = []
        while bodies := self.bodies():
            batches.append(bodies)
        return batches

    def restart(self) -> None:
        self.stop()
        self.reader = self.fresh_reader()

    def stop(self) -> None:
        self.reader.stop()
        reader._connections.close()


class Source:
    """Topics and queues that user1 fills as SEND, and queries of user2 as READ; T is kept."""

    def __init__(self, world: World, dsn_file: Callable[[str], str]) -> None:
        self.world, self.dsn_file = world, dsn_file("user2")
        self.owner = world.owner
        world.rules(*(rule.format(kind) for rule in RULES for kind in ("Topic", "Queue")))
        self.owner.execute("UPDATE messages._stream SET maintained_at = 'infinity'")
        self.keep("T")
        self.sender = world.program("user1")
        self._queries: list[Query] = []

    def query(self, schema: StructType | None = None, **options: Any) -> Query:
        made = Query(schema, **{"client": "READ", "dsnFile": self.dsn_file, **options})
        self._queries.append(made)
        return made

    def follow(self, topic: str = "T", schema: StructType | None = None, **options: Any) -> Query:
        return self.query(schema, topic=topic, **options)

    def keep(self, *topics: str) -> None:
        keep = "INSERT INTO psqlmessages_topic (name, retention) SELECT unnest(%s::text[]), 3600"
        also = " ON CONFLICT (name) DO UPDATE SET retention = 3600"
        self.owner.execute(keep + also, [list(topics)])

    def publish(self, *bodies: str, topic: str = "T") -> int:
        return int(self.sender.ok("publish_many", "SEND", topic, list(bodies))["Id"])

    def push(self, *bodies: str) -> None:
        self.sender.ok("push_many", "SEND", "Q", list(bodies))

    def prune(self) -> None:
        self.owner.execute("UPDATE psqlmessages_topic SET retention = 0")
        self.owner.query("SELECT messages._prune_streams()")

    def lose(self) -> None:
        """End the subscriptions, and remove all messages."""
        self.owner.execute("DELETE FROM psqlmessages_subscription")
        self.prune()

    def end_sessions(self) -> None:
        self.world.end_backends("usename = 'user2'")

    def close(self) -> None:
        for query in self._queries:
            query.stop()
        self.owner.execute("UPDATE messages._stream SET maintained_at = clock_timestamp()")


@contextmanager
def away(world: World, role: str) -> Iterator[None]:
    """Refuse the logins of a role meanwhile, like a server that is down."""
    superuser = world.superuser()
    superuser.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0")
    try:
        world.end_backends("usename = %s", role)
        yield
    finally:
        superuser.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")


def said(caplog, text: str) -> None:
    wait_until(lambda: any(text in record.getMessage() for record in list(caplog.records)))
