"""Leases: what was reserved is settled by whoever holds its lease; all or none of many."""

import threading
from datetime import timedelta

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import PATIENCE_SECONDS, World


def test_a_reserved_element_is_hidden_until_it_is_committed(desk: Desk) -> None:
    desk.push("a")
    lease = desk.lease()
    assert desk.reserve() == []
    assert desk.done("commit", lease) == [True]
    desk.age(100)
    assert (desk.reserve(), desk.sizes()["Total"]) == ([], 0)


def test_a_second_commit_answers_false(desk: Desk) -> None:
    desk.push("a")
    lease = desk.lease()
    assert (desk.done("commit", lease), desk.done("commit", lease)) == ([True], [False])


def test_commit_answers_for_each_of_many_leases(desk: Desk) -> None:
    desk.push("a", "b", "c")
    one, two, three = (row.lease for row in desk.reserve(3))
    desk.done("commit", two)
    assert desk.done("commit", one, two, three) == [True, False, True]


def test_what_is_not_committed_in_time_comes_back_with_one_more_try(desk: Desk) -> None:
    desk.push("a", tries=2)
    lease = desk.lease(duration=100)
    desk.age(50)
    assert desk.reserve() == []
    desk.age(51)
    (again,) = desk.reserve()
    assert (again.body, again.tries) == ("a", 3)
    assert again.lease != lease


def test_the_lease_lasts_two_minutes_by_default(desk: Desk) -> None:
    desk.push("a")
    before = desk.now()
    desk.reader.elements("reserve", "GET", "Q")
    ends = desk.world.owner.query("SELECT available_at FROM psqlmessages_element")
    assert before <= ends - timedelta(minutes=2) <= desk.now()


def test_a_late_commit_that_nobody_overtook_succeeds(desk: Desk) -> None:
    desk.push("a")
    lease = desk.lease(duration=30)
    desk.age(31)
    assert desk.done("commit", lease) == [True]
    assert desk.reserve() == []


def test_a_late_commit_of_what_another_has_taken_answers_false_and_removes_nothing(
    desk: Desk,
) -> None:
    desk.push("a")
    late = desk.lease(duration=30)
    desk.age(31)
    lease = desk.lease()
    for function, *arguments in (("commit",), ("rollback", None), ("release",)):
        assert desk.done(function, *arguments, late) == [False]
    assert desk.done("commit", lease) == [True]


def test_a_rolled_back_element_goes_behind_those_waiting(desk: Desk) -> None:
    desk.push("a", "b")
    assert desk.done("rollback", None, desk.lease()) == [True]
    rows = desk.reserve(5)
    assert [(row.body, row.tries) for row in rows] == [("b", 0), ("a", 1)]


def test_a_rolled_back_element_waits_as_long_as_it_is_told(desk: Desk) -> None:
    desk.push("a")
    desk.done("rollback", 100.0, desk.lease())
    desk.age(50)
    assert desk.reserve() == []
    desk.age(51)
    assert [row.tries for row in desk.reserve()] == [1]


def test_a_released_element_is_as_if_never_taken(desk: Desk) -> None:
    desk.push("a", "b")
    assert desk.done("release", desk.lease()) == [True]
    assert [(row.body, row.tries) for row in desk.reserve(5)] == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("function", ["commit", "rollback", "release"])
def test_an_unknown_lease_answers_false(desk: Desk, function: str) -> None:
    lease = "123456789.00000000-0000-0000-0000-000000000000"
    arguments = (None,) if function == "rollback" else ()
    assert desk.done(function, *arguments, lease) == [False]


@pytest.mark.parametrize(
    "lease", ["", None, "x", "1", "1.", "1.x", "-1.00000000-0000-0000-0000-000000000000",
              "1.00000000-0000-0000-0000-00000000000G",
              "9" * 30 + ".00000000-0000-0000-0000-000000000000"],
)  # fmt: skip
@pytest.mark.parametrize("function", ["commit", "rollback", "release"])
def test_a_malformed_lease_is_refused(desk: Desk, function: str, lease: str | None) -> None:
    arguments = (None,) if function == "rollback" else ()
    number, text = desk.reader.error(function, "GET", *arguments, lease)
    assert (number, text) == (63, f"malformed lease: {lease or ''}")


def test_a_guessed_lease_commits_nothing(desk: Desk) -> None:
    id_ = desk.push("a")
    desk.lease()
    guess = f"{id_}.00000000-0000-0000-0000-000000000000"
    assert desk.done("commit", guess) == [False]
    assert desk.sizes()["Reserved"] == 1


@pytest.mark.parametrize("function", ["commit", "rollback", "release", "renew"])
def test_guessed_leases_settle_nothing(desk: Desk, function: str) -> None:
    ids = [desk.push("a"), desk.push("b")]
    leases = [row.lease for row in desk.reserve(2)]
    guesses = [f"{id_}.00000000-0000-0000-0000-000000000000" for id_ in ids]
    if function == "renew":
        assert desk.reader.elements("renew", "GET", "Q", 60.0, *guesses) == []
    else:
        arguments = (None,) if function == "rollback" else ()
        assert desk.done(function, *arguments, *guesses) == [False, False]
    assert desk.done("commit", *leases) == [True, True]


def test_one_malformed_lease_among_others_settles_none_of_them(desk: Desk) -> None:
    desk.push("a", "b")
    leases = [row.lease for row in desk.reserve(2)]
    assert desk.reader.error("commit", "GET", *leases, f"{leases[0]}0")[0] == 63
    assert desk.done("commit", *leases) == [True, True]


@pytest.mark.parametrize("function", ["commit", "rollback", "release"])
def test_a_queue_without_the_right_among_others_settles_none_of_them(
    desk: Desk, function: str
) -> None:
    desk.push("a")
    desk.push("b", queue="NEW.1")
    leases = [desk.lease(), desk.lease(queue="NEW.1")]
    desk.world.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'NEW.*'")
    arguments = (None,) if function == "rollback" else ()
    assert desk.reader.error(function, "GET", *arguments, *leases)[0] == 2
    assert desk.sizes()["Reserved"] == 1
    assert desk.done("commit", leases[0]) == [True]


def test_leases_of_several_queues_are_committed_and_counted_each(desk: Desk) -> None:
    desk.push("a", "b")
    desk.push("c", queue="NEW.1")
    leases = [row.lease for row in (*desk.reserve(2), *desk.reserve(queue="NEW.1"))]
    assert desk.done("commit", *leases, leases[0]) == [True] * 4
    assert (desk.counts()["commits"], desk.counts("NEW.1")["commits"]) == (2, 1)


@pytest.mark.parametrize(
    ("function", "left"), [("commit", None), ("rollback", "a 1"), ("release", "a 0")]
)
def test_who_has_an_element_locked_holds_up_its_settling_and_takes_nothing(
    desk: Desk, world: World, function: str, left: str | None
) -> None:
    """As a reader that met it when it was being reserved, and whose transaction goes on."""
    desk.push("a")
    lease = desk.lease()
    arguments = (None,) if function == "rollback" else ()
    done: list[bool] = []
    with world.owner.connection.transaction():
        world.owner.query("SELECT id FROM psqlmessages_element FOR UPDATE")
        settle = threading.Thread(
            target=lambda: done.extend(desk.done(function, *arguments, lease))
        )
        settle.start()
        world.wait_for(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", desk.reader.pid
        )
    settle.join(PATIENCE_SECONDS)
    assert done == [True]
    rows = desk.reader.elements("reserve", "GET", "Q")
    assert [f"{row.body} {row.tries}" for row in rows] == ([left] if left else [])
