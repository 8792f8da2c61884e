"""Taking elements: the results of pop and reserve, the remaining elements, and the counts."""

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import World

pytestmark = pytest.mark.versions


def test_a_popped_element_is_removed_unless_the_pop_is_rolled_back(queue: Queue):
    queue.push("a", "b", "c")
    assert (queue.pop(), queue.pop(5), queue.pop()) == (["a"], ["b", "c"], [])
    queue.push("d")
    with queue.reader.connection.transaction(force_rollback=True):
        assert queue.pop() == ["d"]
    queue.lease(duration=30)
    queue.age(31)
    (row,) = queue.reader.elements("pop", "GET", "Q")
    assert (row.body, row.tries) == ("d", 1)


def test_an_element_that_another_transaction_holds_is_passed_over(queue: Queue, world: World):
    queue.push("a", "b")
    other = world.program("user2")
    with other.connection.transaction():
        assert [row.body for row in other.elements("reserve", "GET", "Q")] == ["a"]
        assert queue.pop(5) == ["b"]


def test_a_paused_queue_accepts_pushes_and_gives_nothing(queue: Queue, world: World):
    queue.push("a")
    queue.wait()
    with queue.reader.connection.transaction():
        # Marked already, so it changes nothing, and holds up no pause; only the first wait does.
        queue.wait()
        queue.pusher.execute("SET lock_timeout = '30s'")
        assert queue.pusher.ok("pause", "BOSS", "Q") == {"Err": "0"}
    assert queue.pusher.ok("pause", "BOSS", "Q") == {"Err": "0", "Already": 1}
    queue.push("b")
    other = world.program("user2")
    for function in ("pop", "reserve", "take"):
        assert other.elements(function, "GET", "Q", 5) == []
    assert queue.sizes()["Paused"] is True
    assert queue.pusher.ok("resume", "BOSS", "Q") == {"Err": "0"}
    assert queue.pusher.ok("resume", "BOSS", "Q") == {"Err": "0", "Already": 1}
    assert queue.pop(5) == ["a", "b"]


def test_drain_removes_available_elements_and_remove_one_that_is_not_reserved(queue: Queue):
    first, second, _, _ = (queue.push(body) for body in ("reserved", "a", "b", "c"))
    queue.lease(duration=30)
    remove = [("Q", first), ("OTHER", second), ("Q", second), ("Q", second)]
    queue.pusher.ok("push", "BOSS", "OTHER", "y")
    done = [queue.pusher.ok("remove", "BOSS", *each)["Done"] for each in remove]
    assert done == [False, False, True, False]
    queue.push("later", delay=60.0)
    assert queue.pusher.ok("drain", "BOSS", "Q") == {"Err": "0", "Removed": 2}
    # A lease ends before that, and is the next to become available.
    sizes = queue.sizes()
    seconds = (datetime.fromisoformat(sizes.pop("Next")) - datetime.now(UTC)).total_seconds()
    assert 0 < seconds <= 30
    assert sizes == {"Total": 2, "Available": 0, "Scheduled": 1, "Reserved": 1, "Paused": False}


def test_a_peek_shows_elements_in_the_order_they_come_and_takes_none(queue: Queue):
    queue.push("b", delay=60)
    queue.push("a")
    found = [(row.body, row.state, row.queue) for row in queue.reader.elements("peek", "GET", "Q")]
    assert found == [("a", "available", "Q"), ("b", "scheduled", "Q")]
    assert [row.body for row in queue.reader.elements("peek", "GET", "Q", 1)] == ["a"]
    without = queue.reader.elements("peek", "GET", "Q", None, False)
    assert [row.body for row in without] == [None] * 2
    assert queue.reader.error("peek", "GET", "Q", 0)[0] == 60
    assert queue.sizes()["Total"] == 2


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
    # This makes the sum due: a million rows seem to be new.
    world.execute("UPDATE messages._queues SET counted_id = -1000000")
    with queue.pusher.connection.transaction():
        queue.push("held")
        queue.tend()
    queue.tend()
    assert world.owner.query(rows) <= 4
    assert queue.counts() == {"puts": 4, "gets": 1}
    # Also after their table was emptied.
    world.execute("UPDATE messages._queues SET counted_id = 1000000000000")
    counts = "SELECT q.id, 1 FROM psqlmessages_queue AS q, generate_series(1, 2000)"
    world.execute(f"INSERT INTO psqlmessages_queuecount (queue_id, puts) {counts}")
    starts = "messages._scan_start JOIN psqlmessages_queue AS q ON q.id = queue_id"
    resets = "messages._reset_scan_start(id) FROM psqlmessages_queue, generate_series(1, 3)"
    world.execute(f"SELECT {resets}")
    queue.tend()
    assert world.owner.query(rows) == 1
    assert world.owner.query(f"SELECT count(*) FROM {starts}") == 1
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
