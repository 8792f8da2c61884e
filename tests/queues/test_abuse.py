"""What a role that may use one queue cannot do to the others, nor to the whole."""

import threading
from typing import Any

import psycopg
import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import PATIENCE_SECONDS, World

MOST_TRIES = 2**31 - 1


@pytest.mark.parametrize("max_tries", [None, 3])
def test_the_most_tries_that_can_be_counted_hold_up_nobody(
    desk: Desk, world: World, max_tries: int | None
) -> None:
    desk.limit(max_tries)
    desk.push("bomb", tries=MOST_TRIES)
    desk.push("next")
    desk.reserve()
    desk.age(61)
    assert desk.tend() == (0 if max_tries is None else 1)
    rows = [*desk.reserve(5), *desk.reserve(5, queue="__deadletter__")]
    assert {row.body for row in rows} == {"bomb", "next"}
    assert desk.done("rollback", None, *(row.lease for row in rows)) == [True, True]


def test_tending_does_not_wait_for_who_is_making_the_dead_letter_queue(
    desk: Desk, world: World
) -> None:
    desk.limit(1)
    desk.push("x", "y")
    first, late = desk.reserve(2)
    desk.reader.connection.execute("BEGIN")
    desk.done("rollback", None, first.lease)
    world.owner.connection.execute(
        "UPDATE psqlmessages_element SET available_at = 'epoch' WHERE id = %s", (late.id,)
    )
    world.owner.connection.execute("SET lock_timeout = '30s'")
    assert desk.tend() == 0
    desk.reader.connection.execute("COMMIT")
    # The commit may have tended by itself, where a second was over.
    desk.tend()
    assert len(desk.reserve(5, queue="__deadletter__")) == 2


def test_a_right_taken_away_while_somebody_is_just_listening_is_gone_after_it(
    desk: Desk, world: World
) -> None:
    desk.reader.connection.execute("BEGIN")
    desk.wait()
    world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'GET'")
    desk.reader.connection.execute("COMMIT")
    for _ in range(3):
        world.owner.connection.execute("SELECT messages._evaluate()")
    assert set(desk.wakes()) == {"moved Q"}
    desk.push("x")
    assert desk.wakes() == []


def test_no_leases_are_none(desk: Desk) -> None:
    for call in ("commit('GET'", "rollback('GET', null", "release('GET'"):
        answer = desk.reader.query(f"SELECT messages.{call}, VARIADIC null::text[])")
        assert answer == {"Err": "0", "Done": []}, call


def test_a_lease_with_a_tail_is_malformed(desk: Desk) -> None:
    desk.push("x")
    assert desk.reader.error("commit", "GET", f"{desk.lease()}.x")[0] == 63


# Copies of exchanges


def deliver(
    desk: Desk, element: Any, mark: str | None, queues: list[str], failed: Any = "{}"
) -> Any:
    """Deliver copies of one element, all with that mark."""
    return desk.reader.call(
        "deliver", "GET", "Q", [str(element)], failed, [str(element)] * len(queues),
        [mark] * len(queues), queues, *[[None] * len(queues)] * 5,
    )  # fmt: skip


def test_without_a_rule_an_element_is_put_aside_once(desk: Desk, world: World) -> None:
    id_ = desk.push("x")
    assert deliver(desk, id_, "m", ["__no_route__"] * 2)["Err"] == "58"
    world.rules("user2 GET Queue __* RW 1")
    assert deliver(desk, id_, "m", ["__no_route__"] * 2)["Err"] == "0"


