"""Sides of benchmarks.streams: how each stores a message, or stores and reads 500."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.brokers import PeerMissing, run_nats, run_redis, version
from benchmarks.rounds import Act
from psqlmessages import Node

BATCH, BYTES = 500, 1000
VALUE = {"payload": "x" * (BYTES - 15)}
BODY = json.dumps(VALUE)
# An act stores this many messages one by one, so that starting asyncio's event loop costs little.
MESSAGES_PER_ACT = 20

OURS, NODE = "messages.publish", "Node.publish"
PLAIN, PGMQ, PGMQ_CLIENT = "INSERT by hand", "pgmq.send", "PGMQueue.send"
REDIS, JETSTREAM, JETSTREAM_LAZY = "Redis XADD", "JetStream", "JetStream, lazy"
BROKERS = (REDIS, JETSTREAM, JETSTREAM_LAZY)
OURS_MANY, COPY, PGMQ_MANY = "messages.publish_many", "COPY by hand", "pgmq.send_batch"

INSTALL = "pip install -r benchmarks/requirements.txt"
SETUP = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'PUB', 'Topic', 'ONE', 'W', 5),
        ('psqlmessages', 'NODE', 'Topic', 'ONE', 'W', 5),
        ('psqlmessages', 'PUB', 'Topic', 'MANY', 'W', 5),
        ('psqlmessages', 'SUB', 'Topic', '*', 'R', 5);
    SELECT messages.subscribe('SUB', 'ONE', 600);
    SELECT messages.subscribe('SUB', 'MANY', 600);
    CREATE TABLE plain_stream (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text, sender text,
        published_at timestamptz DEFAULT clock_timestamp(), payload text
    );
    CREATE TABLE plain_position (id bigint);
    INSERT INTO plain_position VALUES (0)
"""
READ_PLAIN = """
    WITH found AS (
        SELECT * FROM plain_stream WHERE id > (SELECT id FROM plain_position) ORDER BY id LIMIT 500
    ), moved AS (
        UPDATE plain_position SET id = (SELECT max(id) FROM found)
        WHERE EXISTS (SELECT FROM found)
    )
    SELECT * FROM found ORDER BY id
"""


def pgmq_script() -> Path:
    """Return the path of the SQL script in pgmq's Python package."""
    found = importlib.util.find_spec("pgmq")
    if found is None or not found.submodule_search_locations:
        raise PeerMissing(f"pgmq is not installed: {INSTALL}")
    return Path(found.submodule_search_locations[0]) / "sql" / "pgmq.sql"


def repeat(act: Act) -> Act:
    """Return an act that does this act MESSAGES_PER_ACT times."""

    def acts() -> None:
        for _ in range(MESSAGES_PER_ACT):
            act()

    return acts


