"""Fixtures of the streams' tests: a publisher and a subscriber, and what brings time forward."""

from collections.abc import Iterator
from datetime import datetime

import pytest

from tests.sql.conftest import Program, World, new_role, world

__all__ = ["new_role", "world"]

STORED = "SELECT array_agg(payload ORDER BY id) FROM psqlmessages_streammessage"
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"


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
        """Publish one by one; the last id."""
        return [self.publisher.ok("publish", "PUB", topic, each)["Id"] for each in payloads][-1]

    def got(self, ident: str = "SUB", topic: str = "T", **options: int) -> list[str]:
        """Call subscribe: the payloads."""
        return self.subscriber.got(ident, topic, **options)

    def state(self, ident: str = "SUB", topic: str = "T") -> dict[str, object]:
        """Call subscription."""
        return self.subscriber.ok("subscription", ident, topic)

    def age(self, seconds: float, ident: str = "SUB") -> None:
        """Let so much time have gone by since a subscription's last ping."""
        self.world.owner.connection.execute(
            "UPDATE psqlmessages_subscription SET pinged_at = pinged_at - make_interval(secs => %s)"
            " WHERE ident = %s",
            (seconds, ident),
        )

    def age_messages(self, seconds: float) -> None:
        """Let so much time have gone by since everything was published."""
        self.world.owner.connection.execute(
            "UPDATE psqlmessages_streammessage"
            " SET published_at = published_at - make_interval(secs => %s)",
            (seconds,),
        )

    def stored(self) -> list[str]:
        """The payloads that are kept, of all topics."""
        return self.world.owner.query(STORED) or []

    def prune(self) -> int:
        """Remove all that can be removed; how many tables were emptied."""
        return int(self.world.owner.query("SELECT messages._prune_streams()"))

    def tend(self) -> int:
        """Do what happens once a second by itself; how many tables were emptied."""
        owner = self.world.owner
        owner.connection.execute(
            "UPDATE messages._stream"
            " SET tended_at = 'epoch', cleared_at = 'epoch', switched_at = 'epoch'"
        )
        return int(owner.query("SELECT messages._tend_streams()"))


@pytest.fixture
def stream(world: World) -> Iterator[Stream]:
    """A publisher and a subscriber that has not subscribed yet; nothing is removed by itself."""
    owner = world.owner.connection
    owner.execute("UPDATE messages._stream SET tended_at = 'infinity'")
    yield Stream(world)
    for (name,) in world.watcher.connection.execute(PREPARED).fetchall():
        world.watcher.connection.execute(f"ROLLBACK PREPARED '{name}'")
    world.owner.connection.execute("ROLLBACK")
    owner.execute("UPDATE psqlmessages_topic SET retention = 0")
    owner.execute("UPDATE messages._stream SET tended_at = clock_timestamp()")


def register(program: Program, ident: str) -> Program:
    """Register a connection as a node, and forget what that told it."""
    program.ok("connect_stream", ident)
    program.payloads()
    return program


def moment(text: object) -> datetime:
    """A time as JSON holds it."""
    return datetime.fromisoformat(str(text))
