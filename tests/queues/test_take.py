"""Taking: what pop and reserve give, to whom, and what a queue holds then."""

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import PATIENCE_SECONDS, World


def test_a_popped_element_is_gone(desk: Desk) -> None:
    desk.push("a", "b", "c")
    assert (desk.pop(), desk.pop(5), desk.pop()) == (["a"], ["b", "c"], [])


def test_a_pop_that_is_rolled_back_took_nothing(desk: Desk) -> None:
    desk.push("a")
    with desk.reader.connection.transaction(force_rollback=True):
        assert desk.pop() == ["a"]
    assert desk.pop() == ["a"]


def test_a_popped_element_whose_lease_ran_out_tells_its_tries(desk: Desk) -> None:
    desk.push("a")
    desk.lease(duration=30)
    desk.age(31)
    (row,) = desk.reader.elements("pop", "GET", "Q")
    assert row.tries == 1


@pytest.mark.parametrize(("count", "number"), [(0, 60), (-1, 60), (None, 60), (4097, 58)])
@pytest.mark.parametrize("function", ["pop", "reserve", "take"])
def test_a_count_out_of_bounds_is_refused(
    desk: Desk, function: str, count: int | None, number: int
) -> None:
    assert desk.reader.error(function, "GET", "Q", count)[0] == number


@pytest.mark.parametrize("duration", [0, -1, float("nan"), 1e12, None])
def test_a_duration_out_of_bounds_is_refused(desk: Desk, duration: float | None) -> None:
    assert desk.reader.error("reserve", "GET", "Q", 1, duration)[0] == 60


def test_two_hundred_readers_at_once_take_two_hundred_distinct_elements(
    desk: Desk, world: World
) -> None:
    desk.pusher.ok("push_many", "PUT", "Q", [str(number) for number in range(200)])
    taken: list[str] = []

    def read(program: Any) -> None:
        taken.extend(row.body for _ in range(25) for row in program.elements("pop", "GET", "Q"))

    readers = [world.program("user2") for _ in range(8)]
    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert Counter(taken) == Counter(str(number) for number in range(200))


def test_an_element_that_another_transaction_holds_is_passed_over(desk: Desk, world: World) -> None:
    desk.push("a", "b")
    other = world.program("user2")
    with other.connection.transaction():
        assert [row.body for row in other.elements("reserve", "GET", "Q")] == ["a"]
        assert desk.pop(5) == ["b"]


def test_a_paused_queue_gives_nothing_and_takes_pushes(desk: Desk, world: World) -> None:
    desk.push("a")
    assert desk.pusher.ok("pause", "BOSS", "Q") == {"Err": "0"}
    assert desk.pusher.ok("pause", "BOSS", "Q") == {"Err": "0", "Already": 1}
    desk.push("b")
    other = world.program("user2")
    for function in ("pop", "reserve", "take"):
        assert other.elements(function, "GET", "Q", 5) == []
    assert desk.sizes()["Paused"] is True
    assert desk.pusher.ok("resume", "BOSS", "Q") == {"Err": "0"}
    assert desk.pusher.ok("resume", "BOSS", "Q") == {"Err": "0", "Already": 1}
    assert desk.pop(5) == ["a", "b"]


def test_remove_takes_out_one_that_is_not_reserved(desk: Desk) -> None:
    first, second = desk.push("a"), desk.push("b")
    desk.lease()
    remove = ("remove", "BOSS", "Q")
    assert desk.pusher.ok(*remove, first)["Done"] is False
    assert desk.pusher.ok(*remove, second)["Done"] is True
    assert desk.pusher.ok(*remove, second)["Done"] is False
    assert desk.pusher.ok("remove", "BOSS", "OTHER", first)["Done"] is False
    assert desk.sizes()["Total"] == 1


def test_drain_removes_what_is_available(desk: Desk) -> None:
    desk.push("reserved", "a", "b")
    desk.lease()
    desk.push("later", delay=60.0)
    assert desk.pusher.ok("drain", "BOSS", "Q") == {"Err": "0", "Removed": 2}
    assert desk.sizes()["Total"] == 2


def test_sizes_tell_what_there_is(desk: Desk) -> None:
    desk.push("reserved", "a", "b", "c")
    desk.lease(duration=100)
    mature = datetime.now(UTC) + timedelta(hours=1)
    desk.push("later", mature=mature)
    sizes = desk.sizes()
    assert datetime.fromisoformat(sizes.pop("Next")) == mature
    assert sizes == {"Total": 5, "Available": 3, "Scheduled": 1, "Reserved": 1, "Paused": False}
    desk.age(101)
    assert (desk.sizes()["Available"], desk.sizes()["Reserved"]) == (4, 0)


def test_an_empty_queue_has_no_next_mature_time(desk: Desk) -> None:
    desk.pop()
    assert desk.sizes()["Next"] is None


def test_a_pause_is_not_held_up_by_who_waits(desk: Desk) -> None:
    desk.push("a")
    desk.wait()
    with desk.reader.connection.transaction():
        # Marked already, so it changes nothing; only the first who waits does.
        desk.wait()
        desk.pusher.connection.execute("SET lock_timeout = '30s'")
        assert desk.pusher.ok("pause", "BOSS", "Q") == {"Err": "0"}


def test_a_peek_shows_elements_in_the_order_they_come_and_takes_none(desk: Desk) -> None:
    desk.push("b", delay=60)
    desk.push("a")
    rows = desk.reader.elements("peek", "GET", "Q")
    assert [(row.body, row.state, row.queue) for row in rows] == [
        ("a", "available", "Q"), ("b", "scheduled", "Q"),
    ]  # fmt: skip
    assert [row.body for row in desk.reader.elements("peek", "GET", "Q", 1)] == ["a"]
    assert [row.body for row in desk.reader.elements("peek", "GET", "Q", None, False)] == [None] * 2
    assert desk.reader.error("peek", "GET", "Q", 0)[0] == 60
    assert desk.sizes()["Total"] == 2
