"""What the tests of the sink write to, and what they find there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sql.conftest import Program, World

TOPIC, QUEUE = "OUT", "DONE"
SENT = """
    SELECT m.payload, m.enc FROM psqlmessages_streammessage AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = %s ORDER BY m.id
"""
PUSHED = """
    SELECT e.body, e.enc FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s ORDER BY e.id
"""


@dataclass(frozen=True)
class Sink:
    """A topic and a queue that user1 may write to as the node pipeline."""

    world: World
    dsn_file: str

    @property
    def topic(self) -> dict[str, str]:
        """The options of a write to the topic."""
        return {"topic": TOPIC, "dsnFile": self.dsn_file}

    @property
    def queue(self) -> dict[str, str]:
        """The options of a write to the queue."""
        return {"queue": QUEUE, "dsnFile": self.dsn_file}

    def rows(self) -> list[tuple[Any, ...]]:
        """Bodies and encodings of the topic, in their order."""
        return self.world.owner.connection.execute(SENT, (TOPIC,)).fetchall()

    def bodies(self) -> list[str]:
        """Bodies of the topic, in their order."""
        return [body for body, _ in self.rows()]

    def pushed(self) -> list[str]:
        """Bodies of the queue, in their order."""
        return [row[0] for row in self.world.owner.connection.execute(PUSHED, (QUEUE,))]

    def staged(self) -> int:
        """How many rows wait for a commit."""
        counted = "SELECT coalesce(sum(cardinality(bodies)), 0) FROM messages.staged"
        return int(self.world.watcher.query(counted))

    def reader(self) -> Program:
        """A connected program that has subscribed to the topic."""
        self.world.rules(f"user2 READER Topic {TOPIC} R 10")
        reader = self.world.program("user2")
        reader.read("READER", TOPIC)
        reader.ok("connect_stream", "READER")
        return reader


def made(world: World, dsn_file: Callable[[str], str]) -> Sink:
    """Make the rules, topics that keep what they get, and an empty staging table.

    What IN holds user1 may read, as any node whose name begins with pipeline.
    """
    world.rules(
        f"user1 pipeline Topic {TOPIC} W 10",
        f"user1 pipeline Queue {QUEUE} W 10",
        "user1 pipeline* Topic IN R 10",
    )
    world.owner.connection.execute("UPDATE psqlmessages_topic SET retention = 3600")
    world.watcher.connection.execute("TRUNCATE messages.staged")
    return Sink(world, dsn_file("user1"))
