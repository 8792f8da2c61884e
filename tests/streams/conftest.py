"""Fixtures of the streams' tests: a topic with a publisher and a subscriber."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from tests.sql.conftest import Program, World, new_role, world

__all__ = ["new_role", "world"]

STORED = "SELECT array_agg(payload ORDER BY id) FROM psqlmessages_streammessage"
TOPICS = "SELECT array_agg(name::text ORDER BY name) FROM psqlmessages_topic"
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
NEVER = "maintained_at = 'epoch', garbage_removed_at = 'epoch', switched_at = 'epoch'"
DUE = f"UPDATE messages._stream SET {NEVER}"


class Stream:
    """Topic T, to which PUB of user1 publishes and SUB of user2 may subscribe; one connection each.

    Neither is registered as a node: streams need no session.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        world.rules(
            "user1 PUB Topic T W 10", "user2 SUB Topic T R 10", "user2 SUB2 Topic T R 10",
            "user1 PUB Topic NEW.* W 10", "user2 SUB Topic NEW.* R 10",
        )  # fmt: skip
        self.publisher = world.program("user1")
        self.subscriber = world.program("user2")

    def publish(self, *payloads: str, topic: str = "T") -> int:
        return [self.publisher.ok("publish", "PUB", topic, each)["Id"] for each in payloads][-1]

    @contextmanager
    def late(self, *payloads: str, topic: str = "T", end: str = "COMMIT") -> Iterator[Program]:
        """Another publisher, whose transaction is open until the block is left."""
        late = self.world.program("user1")
        late.connection.execute("BEGIN")
        for each in payloads:
            late.ok("publish", "PUB", topic, each)
        yield late
        late.connection.execute(end)

    def got(self, ident: str = "SUB", topic: str = "T", **options: int) -> list[str]:
        return self.subscriber.got(ident, topic, **options)

    def state(self, ident: str = "SUB", topic: str = "T") -> dict[str, object]:
        return self.subscriber.ok("subscription", ident, topic)

    def execute(self, statement: str, *arguments: object) -> None:
        self.world.owner.connection.execute(statement, arguments or None)

    def query(self, statement: str, *arguments: object) -> Any:
        return self.world.owner.query(statement, *arguments)

    def age(self, seconds: float, ident: str = "SUB") -> None:
        """Move a subscription's last ping back by this time."""
        self.execute(
            "UPDATE psqlmessages_subscription SET pinged_at = pinged_at - make_interval(secs => %s)"
            " WHERE ident = %s",
            seconds, ident,
        )  # fmt: skip

    def age_messages(self, seconds: float) -> None:
        """Move the times of all messages back by this time."""
        ago = "published_at - make_interval(secs => %s)"
        self.execute(f"UPDATE psqlmessages_streammessage SET published_at = {ago}", seconds)

    def retain(self, seconds: int) -> None:
        self.execute("UPDATE psqlmessages_topic SET retention = %s", seconds)

    def stored(self) -> list[str]:
        return self.query(STORED) or []

    def topics(self) -> list[str]:
        return self.query(TOPICS) or []

    def prune(self) -> int:
        """Remove what can be removed; return how many tables were emptied."""
        return int(self.query("SELECT messages._prune_streams()"))

    def let_be_due(self) -> None:
        """Make the housekeeping due that commits do once a second."""
        self.execute(DUE)

    def tend(self) -> int:
        """Do the housekeeping of commits; return how many tables were emptied."""
        self.let_be_due()
        return int(self.query("SELECT messages._maintain_streams()"))

    def limit_waits(self) -> None:
        """Make calls fail after 30 seconds."""
        for program in (self.publisher, self.subscriber, self.world.owner):
            program.connection.execute("SET statement_timeout = '30s'")


@pytest.fixture
def stream(world: World) -> Iterator[Stream]:
    """A publisher, and a subscriber without a subscription; there is no automatic removal."""
    owner = world.owner.connection
    owner.execute("UPDATE messages._stream SET maintained_at = 'infinity'")
    yield Stream(world)
    for (name,) in world.watcher.connection.execute(PREPARED).fetchall():
        world.watcher.connection.execute(f"ROLLBACK PREPARED '{name}'")
    owner.execute("ROLLBACK")
    owner.execute("UPDATE psqlmessages_topic SET retention = 0")
    owner.execute("UPDATE messages._stream SET maintained_at = clock_timestamp()")


def register(program: Program, ident: str) -> Program:
    """Register a connection as a node, and read its first notifications."""
    program.ok("connect_stream", ident)
    program.payloads()
    return program


def moment(text: object) -> datetime:
    """A time as JSON holds it."""
    return datetime.fromisoformat(str(text))
