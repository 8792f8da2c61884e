"""The backlog: order, delays, bounds and its end, without a database."""

import threading

import pytest

from psqlmessages.backlog import Backlog


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_tasks_come_out_in_their_order(clock: Clock) -> None:
    backlog: Backlog[str] = Backlog(10, clock)
    for task in "abc":
        assert backlog.put(task)
    assert [backlog.take() for _ in range(3)] == ["a", "b", "c"]


def test_a_delayed_task_lets_others_pass_until_its_time_has_come(clock: Clock) -> None:
    backlog: Backlog[str] = Backlog(10, clock)
    backlog.put_later("late", 5.0)
    backlog.put("a")
    backlog.put("b")
    assert backlog.take() == "a"
    clock.now = 5.0
    assert [backlog.take(), backlog.take()] == ["late", "b"]


def test_tasks_of_the_same_time_need_not_be_comparable(clock: Clock) -> None:
    backlog: Backlog[object] = Backlog(10, clock)
    first, second = object(), object()
    backlog.put_later(first, 0.0)
    backlog.put_later(second, 0.0)
    assert [backlog.take(), backlog.take()] == [first, second]


def test_a_full_backlog_has_who_adds_wait_until_one_is_taken() -> None:
    backlog: Backlog[str] = Backlog(1)
    backlog.put("a")
    added = threading.Event()

    def add() -> None:
        backlog.put("b")
        added.set()

    adding = threading.Thread(target=add)
    adding.start()
    assert not added.wait(0.05)
    assert backlog.take() == "a"
    assert added.wait(60)
    adding.join()
    assert backlog.take() == "b"


def test_delayed_tasks_are_bounded_too(clock: Clock) -> None:
    backlog: Backlog[str] = Backlog(1, clock)
    assert backlog.put_later("a", 1.0)
    assert not backlog.put_later("b", 1.0)


def test_closing_ends_every_wait_and_counts_what_is_left(clock: Clock) -> None:
    backlog: Backlog[str] = Backlog(1)
    taken: list[str | None] = []
    takers = [threading.Thread(target=lambda: taken.append(backlog.take())) for _ in range(2)]
    for taker in takers:
        taker.start()
    backlog.close()
    for taker in takers:
        taker.join(60)
    assert taken == [None, None]
    assert not backlog.put("a")
    assert not backlog.put_later("a", 0.0)


def test_what_waits_at_the_end_stays_there() -> None:
    backlog: Backlog[str] = Backlog(10)
    backlog.put("now")
    backlog.put_later("later", 1e9)
    backlog.close()
    assert backlog.take() is None
    assert len(backlog) == 2
