"""Taking: what pop and reserve give, to whom, and what a queue holds then."""

from collections import Counter
from datetime import UTC, datetime

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import Program, World
from tests.sql.simultaneous import together

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


def test_two_hundred_elements_go_to_one_reader_each(queue: Queue, world: World):
    queue.pusher.ok("push_many", "PUT", "Q", [str(number) for number in range(200)])

    def read(program: Program) -> list[str]:
        return [row.body for _ in range(25) for row in program.elements("pop", "GET", "Q")]

    readers = [world.program("user2") for _ in range(8)]
    taken = together(*(lambda reader=reader: read(reader) for reader in readers))
    assert Counter(body for bodies in taken for body in bodies) == Counter(
        str(number) for number in range(200)
    )


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
    queue.lease()
    remove = [("Q", first), ("OTHER", second), ("Q", second), ("Q", second)]
    queue.pusher.ok("push", "BOSS", "OTHER", "y")
    done = [queue.pusher.ok("remove", "BOSS", *each)["Done"] for each in remove]
    assert done == [False, False, True, False]
    queue.push("later", delay=60.0)
    assert queue.pusher.ok("drain", "BOSS", "Q") == {"Err": "0", "Removed": 2}
    sizes = queue.sizes()
    assert datetime.fromisoformat(sizes.pop("Next")) > datetime.now(UTC)
    assert sizes == {"Total": 2, "Available": 0, "Scheduled": 1, "Reserved": 1, "Paused": False}


def test_a_peek_shows_elements_in_the_order_they_come_and_takes_none(queue: Queue):
    queue.push("b", delay=60)
    queue.push("a")
    rows = queue.reader.elements("peek", "GET", "Q")
    assert [(row.body, row.state, row.queue) for row in rows] == [
        ("a", "available", "Q"), ("b", "scheduled", "Q"),
    ]  # fmt: skip
    assert [row.body for row in queue.reader.elements("peek", "GET", "Q", 1)] == ["a"]
    without = queue.reader.elements("peek", "GET", "Q", None, False)
    assert [row.body for row in without] == [None] * 2
    assert queue.reader.error("peek", "GET", "Q", 0)[0] == 60
    assert queue.sizes()["Total"] == 2
