"""Counts: what happened to the elements of a queue, and what of it is durable."""

from typing import Any

from tests.queues.conftest import Queue
from tests.sql.conftest import World


def test_all_is_counted_without_delaying_calls(queue: Queue, world: World):
    queue.push("a", "b", "c", "d", "e")
    queue.pop()
    one, two, three = (row.lease for row in queue.reserve(3))
    queue.done("commit", one, two)
    queue.done("rollback", None, three)
    assert queue.counts() == {"puts": 5, "gets": 1, "reserves": 3, "commits": 2, "rollbacks": 1}
    others = [world.program("user1") for _ in range(3)]
    for other in others:
        other.execute("BEGIN")
        other.execute("SET LOCAL lock_timeout = '30s'")
        other.ok("push", "PUT", "Q", "x")
    for other in others:
        other.execute("COMMIT")
    assert queue.counts()["puts"] == 8


def test_counts_are_summed_and_stay_the_same(queue: Queue, world: World):
    rows = "SELECT count(*) FROM psqlmessages_queuecount"
    queue.push("a", "b", "c")
    queue.pop()
    # As if so many rows had been counted since.
    world.execute("UPDATE messages._queues SET counted_id = -1000000")
    with queue.pusher.connection.transaction():
        queue.push("held")
        queue.tend()
    queue.tend()
    assert world.owner.query(rows) <= 4
    assert queue.counts() == {"puts": 4, "gets": 1}
    # Also after their table was emptied.
    world.execute("UPDATE messages._queues SET counted_id = 1000000000000")
    world.execute(
        "INSERT INTO psqlmessages_queuecount (queue_id, puts)"
        " SELECT q.id, 1 FROM psqlmessages_queue AS q, generate_series(1, 2000)"
    )
    queue.tend()
    assert world.owner.query(rows) == 1
    assert queue.counts() == {"puts": 2004, "gets": 1}


def test_all_but_reserving_is_durable_at_the_commit(queue: Queue):
    queue.world.rules("user2 BOSS Queue Q RW 1", "user2 PUT Queue Q W 1")
    calls: dict[str, tuple[Any, ...]] = {
        "push": ("PUT", "Q", "b"), "pop": ("GET", "Q"), "commit": ("GET",),
        "rollback": ("GET", None), "remove": ("BOSS", "Q"), "reserve": ("GET", "Q"),
        "release": ("GET",),
    }  # fmt: skip
    queue.reader.execute("SET synchronous_commit = off")
    found = {}
    for function, arguments in calls.items():
        id_ = queue.push("a")
        last: tuple[Any, ...] = (id_,) if function == "remove" else ()
        if function in ("commit", "rollback", "release"):
            last = (queue.lease(),)
        with queue.reader.connection.transaction():
            queue.reader.ok(function, *arguments, *last)
            found[function] = queue.reader.query("SHOW synchronous_commit")
        assert queue.reader.query("SHOW synchronous_commit") == "off"
    assert found == dict.fromkeys(calls, "on") | {"reserve": "off", "release": "off"}
