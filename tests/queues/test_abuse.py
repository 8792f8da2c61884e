"""What a role that may use one queue cannot do to the others, nor to the whole."""

import threading
from typing import Any

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import PATIENCE_SECONDS, World

MOST_TRIES = 2**31 - 1


@pytest.mark.parametrize("max_tries", [None, 3, 1])
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


@pytest.mark.parametrize("call", ["commit('GET'", "rollback('GET', null", "release('GET'"])
def test_no_leases_are_none(desk: Desk, call: str) -> None:
    sql = f"SELECT messages.{call}, VARIADIC null::text[])"
    assert desk.reader.query(sql) == {"Err": "0", "Done": []}


def test_a_lease_with_a_tail_is_malformed(desk: Desk) -> None:
    desk.push("x")
    assert desk.reader.error("commit", "GET", f"{desk.lease()}.x")[0] == 63


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
    world.rules("user2 GET Queue NEW.1 RW 1")
    id_ = str(desk.push("x"))
    desk.reader.ok(
        "deliver", "GET", "Q", [id_, id_], [], [id_], ["m"], ["NEW.1"], *[[None]] * 5
    )  # fmt: skip
    assert desk.pop(5, "NEW.1") == ["x"]
    assert desk.reader.error("deliver", "GET", "Q", ["0" + id_], [], *[[]] * 8)[0] == 63


def test_a_copy_without_a_mark_swallows_no_other(desk: Desk, world: World) -> None:
    world.rules("user2 GET Queue NEW.1 RW 1", "user2 GET Queue NEW.2 RW 1")
    id_ = desk.push("x")
    deliver(desk, id_, None, ["NEW.1"], [str(id_)])
    desk.age(10)
    deliver(desk, id_, "m", ["NEW.2"])
    assert (desk.pop(5, "NEW.1"), desk.pop(5, "NEW.2")) == (["x"], ["x"])


@pytest.mark.parametrize("name", ["OTHER", "bad*", "l" * 101, "NOWHERE"])
def test_a_forged_dead_letter_is_not_put_back(desk: Desk, world: World, name: str) -> None:
    world.rules("user1 PUT Queue * W 1")
    desk.push("x", queue="OTHER")
    forged = [
        desk.put("x", queue, headers=f'{{"x-dl-from-queue": "{name}"}}')["Id"] for queue in "QR"
    ]
    moved = world.owner.query("SELECT messages._put_back(%s)", forged)
    assert (moved, desk.sizes()["Total"]) == (0, 1)


def test_a_forged_dead_letter_is_not_put_back_beside_a_true_one(desk: Desk, world: World) -> None:
    desk.limit(1)
    true = desk.push("true")
    desk.done("rollback", None, desk.lease())
    world.rules("user1 PUT Queue OTHER W 1")
    forged = desk.push("forged", queue="OTHER", headers='{"x-dl-from-queue": "Q"}')
    assert world.owner.query("SELECT messages._put_back(%s)", [true, forged]) == 1
    assert desk.pop(5) == ["true"]


def test_counts_are_added_up_after_their_table_was_emptied(desk: Desk, world: World) -> None:
    desk.push("x")
    owner = world.owner.connection
    owner.execute("UPDATE messages._queues SET counted_id = 1000000000000")
    owner.execute(
        "INSERT INTO psqlmessages_queuecount (queue_id, puts)"
        " SELECT q.id, 1 FROM psqlmessages_queue AS q, generate_series(1, 2000)"
    )
    desk.tend()
    assert world.owner.query("SELECT count(*) FROM psqlmessages_queuecount") == 1
    assert desk.counts() == {"puts": 2001}
