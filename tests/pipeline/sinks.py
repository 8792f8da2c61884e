"""A topic and a queue for the tests of the sink, and their contents."""

from typing import Any

from tests.sql.conftest import World

TOPIC, QUEUE = "OUT", "DONE"
SENT = """
    SELECT m.payload, m.enc FROM psqlmessages_streammessage AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = %s ORDER BY m.id
"""
PUSHED = """
    SELECT e.body, e.enc FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s ORDER BY e.id
"""


class Sink:
    """A topic and a queue that user1 may write to as pipeline, and IN, which it may read."""

    def __init__(self, world: World, dsn_file: str) -> None:
        self.world = world
        self.topic = {"topic": TOPIC, "dsnFile": dsn_file}
        self.queue = {"queue": QUEUE, "dsnFile": dsn_file}
        rules = (f"pipeline Topic {TOPIC} W", f"pipeline Queue {QUEUE} W", "pipeline* Topic IN R")
        world.rules(*(f"user1 {rule} 10" for rule in rules))
        world.execute("UPDATE psqlmessages_topic SET retention = 3600")
        world.watcher.execute("TRUNCATE messages.staged")

    def rows(self) -> list[tuple[Any, ...]]:
        return self.world.execute(SENT, (TOPIC,)).fetchall()

    def bodies(self) -> list[str]:
        return [body for body, _ in self.rows()]

    def pushed(self) -> list[str]:
        return [body for body, _ in self.world.execute(PUSHED, (QUEUE,))]

    def staged(self) -> int:
        counted = "SELECT coalesce(sum(cardinality(bodies)), 0) FROM messages.staged"
        return int(self.world.watcher.query(counted))
