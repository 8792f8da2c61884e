"""Dead letters: where an element goes after its last try, and how it comes back."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import World

REDRIVE = "SELECT messages._redrive_dead_letters(%s)"


def test_an_element_in_its_last_try_becomes_a_dead_letter(queue: Queue):
    queue.limit(2)
    queue.push("a", headers='{"h":1}')
    queue.done("rollback", None, queue.lease())
    queue.push("b")
    leases = [row.lease for row in sorted(queue.reserve(2), key=lambda row: row.body)]
    answer = queue.reader.ok("rollback", "GET", None, *leases)
    assert answer == {"Err": "0", "Done": [True, True], "DeadLettered": [True, False]}
    assert queue.pop() == ["b"]
    assert queue.reserve() == []
    (dead,) = queue.reserve(queue="__deadletter__")
    assert (dead.body, dead.tries) == ("a", 0)
    time = dead.headers.pop("x-dl-t")
    assert dead.headers == {"h": 1, "x-dl-from-queue": "Q", "x-dl-tries": 2}
    assert abs(datetime.fromisoformat(time) - datetime.now(UTC)) < timedelta(minutes=1)
    assert queue.counts()["dead_letters"] == 1
    assert queue.counts("__deadletter__")["puts"] == 1


@pytest.mark.parametrize("taken", [True, False])
def test_an_element_whose_leases_run_out_becomes_a_dead_letter(queue: Queue, taken: bool):
    queue.limit(2)
    queue.push("a", "b")
    queue.lease(duration=10)
    queue.age(11)
    (again,) = (row for row in queue.reserve(2, 10) if row.body == "a")
    queue.age(11)
    if taken:
        assert [row.body for row in queue.reserve(5)] == ["b"]
    else:
        assert queue.tend() == 1
    assert queue.done("commit", again.lease) == [False]
    (dead,) = queue.reserve(queue="__deadletter__")
    assert (dead.body, dead.headers["x-dl-tries"]) == ("a", 2)


def test_dead_letters_never_go_onto_their_own_queue(queue: Queue):
    queue.limit(1, dead="Q")
    queue.push("a")
    for tries in (1, 2):
        queue.done("rollback", None, queue.lease())
        (row,) = queue.reserve(duration=10)
        assert (row.tries, row.headers) == (tries, {})
        queue.done("release", row.lease)
    queue.lease(duration=10)
    queue.age(11)
    queue.tend()
    assert len(queue.reserve()) == 1


def test_a_dead_letter_can_be_put_back(queue: Queue):
    queue.limit(1)
    id_ = queue.push("a", headers='{"h":1}')
    queue.done("rollback", None, queue.lease())
    assert queue.world.owner.query(REDRIVE, [id_, 999_999_999]) == 1
    (row,) = queue.reserve()
    assert (row.id, row.body, row.headers, row.tries) == (id_, "a", {"h": 1}, 0)
    assert queue.world.owner.query(REDRIVE, [id_]) == 0
    # Without a limit nothing becomes a dead letter.
    queue.limit(None)
    for tries in range(1, 5):
        queue.done("rollback", None, row.lease)
        (row,) = queue.reserve()
        assert row.tries == tries


def test_housekeeping_works_after_the_clock_was_set_back(queue: Queue, world: World):
    queue.limit(1)
    queue.push("a")
    queue.lease(duration=10)
    queue.age(11)
    world.owner.connection.execute("UPDATE messages._queues SET maintained_at = now() + '1 h'")
    assert world.owner.query("SELECT messages._maintain_queues()") == 1


def test_a_forged_dead_letter_is_not_put_back(queue: Queue, world: World):
    world.rules("user1 PUT Queue * W 1")
    queue.limit(1)
    true = queue.push("true")
    queue.done("rollback", None, queue.lease())
    queue.push("x", queue="OTHER")
    names = ("OTHER", "Q", "bad*", "l" * 101, "NOWHERE")
    sources = [f'{{"x-dl-from-queue": "{name}"}}' for name in names]
    forged = [queue.push("x", queue=to, headers=each) for to in "QR" for each in sources]
    assert world.owner.query(REDRIVE, forged) == 0
    assert world.owner.query(REDRIVE, [true, *forged]) == 1
    assert queue.pop(9) == ["x"] * 5 + ["true"]


def test_housekeeping_does_not_wait_for_the_dead_letter_queue(queue: Queue, world: World):
    queue.limit(1)
    queue.push("x", "y")
    first, late = queue.reserve(2)
    queue.reader.execute("BEGIN")
    queue.done("rollback", None, first.lease)
    world.execute("DELETE FROM messages._scan_start")
    world.execute("UPDATE psqlmessages_element SET available_at = 'epoch' WHERE id = %s", [late.id])
    world.execute("SET lock_timeout = '30s'")
    assert queue.tend() == 0
    queue.reader.execute("COMMIT")
    # The commit may have tended by itself, if a second was over.
    queue.tend()
    assert len(queue.reserve(5, queue="__deadletter__")) == 2
