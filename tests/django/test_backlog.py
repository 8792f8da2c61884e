"""The backlog: order, delays, bounds and its end, without a database."""

import threading

from psqlmessages.backlog import Backlog


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


def test_closing_ends_every_wait_and_counts_what_is_left() -> None:
    backlog: Backlog[str] = Backlog(10)
    taken: list[str | None] = []
    takers = [threading.Thread(target=lambda: taken.append(backlog.take())) for _ in range(2)]
    for taker in takers:
        taker.start()
    backlog.put_later("later", 1e9)
    backlog.close()
    for taker in takers:
        taker.join(60)
    assert taken == [None, None]
    assert not backlog.put("a")
    assert not backlog.put_later("a", 0.0)
    assert len(backlog) == 1