def test_an_element_that_is_named_twice_gives_its_copies_once(desk: Desk, world: World) -> None:
    world.rules("user2 GET Queue NEW.1 RW 1", "user2 GET Queue NEW.2 RW 1")
    id_ = str(desk.push("x"))
    desk.reader.ok(
        "deliver", "GET", "Q", [id_, id_], [], [id_], ["m"], ["NEW.1"], *[[None]] * 5
    )  # fmt: skip
    assert desk.pop(5, "NEW.1") == ["x"]
    assert desk.reader.error("deliver", "GET", "Q", ["0" + id_], [], *[[]] * 8)[0] == 63
    # A copy without a mark hides no other copy.
    id_ = str(desk.push("y"))
    deliver(desk, id_, None, ["NEW.1"], [id_])
    desk.age(10)
    deliver(desk, id_, "m", ["NEW.2"])
    assert (desk.pop(5, "NEW.1"), desk.pop(5, "NEW.2")) == (["y"], ["y"])


# Removing a queue, and putting dead letters back: the owner's alone


def test_a_forged_dead_letter_is_not_put_back(desk: Desk, world: World) -> None:
    world.rules("user1 PUT Queue * W 1")
    desk.push("x", queue="OTHER")
    forged = [
        desk.push("x", queue=queue, headers=f'{{"x-dl-from-queue": "{name}"}}')
        for queue in "QR"
        for name in ("OTHER", "bad*", "l" * 101, "NOWHERE")
    ]
    assert world.owner.query("SELECT messages._put_back(%s)", forged) == 0
    assert desk.sizes()["Total"] == 4


def test_a_forged_dead_letter_is_not_put_back_beside_a_true_one(desk: Desk, world: World) -> None:
    desk.limit(1)
    true = desk.push("true")
    desk.done("rollback", None, desk.lease())
    world.rules("user1 PUT Queue OTHER W 1")
    forged = desk.push("forged", queue="OTHER", headers='{"x-dl-from-queue": "Q"}')
    assert world.owner.query("SELECT messages._put_back(%s)", [true, forged]) == 1
    assert desk.pop(5) == ["true"]


def test_a_queue_is_removed_by_the_owner_alone_with_all_it_has(desk: Desk) -> None:
    for call in ("_put_back('{1}')", "_remove_queue('Q')", "_tend_queues()"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            desk.reader.query(f"SELECT messages.{call}")
    desk.push("a", key="k")
    assert desk.world.owner.query("SELECT messages._remove_queue('Q')") is True
    assert desk.world.owner.query("SELECT messages._remove_queue('Q')") is False
    for table in ("element", "queue", "elementkey", "queuecount"):
        assert desk.world.owner.query(f"SELECT count(*) FROM psqlmessages_{table}") == 0
    desk.push("b", key="k")
    assert desk.pop(5) == ["b"]


def test_removing_a_queue_waits_for_those_who_use_it(desk: Desk, world: World) -> None:
    desk.push("a")
    with desk.pusher.connection.transaction():
        desk.push("b")
        world.owner.connection.execute("SET lock_timeout = '10ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            world.owner.query("SELECT messages._remove_queue('Q')")
    assert desk.pop(5) == ["a", "b"]
    # Whoever comes while it is removed makes it again.
    owner = world.program()
    with owner.connection.transaction():
        assert owner.query("SELECT messages._remove_queue('Q')") is True
        thread = threading.Thread(target=desk.push, args=("c",))
        thread.start()
        world.wait_for(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
            desk.pusher.pid,
        )
    thread.join(PATIENCE_SECONDS)
    assert desk.pop(5) == ["c"]


def test_removing_a_queue_and_committing_do_not_wait_for_each_other(
    desk: Desk, world: World
) -> None:
    desk.push("x", "y")
    leases = [row.lease for row in desk.reserve(2)]
    answers: list[Any] = []
    owner = world.owner.connection
    with owner.transaction():
        owner.execute("LOCK TABLE psqlmessages_queue IN ACCESS EXCLUSIVE MODE")
        commit = threading.Thread(target=lambda: answers.append(desk.done("commit", *leases)))
        commit.start()
        world.wait_for(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", desk.reader.pid
        )
        owner.execute("SELECT messages._remove_queue('Q')")
    commit.join(PATIENCE_SECONDS)
    assert answers == [[False, False]]
