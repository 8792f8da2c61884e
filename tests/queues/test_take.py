"""Taking: pop, reserve and what becomes of a lease."""

import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import World


def test_a_popped_element_is_gone(desk: Desk) -> None:
    desk.push("a", "b", "c")
    assert (desk.pop(), desk.pop(5), desk.pop()) == (["a"], ["b", "c"], [])


def test_a_pop_that_is_rolled_back_took_nothing(desk: Desk) -> None:
    desk.push("a")
    with desk.reader.connection.transaction(force_rollback=True):
        assert desk.pop() == ["a"]
    assert desk.pop() == ["a"]


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
    lease = desk.lease(duration=30)
    desk.age(29)
    assert desk.reserve() == []
    desk.age(2)
    (again,) = desk.reserve()
    assert (again.body, again.tries) == ("a", 3)
    assert again.lease != lease


def test_a_popped_element_whose_lease_ran_out_tells_its_tries(desk: Desk) -> None:
    desk.push("a")
    desk.lease(duration=30)
    desk.age(31)
    (row,) = desk.reader.elements("pop", "GET", "Q")
    assert row.tries == 1


def test_the_lease_lasts_two_minutes_by_default(desk: Desk) -> None:
    desk.push("a")
    desk.reader.elements("reserve", "GET", "Q")
    desk.age(118)
    assert desk.reserve() == []
    desk.age(3)
    assert len(desk.reserve()) == 1


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
    desk.done("rollback", 30.0, desk.lease())
    desk.age(29)
    assert desk.reserve() == []
    desk.age(2)
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
        thread.join(30)
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
    desk.lease(duration=10)
    mature = datetime.now(UTC) + timedelta(minutes=1)
    desk.push("later", mature=mature)
    sizes = desk.sizes()
    assert datetime.fromisoformat(sizes.pop("Next")) == mature
    assert sizes == {"Total": 5, "Available": 3, "Scheduled": 1, "Reserved": 1, "Paused": False}
    desk.age(11)
    assert (desk.sizes()["Available"], desk.sizes()["Reserved"]) == (4, 0)


def test_an_empty_queue_has_no_next_mature_time(desk: Desk) -> None:
    desk.pop()
    assert desk.sizes()["Next"] is None


def test_all_is_counted(desk: Desk) -> None:
    desk.push("a", "b", "c", "d", "e")
    desk.pop()
    one, two, three = (row.lease for row in desk.reserve(3))
    desk.done("commit", one, two)
    desk.done("rollback", None, three)
    assert desk.counts() == {"puts": 5, "gets": 1, "reserves": 3, "commits": 2, "rollbacks": 1}


def test_counting_waits_for_nobody(desk: Desk, world: World) -> None:
    others = [world.program("user1") for _ in range(3)]
    desk.push("first")
    for other in others:
        other.connection.execute("BEGIN")
        other.connection.execute("SET LOCAL lock_timeout = '1ms'")
        other.ok("push", "PUT", "Q", "x")
    for other in others:
        other.connection.execute("COMMIT")
    assert desk.counts() == {"puts": 4}


def test_an_element_in_its_last_try_becomes_a_dead_letter(desk: Desk) -> None:
    desk.limit(2)
    desk.push("a", headers='{"h":1}')
    desk.done("rollback", None, desk.lease())
    assert desk.done("rollback", None, desk.lease()) == [True]
    assert desk.reserve() == []
    (dead,) = desk.reserve(queue="__deadletter__")
    assert (dead.body, dead.tries) == ("a", 0)
    at = dead.headers.pop("x-dl-t")
    assert dead.headers == {"h": 1, "x-dl-from-queue": "Q", "x-dl-tries": 2}
    assert abs(datetime.fromisoformat(at) - datetime.now(UTC)) < timedelta(minutes=1)
    assert desk.counts()["dead_letters"] == 1
    assert desk.counts("__deadletter__")["puts"] == 1


@pytest.mark.parametrize("taken", [True, False])
def test_an_element_becomes_a_dead_letter_also_when_its_leases_simply_run_out(
    desk: Desk, taken: bool
) -> None:
    desk.limit(2)
    desk.push("a", "b")
    desk.lease(duration=10)
    desk.age(11)
    (again,) = (row for row in desk.reserve(2, 10) if row.body == "a")
    desk.age(11)
    if taken:
        assert [row.body for row in desk.reserve(5)] == ["b"]
    else:
        assert desk.tend() == 1
    assert desk.done("commit", again.lease) == [False]
    (dead,) = desk.reserve(queue="__deadletter__")
    assert (dead.body, dead.headers["x-dl-tries"]) == ("a", 2)


def test_without_a_limit_nothing_becomes_a_dead_letter(desk: Desk) -> None:
    desk.push("a")
    for _ in range(5):
        desk.done("rollback", None, desk.lease())
    assert desk.reserve()[0].tries == 5


def test_dead_letters_never_go_onto_their_own_queue(desk: Desk) -> None:
    desk.limit(1, dead="Q")
    desk.push("a")
    for tries in (1, 2):
        desk.done("rollback", None, desk.lease())
        (row,) = desk.reserve(duration=10)
        assert (row.tries, row.headers) == (tries, {})
        desk.done("release", row.lease)
    desk.lease(duration=10)
    desk.age(11)
    desk.tend()
    assert len(desk.reserve()) == 1


