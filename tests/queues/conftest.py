"""Fixtures of the queues' tests: a queue, a connection that pushes and one that takes."""

import json
from datetime import datetime
from typing import Any

import pytest

from tests.sql.conftest import Program, World, new_role, world

__all__ = ["new_role", "world"]


class Queue:
    """Queue Q, to which PUT of user1 pushes and from which GET of user2 takes; BOSS may do both."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.rules(
            "user1 PUT Queue Q W 1", "user2 GET Queue Q R 1", "user1 BOSS Queue Q RW 1",
            "user1 PUT Queue NEW.* W 1", "user2 GET Queue NEW.* R 1",
            "user2 GET Queue __deadletter__ RW 1", "user1 BOSS Queue OTHER RW 1",
            "user1 ADMIN Queue Q A 1",
        )  # fmt: skip
        # The first housekeeping in a database moves channels.
        world.execute("SELECT messages._maintain_sessions_and_rules()")
        self.pusher = world.program("user1")
        self.reader = world.program("user2")

    def push(self, *bodies: str, queue: str = "Q", **options: Any) -> int:
        return [self.put(body, queue, **options)["Id"] for body in bodies][-1]

    def put(self, body: str, queue: str = "Q", **options: Any) -> dict[str, Any]:
        names = "".join(f", {name} => %s" for name in options)
        sql = f"SELECT messages.push('PUT', %s, %s{names})"
        return self.pusher.query(sql, queue, body, *options.values())

    def pop(self, count: int = 1, queue: str = "Q") -> list[str]:
        return [row.body for row in self.reader.elements("pop", "GET", queue, count)]

    def reserve(self, count: int = 1, duration: float = 60, queue: str = "Q") -> list[Any]:
        return self.reader.elements("reserve", "GET", queue, count, duration)

    def lease(self, **options: Any) -> str:
        (row,) = self.reserve(**options)
        return str(row.lease)

    def done(self, function: str, *arguments: Any) -> list[bool]:
        return self.reader.ok(function, "GET", *arguments)["Done"]

    def sizes(self, queue: str = "Q") -> dict[str, Any]:
        answer = self.reader.ok("sizes", "GET", queue)
        return {name: value for name, value in answer.items() if name != "Err"}

    def counts(self, queue: str = "Q") -> dict[str, int]:
        """Return the counters of a queue that are not 0."""
        names = ("puts", "gets", "reserves", "commits", "rollbacks", "dead_letters", "removes")
        row = self.world.execute(
            f"SELECT {', '.join(names)} FROM messages.queues WHERE queue = %s", (queue,)
        ).fetchone()
        return {name: number for name, number in zip(names, row or (), strict=True) if number}

    def age(self, seconds: float) -> None:
        """Move the times of all elements and keys back by this time."""
        self.world.execute("DELETE FROM messages._scan_start")
        ago = f"interval '{seconds} s'"
        moved = f"mature_at = mature_at - {ago}, available_at = available_at - {ago}"
        self.world.execute(f"UPDATE psqlmessages_element SET {moved}")
        self.world.execute(f"UPDATE psqlmessages_elementkey SET expires_at = expires_at - {ago}")

    def now(self) -> datetime:
        return self.world.owner.query("SELECT clock_timestamp()")

    def limit(self, max_tries: int | None, queue: str = "Q", dead: str = "__deadletter__") -> None:
        """Make a queue; set its most tries and its dead-letter queue."""
        self.world.execute(
            "INSERT INTO psqlmessages_queue (name, channel, max_tries, dead_letter_queue)"
            " VALUES (%s, %s, %s, %s) ON CONFLICT (name) DO UPDATE"
            " SET max_tries = excluded.max_tries, dead_letter_queue = excluded.dead_letter_queue",
            (queue, f"channel of {queue}", max_tries, dead),
        )

    def tend(self) -> int:
        """Do the housekeeping of commits."""
        self.world.execute("UPDATE messages._queues SET maintained_at = 'epoch'")
        return self.world.owner.query("SELECT messages._maintain_queues()")

    def wait(self, program: Program | None = None, queue: str = "Q") -> dict[str, Any]:
        return (program or self.reader).ok("queue_listen", "GET", queue)

    def wakes(self, program: Program | None = None) -> list[str]:
        headers = [json.loads(payload) for payload in (program or self.reader).payloads()]
        assert all(header["Type"] == "Sys" for header in headers), headers
        return [f"{header['Evt']} {header['Queue']}" for header in headers]


@pytest.fixture
def queue(world: World) -> Queue:
    return Queue(world)