class Sides:
    """Opens the connections of the sides, until ``stack`` closes; leaves out missing peers."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url, self.stack = url, stack
        self.connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        self.connection.execute(SETUP)
        self.left_out: list[str] = []
        self.versions: dict[str, str] = {}
        self.has_pgmq = self._try(self._install_pgmq)

    def _try(self, open_: Callable[[], None]) -> bool:
        """Open a side; return whether it is installed."""
        try:
            open_()
        except (PeerMissing, ImportError) as error:
            self.left_out.append(f"{error}")
            return False
        return True

    def _install_pgmq(self) -> None:
        self.connection.execute(pgmq_script().read_text("utf-8"))
        self.connection.execute("SELECT pgmq.create('one'), pgmq.create('many')")
        self.versions["pgmq"] = importlib.metadata.version("pgmq")

    def one_by_one(self, brokers: tuple[str, ...] = BROKERS) -> dict[str, Act]:
        """Return acts that store durable messages one by one."""
        # All share a cursor: creating one takes a fifth of the time of a call.
        run = self.connection.cursor().execute
        sides: dict[str, Act] = {
            OURS: lambda: run("SELECT messages.publish('PUB', 'ONE', %s)", [BODY]).fetchone(),
            PLAIN: lambda: run(
                "INSERT INTO plain_stream (topic, sender, payload) VALUES ('ONE', 'PUB', %s)"
                " RETURNING id", [BODY],
            ).fetchone(),
        }  # fmt: skip
        if self.has_pgmq:
            send = "SELECT pgmq.send('one', %s::jsonb)"
            sides[PGMQ] = lambda: run(send, [BODY]).fetchone()
        sides = {name: repeat(act) for name, act in sides.items()}
        open_ = {
            REDIS: self._open_redis,
            JETSTREAM: lambda: self._open_jetstream(syncs_always=True),
            JETSTREAM_LAZY: lambda: self._open_jetstream(syncs_always=False),
        }
        for name in brokers:
            self._try(lambda: sides.update({name: open_[name]()}))  # noqa: B023
        return sides

    def clients(self) -> dict[str, Act]:
        """Return acts that store values one by one with Python clients, which convert to JSON."""
        node = self.stack.enter_context(Node("NODE", self.url))
        sides: dict[str, Act] = {NODE: repeat(lambda: node.publish("ONE", VALUE))}
        if self.has_pgmq:
            self._try(lambda: sides.update({PGMQ_CLIENT: self._open_pgmq_client()}))
        return sides

    def _open_pgmq_client(self) -> Act:
        from pgmq import PGMQueue

        queue = PGMQueue(conn_string=self.url, pool_size=1, init_extension=False)
        self.stack.callback(queue.close)
        return repeat(lambda: queue.send("one", VALUE))

    def _open_redis(self) -> Act:
        import redis

        settings = ("--appendonly", "yes", "--appendfsync", "always")
        port = self.stack.enter_context(run_redis(*settings))
        self.versions |= {"Redis": version("redis-server"), "redis-py": redis.__version__}
        client = self.stack.enter_context(redis.Redis(port=port))
        return repeat(lambda: client.xadd("one", {"payload": BODY}))

    def _open_jetstream(self, *, syncs_always: bool) -> Act:
        import nats

        self.versions |= {
            "NATS": version("nats-server", INSTALL),
            "nats-py": importlib.metadata.version("nats-py"),
        }
        port = self.stack.enter_context(run_nats(has_jetstream=True, syncs_always=syncs_always))
        loop = asyncio.new_event_loop()
        self.stack.callback(loop.close)
        client = loop.run_until_complete(nats.connect(f"nats://127.0.0.1:{port}"))
        self.stack.callback(lambda: loop.run_until_complete(client.close()))
        stream: Any = client.jetstream()
        loop.run_until_complete(stream.add_stream(name="ONE", subjects=["one"], storage="file"))

        async def publish() -> None:
            for _ in range(MESSAGES_PER_ACT):
                await stream.publish("one", BODY.encode())

        return lambda: loop.run_until_complete(publish())

    def many(self) -> dict[str, Act]:
        """Return acts that store 500 messages in one call, then read them and commit."""
        sides: dict[str, Act] = {OURS_MANY: self._publish_many, COPY: self._copy_many}
        if self.has_pgmq:
            sides[PGMQ_MANY] = self._send_many_pgmq
        return sides

    def _publish_many(self) -> None:
        self.connection.execute(
            "SELECT messages.publish_many('PUB', 'MANY', %b::text[])", [[BODY] * BATCH]
        )
        take = "SELECT * FROM messages.subscribe('SUB', 'MANY', 600, 500)"
        expect(self.connection.execute(take).fetchall())

    def _copy_many(self) -> None:
        with (
            self.connection.cursor() as cursor,
            cursor.copy("COPY plain_stream (topic, sender, payload) FROM STDIN") as copy,
        ):
            for _ in range(BATCH):
                copy.write_row(("MANY", "PUB", BODY))
        expect(self.connection.execute(READ_PLAIN).fetchall())

    def _send_many_pgmq(self) -> None:
        self.connection.execute("SELECT pgmq.send_batch('many', %b::jsonb[])", [[BODY] * BATCH])
        with self.connection.transaction():
            rows = self.connection.execute("SELECT * FROM pgmq.read('many', 30, 500)").fetchall()
            expect(rows)
            self.connection.execute(
                "SELECT pgmq.delete('many', %b::bigint[])", [[row[0] for row in rows]]
            ).fetchall()


def expect(rows: list[Any]) -> None:
    """Raise AssertionError if not all messages were read."""
    if len(rows) != BATCH:
        raise AssertionError(f"{len(rows)} rows instead of {BATCH}")
