"""Leases: who holds one may settle its element; of many leases, all are settled or none."""

from datetime import timedelta
from typing import Any

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import World
from tests.sql.simultaneous import blocked

pytestmark = pytest.mark.versions

# What each function takes before the leases.
SETTLES: dict[str, tuple[Any, ...]] = {"commit": (), "rollback": (None,), "release": ()}
UUID = "00000000-0000-0000-0000-000000000000"


def test_commit_answers_for_each_of_many_leases_of_several_queues(queue: Queue):
    queue.push("a", "b", "c")
    queue.push("d", queue="NEW.1")
    leases = [row.lease for row in (*queue.reserve(3), *queue.reserve(queue="NEW.1"))]
    queue.done("commit", leases[1])
    assert queue.done("commit", *leases, leases[0]) == [True, False, True, True, True]
    assert (queue.counts()["commits"], queue.counts("NEW.1")["commits"]) == (3, 1)


def test_elements_with_an_expired_lease_return_with_one_more_try(queue: Queue):
    queue.push("a", tries=2)
    before = queue.now()
    (row,) = queue.reader.elements("reserve", "GET", "Q")
    # Two minutes by default.
    ends = queue.world.owner.query("SELECT available_at FROM psqlmessages_element")
    assert before <= ends - timedelta(minutes=2) <= queue.now()
    queue.age(100)
    assert queue.reserve() == []
    queue.age(21)
    (again,) = queue.reserve()
    assert (again.body, again.tries, again.lease != row.lease) == ("a", 3, True)


def test_a_late_commit_counts_unless_another_reader_has_taken_the_element(queue: Queue):
    queue.push("a")
    lease = queue.lease(duration=30)
    queue.age(31)
    assert queue.done("commit", lease) == [True]
    assert queue.reserve() == []
    queue.push("b")
    late = queue.lease(duration=30)
    queue.age(31)
    lease = queue.lease()
    for function, given in SETTLES.items():
        assert queue.done(function, *given, late) == [False], function
        assert queue.done(function, *given, late, lease, late) == [False, True, False], function
        queue.push("c")
        lease = queue.lease()


def test_a_rolled_back_element_goes_behind_those_waiting_or_waits(queue: Queue):
    queue.push("a", "b")
    assert queue.done("rollback", None, queue.lease()) == [True]
    rows = queue.reserve(5)
    assert [(row.body, row.tries) for row in rows] == [("b", 0), ("a", 1)]
    queue.done("rollback", 100.0, rows[1].lease)
    queue.age(50)
    assert queue.reserve() == []
    queue.age(51)
    assert [(row.body, row.tries) for row in queue.reserve(5)] == [("b", 1), ("a", 2)]


def test_a_renewed_lease_lasts_longer_and_only_in_its_own_queue(queue: Queue):
    queue.world.rules("user2 GET Queue OTHER R 1")
    queue.push("a", "b")
    leases = [row.lease for row in queue.reserve(2, duration=5)]
    assert queue.reader.elements("renew", "GET", "OTHER", 60.0, *leases) == []
    renewed = queue.reader.elements("renew", "GET", "Q", 60.0, leases[0])
    assert [(row.body, row.lease) for row in renewed] == [("a", leases[0])]
    queue.age(10)
    (taken_over,) = queue.reserve()
    assert taken_over.body == "b"
    # One that another reader took over is not renewed.
    assert queue.reader.elements("renew", "GET", "Q", 60.0, leases[1]) == []
    assert queue.done("commit", *leases) == [True, False]
    assert queue.done("commit", taken_over.lease) == [True]


def test_a_released_element_is_as_if_never_taken(queue: Queue):
    queue.push("a", "b")
    assert queue.done("release", queue.lease()) == [True]
    assert [(row.body, row.tries) for row in queue.reserve(5)] == [("a", 0), ("b", 0)]


def test_guessed_leases_acknowledge_nothing(queue: Queue):
    for function, given in SETTLES.items():
        assert queue.done(function, *given, f"123456789.{UUID}") == [False]
        assert queue.done(function, *given, []) == []
        assert queue.reader.error(function, "GET", *given, None) == (63, "malformed lease: ")
    ids = [queue.push("a"), queue.push("b")]
    leases = [row.lease for row in queue.reserve(2)]
    guesses = [f"{id_}.{UUID}" for id_ in ids]
    assert queue.reader.elements("renew", "GET", "Q", 60.0, *guesses) == []
    for function, given in SETTLES.items():
        assert queue.done(function, *given, *guesses) == [False, False], function
        assert queue.done(function, *given, guesses[0]) == [False], function
    # Nor does one that is malformed among those that are right.
    assert queue.reader.error("commit", "GET", *leases, f"{leases[0]}0")[0] == 63
    assert queue.done("commit", *leases) == [True, True]


def test_a_queue_without_the_right_among_others_settles_none_of_them(queue: Queue):
    queue.push("a")
    queue.push("b", queue="NEW.1")
    leases = [queue.lease(), queue.lease(queue="NEW.1")]
    queue.world.execute("DELETE FROM messages.auth WHERE dest = 'NEW.*'")
    for function, given in SETTLES.items():
        assert queue.reader.error(function, "GET", *given, *leases)[0] == 2, function
        assert queue.sizes()["Reserved"] == 1
    assert queue.done("commit", leases[0]) == [True]


@pytest.mark.parametrize(("act", "left"), [("commit", ""), ("rollback", "a 1"), ("release", "a 0")])
def test_acknowledging_waits_for_locks(queue: Queue, world: World, act: str, left: str):
    """As a reader that met it when it was being reserved, and whose transaction goes on."""
    queue.push("a")
    lease = queue.lease()
    world.execute("BEGIN; SELECT id FROM psqlmessages_element FOR UPDATE")
    given = (*SETTLES[act], lease)
    with blocked(world, queue.reader, lambda: queue.done(act, *given)) as done:
        world.execute("COMMIT")
    assert done.result() == [True]
    rows = queue.reader.elements("reserve", "GET", "Q")
    assert " ".join(f"{row.body} {row.tries}" for row in rows) == left
