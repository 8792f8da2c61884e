"""Waiting: who is woken, when, and who is not any more."""

from collections.abc import Callable

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import World


def test_readers_are_woken_on_a_channel_that_cannot_be_guessed(queue: Queue):
    answer = queue.wait()
    assert (answer["Next"], answer["Paused"]) == (None, False)
    assert 0 < answer["Seconds"] <= 60
    queue.world.execute("UPDATE psqlmessages_queue SET awaited_until = now() + interval '35 s'")
    again = queue.wait()
    assert again["Channel"] == answer["Channel"]
    assert again["Seconds"] > 50
    queue.push("x")
    assert queue.wakes() == ["pushed Q"]
    channels = {queue.wait(queue=f"NEW.{number}")["Channel"] for number in range(20)}
    assert len({channel.removeprefix("queue_") for channel in channels}) == 20
    assert all(len(channel) == 38 for channel in channels)


def test_a_queue_that_a_wait_made_vanishes_unless_it_is_used(queue: Queue, world: World):
    names = "mistyped", "waited for", "used", "pushed at the same time", "paused", "set"
    for name in names:
        queue.wait(queue=f"NEW.{name}")
    queue.push("x", queue="NEW.used")
    queue.pop(queue="NEW.used")
    world.execute("UPDATE psqlmessages_queue SET is_paused = true WHERE name = 'NEW.paused'")
    queue.limit(3, "NEW.set")

    world.execute("UPDATE psqlmessages_queue SET awaited_until = now() - interval '11 s'")
    queue.wait(queue="NEW.waited for")
    queue.pusher.execute("BEGIN")
    queue.push("x", queue="NEW.pushed at the same time")
    queue.tend()
    queue.pusher.execute("COMMIT")
    listed = world.execute("SELECT queue FROM messages.queues").fetchall()
    assert {name for (name,) in listed} == {f"NEW.{name}" for name in names[1:]}
    assert queue.reader.error("sizes", "GET", "NEW.mistyped")[0] == 62
    assert queue.pop(queue="NEW.pushed at the same time") == ["x"]
    # A wait makes it again.
    queue.wait(queue="NEW.mistyped")
    queue.push("y", queue="NEW.mistyped")
    assert "pushed NEW.mistyped" in queue.wakes()


def test_next_tells_when_something_becomes_available(queue: Queue):
    queue.push("a", delay=900.0)
    assert 800 < queue.wait()["Next"] <= 900
    queue.push("b")
    assert queue.wait()["Next"] == 0
    queue.lease(duration=300)
    assert 200 < queue.wait()["Next"] <= 300


def test_everything_that_makes_elements_available_wakes_readers(queue: Queue, world: World):
    acts: dict[str, Callable[[], object]] = {
        "push": lambda: queue.push("x"),
        "push later": lambda: queue.push("x", delay=30.0),
        "rollback": lambda: queue.done("rollback", None, queue.lease()),
        "release": lambda: queue.done("release", queue.lease()),
        "resume": lambda: queue.pusher.ok("resume", "BOSS", "Q"),
    }
    queue.push("before")
    waiter = world.program("user2")
    for name, act in acts.items():
        if name == "resume":
            queue.pusher.ok("pause", "BOSS", "Q")
        queue.wait(waiter)
        waiter.payloads()
        act()
        assert "pushed Q" in queue.wakes(waiter), name
    queue.limit(1)
    queue.wait(waiter, "__deadletter__")
    queue.done("rollback", None, queue.lease())
    assert "pushed __deadletter__" in queue.wakes(waiter)


def test_a_transaction_wakes_once_and_not_when_it_is_rolled_back(queue: Queue):
    queue.wait()
    with queue.pusher.connection.transaction(force_rollback=True):
        queue.push("a")
    assert queue.wakes() == []
    with queue.pusher.connection.transaction():
        queue.push("a", "b", "c")
    assert queue.wakes() == ["pushed Q"]
    # Nobody is notified if nobody waits.
    queue.world.execute("UPDATE psqlmessages_queue SET awaited_until = now()")
    queue.push("x")
    assert queue.wakes() == []


@pytest.mark.parametrize("when", ["while it waits", "after it waited", "while it begins"])
def test_a_node_that_lost_its_right_gets_no_further_wake_ups(queue: Queue, world: World, when: str):
    world.rules("user2 OTHER Queue Q R 1")
    other = world.program("user2")
    queue.push("makes the queue")
    if when == "while it begins":
        queue.reader.execute("BEGIN")
    queue.wait()
    channel = other.ok("queue_listen", "OTHER", "Q")["Channel"]
    world.execute("DELETE FROM messages.auth WHERE ident = 'NOBODY'")  # changes nothing
    assert queue.wakes(other) == []
    if when == "after it waited":
        world.execute("UPDATE psqlmessages_queue SET awaited_until = now()")
    world.execute("DELETE FROM messages.auth WHERE ident = 'GET' AND dest = 'Q'")
    if when == "while it begins":
        queue.reader.execute("COMMIT")
        for _ in range(3):
            world.execute("SELECT messages._maintain_sessions_and_rules()")
    told = set() if when == "after it waited" else {"moved Q"}
    assert (set(queue.wakes()), set(queue.wakes(other))) == (told, told)
    assert other.ok("queue_listen", "OTHER", "Q")["Channel"] != channel
    assert queue.reader.error("queue_listen", "GET", "Q")[0] == 2
    queue.push("x")
    assert (queue.wakes(), queue.wakes(other)) == ([], ["pushed Q"])


def test_a_group_role_that_is_revoked_takes_the_channel_away(queue: Queue, world: World):
    world.rules("team PICK Queue Q R 1")
    picker = world.program("user3")
    picker.ok("queue_listen", "PICK", "Q")
    world.superuser().execute("REVOKE team FROM user3")
    try:
        world.owner.ok("evaluate")
        assert queue.wakes(picker) == ["moved Q"]
    finally:
        world.superuser().execute("GRANT team TO user3")


def test_waiting_delays_no_push_and_no_other_reader(queue: Queue, world: World):
    other = world.program("user2")
    queue.push("before")
    with queue.reader.connection.transaction():
        queue.wait()
        other.connection.execute("SET lock_timeout = '30s'")
        queue.wait(other)
        queue.pusher.connection.execute("SET lock_timeout = '30s'")
        queue.push("x")
