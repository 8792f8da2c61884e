"""Counts: what happened to the elements of a queue, and what of it is durable."""

from typing import Any

from tests.queues.conftest import Desk
from tests.sql.conftest import World


def test_all_is_counted_without_delaying_calls(desk: Desk, world: World):
    desk.push("a", "b", "c", "d", "e")
    desk.pop()
    one, two, three = (row.lease for row in desk.reserve(3))
    desk.done("commit", one, two)
    desk.done("rollback", None, three)
    assert desk.counts() == {"puts": 5, "gets": 1, "reserves": 3, "commits": 2, "rollbacks": 1}
    others = [world.program("user1") for _ in range(3)]
    for other in others:
        other.execute("BEGIN")
        other.execute("SET LOCAL lock_timeout = '30s'")
        other.ok("push", "PUT", "Q", "x")
    for other in others:
        other.execute("COMMIT")
    assert desk.counts()["puts"] == 8


def test_counts_are_summed_and_stay_the_same(desk: Desk, world: World):
    rows = "SELECT count(*) FROM psqlmessages_queuecount"
    desk.push("a", "b", "c")
    desk.pop()
    # As if so many rows had been counted since.
    world.execute("UPDATE messages._queues SET counted_id = -1000000")
    with desk.pusher.connection.transaction():
        desk.push("held")
        desk.tend()
    desk.tend()
    assert world.owner.query(rows) <= 4
    assert desk.counts() == {"puts": 4, "gets": 1}
    # Also after their table was emptied.
    world.execute("UPDATE messages._queues SET counted_id = 1000000000000")
    world.execute(
        "INSERT INTO psqlmessages_queuecount (queue_id, puts)"
        " SELECT q.id, 1 FROM psqlmessages_queue AS q, generate_series(1, 2000)"
    )
    desk.tend()
    assert world.owner.query(rows) == 1
    assert desk.counts() == {"puts": 2004, "gets": 1}


def test_all_but_reserving_is_durable_at_the_commit(desk: Desk):
    desk.world.rules("user2 BOSS Queue Q RW 1", "user2 PUT Queue Q W 1")
    calls: dict[str, tuple[Any, ...]] = {
        "push": ("PUT", "Q", "b"), "pop": ("GET", "Q"), "commit": ("GET",),
        "rollback": ("GET", None), "remove": ("BOSS", "Q"), "reserve": ("GET", "Q"),
        "release": ("GET",),
    }  # fmt: skip
    desk.reader.execute("SET synchronous_commit = off")
    found = {}
    for function, arguments in calls.items():
        id_ = desk.push("a")
        last: tuple[Any, ...] = (id_,) if function == "remove" else ()
        if function in ("commit", "rollback", "release"):
            last = (desk.lease(),)
        with desk.reader.connection.transaction():
            desk.reader.ok(function, *arguments, *last)
            found[function] = desk.reader.query("SHOW synchronous_commit")
        assert desk.reader.query("SHOW synchronous_commit") == "off"
    assert found == dict.fromkeys(calls, "on") | {"reserve": "off", "release": "off"}
