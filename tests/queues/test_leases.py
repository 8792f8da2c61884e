"""Leases: who holds one may settle its element; of many leases, all are settled or none."""

from datetime import timedelta
from typing import Any

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import World
from tests.sql.simultaneous import blocked

pytestmark = pytest.mark.versions

# What each function takes before the leases.
SETTLES: dict[str, tuple[Any, ...]] = {"commit": (), "rollback": (None,), "release": ()}
UUID = "00000000-0000-0000-0000-000000000000"


def test_commit_answers_for_each_of_many_leases_of_several_queues(desk: Desk):
    desk.push("a", "b", "c")
    desk.push("d", queue="NEW.1")
    leases = [row.lease for row in (*desk.reserve(3), *desk.reserve(queue="NEW.1"))]
    desk.done("commit", leases[1])
    assert desk.done("commit", *leases, leases[0]) == [True, False, True, True, True]
    assert (desk.counts()["commits"], desk.counts("NEW.1")["commits"]) == (3, 1)


def test_elements_with_an_expired_lease_return_with_one_more_try(desk: Desk):
    desk.push("a", tries=2)
    before = desk.now()
    (row,) = desk.reader.elements("reserve", "GET", "Q")
    # Two minutes by default.
    ends = desk.world.owner.query("SELECT available_at FROM psqlmessages_element")
    assert before <= ends - timedelta(minutes=2) <= desk.now()
    desk.age(100)
    assert desk.reserve() == []
    desk.age(21)
    (again,) = desk.reserve()
    assert (again.body, again.tries, again.lease != row.lease) == ("a", 3, True)


def test_a_late_commit_counts_unless_another_reader_has_taken_the_element(desk: Desk):
    desk.push("a")
    lease = desk.lease(duration=30)
    desk.age(31)
    assert desk.done("commit", lease) == [True]
    assert desk.reserve() == []
    desk.push("b")
    late = desk.lease(duration=30)
    desk.age(31)
    lease = desk.lease()
    for function, given in SETTLES.items():
        assert desk.done(function, *given, late) == [False], function
        assert desk.done(function, *given, late, lease, late) == [False, True, False], function
        desk.push("c")
        lease = desk.lease()


def test_a_rolled_back_element_goes_behind_those_waiting_or_waits(desk: Desk):
    desk.push("a", "b")
    assert desk.done("rollback", None, desk.lease()) == [True]
    rows = desk.reserve(5)
    assert [(row.body, row.tries) for row in rows] == [("b", 0), ("a", 1)]
    desk.done("rollback", 100.0, rows[1].lease)
    desk.age(50)
    assert desk.reserve() == []
    desk.age(51)
    assert [(row.body, row.tries) for row in desk.reserve(5)] == [("b", 1), ("a", 2)]


def test_a_renewed_lease_lasts_longer_and_only_in_its_own_queue(desk: Desk):
    desk.world.rules("user2 GET Queue OTHER R 1")
    desk.push("a", "b")
    leases = [row.lease for row in desk.reserve(2, duration=5)]
    assert desk.reader.elements("renew", "GET", "OTHER", 60.0, *leases) == []
    renewed = desk.reader.elements("renew", "GET", "Q", 60.0, leases[0])
    assert [(row.body, row.lease) for row in renewed] == [("a", leases[0])]
    desk.age(10)
    (taken_over,) = desk.reserve()
    assert taken_over.body == "b"
    # One that another reader took over is not renewed.
    assert desk.reader.elements("renew", "GET", "Q", 60.0, leases[1]) == []
    assert desk.done("commit", *leases) == [True, False]
    assert desk.done("commit", taken_over.lease) == [True]


def test_a_released_element_is_as_if_never_taken(desk: Desk):
    desk.push("a", "b")
    assert desk.done("release", desk.lease()) == [True]
    assert [(row.body, row.tries) for row in desk.reserve(5)] == [("a", 0), ("b", 0)]


def test_guessed_leases_acknowledge_nothing(desk: Desk):
    for function, given in SETTLES.items():
        assert desk.done(function, *given, f"123456789.{UUID}") == [False]
        assert desk.done(function, *given, []) == []
        assert desk.reader.error(function, "GET", *given, None) == (63, "malformed lease: ")
    ids = [desk.push("a"), desk.push("b")]
    leases = [row.lease for row in desk.reserve(2)]
    guesses = [f"{id_}.{UUID}" for id_ in ids]
    assert desk.reader.elements("renew", "GET", "Q", 60.0, *guesses) == []
    for function, given in SETTLES.items():
        assert desk.done(function, *given, *guesses) == [False, False], function
        assert desk.done(function, *given, guesses[0]) == [False], function
    # Nor does one that is malformed among those that are right.
    assert desk.reader.error("commit", "GET", *leases, f"{leases[0]}0")[0] == 63
    assert desk.done("commit", *leases) == [True, True]


def test_a_queue_without_the_right_among_others_settles_none_of_them(desk: Desk):
    desk.push("a")
    desk.push("b", queue="NEW.1")
    leases = [desk.lease(), desk.lease(queue="NEW.1")]
    desk.world.execute("DELETE FROM messages.auth WHERE dest = 'NEW.*'")
    for function, given in SETTLES.items():
        assert desk.reader.error(function, "GET", *given, *leases)[0] == 2, function
        assert desk.sizes()["Reserved"] == 1
    assert desk.done("commit", leases[0]) == [True]


@pytest.mark.parametrize(
    ("function", "left"), [("commit", []), ("rollback", ["a 1"]), ("release", ["a 0"])]
)
def test_acknowledging_waits_for_locks(desk: Desk, world: World, function: str, left: list[str]):
    """As a reader that met it when it was being reserved, and whose transaction goes on."""
    desk.push("a")
    lease = desk.lease()
    world.execute("BEGIN; SELECT id FROM psqlmessages_element FOR UPDATE")
    with blocked(
        world, desk.reader, lambda: desk.done(function, *SETTLES[function], lease)
    ) as done:
        world.execute("COMMIT")
    assert done.result() == [True]
    rows = desk.reader.elements("reserve", "GET", "Q")
    assert [f"{row.body} {row.tries}" for row in rows] == left
