"""Dead letters: where an element goes after its last try, and how it comes back."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import World


def test_an_element_in_its_last_try_becomes_a_dead_letter(desk: Desk):
    desk.limit(2)
    desk.push("a", headers='{"h":1}')
    desk.done("rollback", None, desk.lease())
    desk.push("b")
    leases = [row.lease for row in sorted(desk.reserve(2), key=lambda row: row.body)]
    answer = desk.reader.ok("rollback", "GET", None, *leases)
    assert answer == {"Err": "0", "Done": [True, True], "DeadLettered": [True, False]}
    assert desk.pop() == ["b"]
    assert desk.reserve() == []
    (dead,) = desk.reserve(queue="__deadletter__")
    assert (dead.body, dead.tries) == ("a", 0)
    at = dead.headers.pop("x-dl-t")
    assert dead.headers == {"h": 1, "x-dl-from-queue": "Q", "x-dl-tries": 2}
    assert abs(datetime.fromisoformat(at) - datetime.now(UTC)) < timedelta(minutes=1)
    assert desk.counts()["dead_letters"] == 1
    assert desk.counts("__deadletter__")["puts"] == 1


@pytest.mark.parametrize("taken", [True, False])
def test_an_element_whose_leases_run_out_becomes_a_dead_letter(desk: Desk, taken: bool):
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


def test_dead_letters_never_go_onto_their_own_queue(desk: Desk):
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


def test_a_dead_letter_can_be_put_back(desk: Desk):
    desk.limit(1)
    id_ = desk.push("a", headers='{"h":1}')
    desk.done("rollback", None, desk.lease())
    assert (
        desk.world.owner.query("SELECT messages._redrive_dead_letters(%s)", [id_, 999_999_999]) == 1
    )
    (row,) = desk.reserve()
    assert (row.id, row.body, row.headers, row.tries) == (id_, "a", {"h": 1}, 0)
    assert desk.world.owner.query("SELECT messages._redrive_dead_letters(%s)", [id_]) == 0
    # Without a limit nothing becomes a dead letter.
    desk.limit(None)
    for tries in range(1, 5):
        desk.done("rollback", None, row.lease)
        (row,) = desk.reserve()
        assert row.tries == tries


def test_a_forged_dead_letter_is_not_put_back(desk: Desk, world: World):
    world.rules("user1 PUT Queue * W 1")
    desk.limit(1)
    true = desk.push("true")
    desk.done("rollback", None, desk.lease())
    desk.push("x", queue="OTHER")
    forged = [
        desk.push("x", queue=queue, headers=f'{{"x-dl-from-queue": "{name}"}}')
        for queue in "QR"
        for name in ("OTHER", "Q", "bad*", "l" * 101, "NOWHERE")
    ]
    assert world.owner.query("SELECT messages._redrive_dead_letters(%s)", forged) == 0
    assert world.owner.query("SELECT messages._redrive_dead_letters(%s)", [true, *forged]) == 1
    assert desk.pop(9) == ["x"] * 5 + ["true"]


def test_housekeeping_does_not_wait_for_the_dead_letter_queue(desk: Desk, world: World):
    desk.limit(1)
    desk.push("x", "y")
    first, late = desk.reserve(2)
    desk.reader.execute("BEGIN")
    desk.done("rollback", None, first.lease)
    world.execute("DELETE FROM messages._scan_start")
    world.execute(
        "UPDATE psqlmessages_element SET available_at = 'epoch' WHERE id = %s", (late.id,)
    )
    world.execute("SET lock_timeout = '30s'")
    assert desk.tend() == 0
    desk.reader.execute("COMMIT")
    # The commit may have tended by itself, if a second was over.
    desk.tend()
    assert len(desk.reserve(5, queue="__deadletter__")) == 2
