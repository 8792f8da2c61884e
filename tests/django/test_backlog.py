"""The backlog: order, delays, bounds and its end, without a database."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from psqlmessages.handler_backlog import Backlog


def test_tasks_come_out_in_their_order_but_delayed_ones_when_their_time_has_come() -> None:
    now = [0.0]
    backlog: Backlog[object] = Backlog(10, lambda: now[0])
    # Tasks of the same time need not be comparable.
    tasks = [object() for _ in range(3)]
    backlog.put_later("late", 5.0)
    for task in tasks:
        assert backlog.put(task)
    backlog.put_later(tasks[0], 5.0)
    assert [backlog.take(), backlog.take()] == tasks[:2]
    now[0] = 5.0
    assert [backlog.take() for _ in range(3)] == ["late", tasks[0], tasks[2]]


def test_a_full_backlog_has_who_adds_wait_until_one_is_taken() -> None:
    backlog: Backlog[str] = Backlog(1)
    backlog.put("a")
    # Delayed tasks are bounded too.
    assert [backlog.put_later("later", 1e9) for _ in range(2)] == [True, False]
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(backlog.put, "b")
        with pytest.raises(TimeoutError):
            adding.result(0.05)
        assert backlog.take() == "a"
        assert adding.result(60)
    assert backlog.take() == "b"


def test_closing_ends_every_wait_and_counts_what_is_left() -> None:
    backlog: Backlog[str] = Backlog(10)
    with ThreadPoolExecutor(2) as pool:
        taking = [pool.submit(backlog.take) for _ in range(2)]
        backlog.put_later("later", 1e9)
        backlog.close()
        assert [taken.result(60) for taken in taking] == [None, None]
    assert not backlog.put("a")
    assert not backlog.put_later("a", 0.0)
    assert len(backlog) == 1
