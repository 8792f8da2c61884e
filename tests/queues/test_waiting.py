"""Waiting: who is woken, when, and who is not any more."""

from collections.abc import Callable

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import World


def test_readers_are_woken_on_a_channel_that_cannot_be_guessed(desk: Desk):
    answer = desk.wait()
    assert (answer["Next"], answer["Paused"]) == (None, False)
    assert 0 < answer["Seconds"] <= 60
    desk.world.execute("UPDATE psqlmessages_queue SET awaited_until = now() + interval '35 s'")
    again = desk.wait()
    assert again["Channel"] == answer["Channel"]
    assert again["Seconds"] > 50
    desk.push("x")
    assert desk.wakes() == ["pushed Q"]
    channels = {desk.wait(queue=f"NEW.{number}")["Channel"] for number in range(20)}
    assert len({channel.removeprefix("queue_") for channel in channels}) == 20
    assert all(len(channel) == 38 for channel in channels)


def test_next_tells_when_something_becomes_available(desk: Desk):
    desk.push("a", delay=900.0)
    assert 800 < desk.wait()["Next"] <= 900
    desk.push("b")
    assert desk.wait()["Next"] == 0
    desk.lease(duration=300)
    assert 200 < desk.wait()["Next"] <= 300


def test_everything_that_makes_elements_available_wakes_readers(desk: Desk, world: World):
    acts: dict[str, Callable[[], object]] = {
        "push": lambda: desk.push("x"),
        "push later": lambda: desk.push("x", delay=30.0),
        "rollback": lambda: desk.done("rollback", None, desk.lease()),
        "release": lambda: desk.done("release", desk.lease()),
        "resume": lambda: desk.pusher.ok("resume", "BOSS", "Q"),
    }
    desk.push("before")
    waiter = world.program("user2")
    for name, act in acts.items():
        if name == "resume":
            desk.pusher.ok("pause", "BOSS", "Q")
        desk.wait(waiter)
        waiter.payloads()
        act()
        assert "pushed Q" in desk.wakes(waiter), name
    desk.limit(1)
    desk.wait(waiter, "__deadletter__")
    desk.done("rollback", None, desk.lease())
    assert "pushed __deadletter__" in desk.wakes(waiter)


def test_a_transaction_wakes_once_and_not_when_it_is_rolled_back(desk: Desk):
    desk.wait()
    with desk.pusher.connection.transaction(force_rollback=True):
        desk.push("a")
    assert desk.wakes() == []
    with desk.pusher.connection.transaction():
        desk.push("a", "b", "c")
    assert desk.wakes() == ["pushed Q"]
    # Nobody is notified if nobody waits.
    desk.world.execute("UPDATE psqlmessages_queue SET awaited_until = now()")
    desk.push("x")
    assert desk.wakes() == []


@pytest.mark.parametrize("when", ["while it waits", "after it waited", "while it begins"])
def test_a_node_that_lost_its_right_gets_no_further_wake_ups(desk: Desk, world: World, when: str):
    world.rules("user2 OTHER Queue Q R 1")
    other = world.program("user2")
    desk.push("makes the queue")
    if when == "while it begins":
        desk.reader.execute("BEGIN")
    desk.wait()
    channel = other.ok("queue_listen", "OTHER", "Q")["Channel"]
    if when == "after it waited":
        world.execute("UPDATE psqlmessages_queue SET awaited_until = now()")
    world.execute("DELETE FROM messages.auth WHERE ident = 'GET' AND dest = 'Q'")
    if when == "while it begins":
        desk.reader.execute("COMMIT")
        for _ in range(3):
            world.execute("SELECT messages._maintain_sessions_and_rules()")
    told = set() if when == "after it waited" else {"moved Q"}
    assert (set(desk.wakes()), set(desk.wakes(other))) == (told, told)
    assert other.ok("queue_listen", "OTHER", "Q")["Channel"] != channel
    assert desk.reader.error("queue_listen", "GET", "Q")[0] == 2
    desk.push("x")
    assert (desk.wakes(), desk.wakes(other)) == ([], ["pushed Q"])


def test_a_group_role_that_is_revoked_takes_the_channel_away(desk: Desk, world: World):
    superuser = world.superuser().connection
    superuser.execute("CREATE ROLE pickers")
    try:
        superuser.execute("GRANT pickers TO user3")
        world.rules("pickers PICK Queue Q R 1")
        world.owner.ok("evaluate")
        picker = world.program("user3")
        picker.ok("queue_listen", "PICK", "Q")
        superuser.execute("REVOKE pickers FROM user3")
        world.owner.ok("evaluate")
        assert desk.wakes(picker) == ["moved Q"]
    finally:
        superuser.execute("DROP ROLE pickers")


def test_waiting_delays_no_push_and_no_other_reader(desk: Desk, world: World):
    other = world.program("user2")
    desk.push("before")
    with desk.reader.connection.transaction():
        desk.wait()
        other.connection.execute("SET lock_timeout = '30s'")
        desk.wait(other)
        desk.pusher.connection.execute("SET lock_timeout = '30s'")
        desk.push("x")