def test_a_dead_letter_can_be_put_back(desk: Desk) -> None:
    desk.limit(1)
    id_ = desk.push("a", headers='{"h":1}')
    desk.done("rollback", None, desk.lease())
    assert desk.world.owner.query("SELECT messages._put_back(%s)", [id_, 999_999_999]) == 1
    (row,) = desk.reserve()
    assert (row.id, row.body, row.headers, row.tries) == (id_, "a", {"h": 1}, 0)
    assert desk.world.owner.query("SELECT messages._put_back(%s)", [id_]) == 0


def test_putting_back_is_the_owners(desk: Desk) -> None:
    for call in ("_put_back('{1}')", "_remove_queue('Q')", "_tend_queues()"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            desk.reader.query(f"SELECT messages.{call}")


def test_a_removed_queue_goes_with_all_it_has(desk: Desk) -> None:
    desk.push("a", key="k")
    assert desk.world.owner.query("SELECT messages._remove_queue('Q')") is True
    assert desk.world.owner.query("SELECT messages._remove_queue('Q')") is False
    for table in ("element", "queue", "elementkey", "queuecount"):
        assert desk.world.owner.query(f"SELECT count(*) FROM psqlmessages_{table}") == 0
    desk.push("b", key="k")
    assert desk.pop(5) == ["b"]


def test_removing_a_queue_waits_for_who_uses_it(desk: Desk) -> None:
    desk.push("a")
    with desk.pusher.connection.transaction():
        desk.push("b")
        desk.world.owner.connection.execute("SET lock_timeout = '10ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            desk.world.owner.query("SELECT messages._remove_queue('Q')")
    assert desk.pop(5) == ["a", "b"]


@pytest.mark.parametrize(
    ("function", "durable"),
    [("push", "on"), ("pop", "on"), ("commit", "on"), ("rollback", "on"), ("remove", "on"),
     ("reserve", "off"), ("release", "off")],
)  # fmt: skip
def test_all_but_reserving_is_durable_at_the_commit(
    desk: Desk, function: str, durable: str
) -> None:
    id_ = desk.push("a")
    desk.world.rules("user2 BOSS Queue Q RW 1", "user2 PUT Queue Q W 1")
    taken = function in ("commit", "rollback", "release")
    lease = desk.lease() if taken else ""
    arguments: dict[str, tuple[Any, ...]] = {
        "push": ("PUT", "Q", "b"), "pop": ("GET", "Q"), "reserve": ("GET", "Q"),
        "remove": ("BOSS", "Q", id_), "rollback": ("GET", None, lease),
    }  # fmt: skip
    connection = desk.reader.connection
    connection.execute("SET synchronous_commit = off")
    with connection.transaction():
        desk.reader.ok(function, *arguments.get(function, ("GET", lease)))
        assert desk.reader.query("SHOW synchronous_commit") == durable
    assert desk.reader.query("SHOW synchronous_commit") == "off"


def test_who_comes_while_a_queue_is_removed_makes_it_anew(desk: Desk, world: World) -> None:
    desk.push("a")
    owner = world.program()
    with owner.connection.transaction():
        assert owner.query("SELECT messages._remove_queue('Q')") is True
        thread = threading.Thread(target=desk.push, args=("b",))
        thread.start()
        world.wait_for(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
            desk.pusher.pid,
        )
    thread.join(10)
    assert desk.pop(5) == ["b"]


def test_counts_are_added_up_and_stay_what_they_are(desk: Desk, world: World) -> None:
    # As if so many rows had been counted since.
    world.owner.connection.execute("UPDATE messages._queues SET counted_id = -1000000")
    desk.push("a", "b", "c")
    desk.pop()
    with desk.pusher.connection.transaction():
        desk.push("held")
        desk.tend()
    desk.tend()
    assert world.owner.query("SELECT count(*) FROM psqlmessages_queuecount") <= 4
    assert desk.counts() == {"puts": 4, "gets": 1}


def test_tending_goes_on_though_the_clock_was_put_back(desk: Desk, world: World) -> None:
    desk.limit(1)
    desk.push("a")
    desk.lease(duration=10)
    desk.age(11)
    world.owner.connection.execute("UPDATE messages._queues SET tended_at = now() + interval '1 h'")
    assert world.owner.query("SELECT messages._tend_queues()") == 1


def test_dead_letters_may_go_round(desk: Desk) -> None:
    desk.limit(1, dead="NEW.1")
    desk.limit(1, queue="NEW.1", dead="Q")
    desk.push("a")
    for queue, dead in (("Q", "NEW.1"), ("NEW.1", "Q")):
        desk.done("rollback", None, desk.lease(queue=queue))
        (row,) = desk.reserve(queue=dead, duration=10)
        assert (row.body, row.headers["x-dl-from-queue"], row.tries) == ("a", queue, 0)
        desk.done("release", row.lease)


def test_a_pause_is_not_held_up_by_who_waits(desk: Desk) -> None:
    desk.push("a")
    desk.wait()
    with desk.reader.connection.transaction():
        # Marked already, so it changes nothing; only the first who waits does.
        desk.wait()
        desk.pusher.connection.execute("SET lock_timeout = '100ms'")
        assert desk.pusher.ok("pause", "BOSS", "Q") == {"Err": "0"}
