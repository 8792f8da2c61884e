"""Settings of a queue, and its removal: by whom, and beside pushes at the same moment."""

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import World

DEFAULTS = {"Err": "0", "MaxTries": 0, "DeadLetterQueue": "__deadletter__", "KeyTimeout": 86400}


def test_settings_change_one_by_one_and_zero_means_no_maximum(queue: Queue):
    queue.world.rules("user1 ADMIN Queue DEAD W 1")
    changes = (
        ((3,), {"MaxTries": 3}), ((None, "DEAD"), {"DeadLetterQueue": "DEAD"}),
        ((None, None, 60), {"KeyTimeout": 60}), ((), {}), ((0,), {"MaxTries": 0}),
    )  # fmt: skip
    expected = DEFAULTS
    for given, change in changes:
        expected = expected | change
        assert queue.pusher.ok("configure_queue", "ADMIN", "Q", *given) == expected
    row = "SELECT (max_tries, dead_letter_queue, key_timeout)::text FROM messages.queues"
    assert queue.world.owner.query(row) == "(,DEAD,60)"


def test_settings_send_no_elements_to_a_queue_that_the_node_may_not_push_to(queue: Queue):
    queue.push("x")
    for name, number in ("OTHER", 2), ("", 1), ("Q*", 62), ("x" * 101, 54):
        assert queue.pusher.error("configure_queue", "ADMIN", "Q", 1, name)[0] == number, name
    assert queue.pusher.ok("configure_queue", "ADMIN", "Q") == DEFAULTS


def test_mode_a_allows_what_rw_does(queue: Queue):
    queue.pusher.ok("push", "ADMIN", "Q", "x")
    queue.pusher.ok("pause", "ADMIN", "Q")
    queue.pusher.ok("resume", "ADMIN", "Q")
    assert queue.pusher.query("SELECT queue FROM messages.queues") == "Q"
    assert queue.pusher.query("SELECT body FROM messages.pop('ADMIN', 'Q')") == "x"


def test_chosen_elements_are_removed_or_moved_unless_they_are_reserved(queue: Queue):
    queue.world.rules("user1 ADMIN Queue DEAD W 1", "user2 GET Queue DEAD R 1")
    reserved, removed, moved = (queue.push(name) for name in ("r", "x", "m"))
    delayed = queue.push("delayed", delay=60.0)
    queue.push("stays")
    queue.lease()
    ids = [reserved, removed, 0]
    assert queue.pusher.ok("remove_elements", "ADMIN", "Q", ids)["Removed"] == 1
    ids = [reserved, removed, moved, delayed]
    assert queue.pusher.ok("move_elements", "ADMIN", "Q", "DEAD", ids)["Moved"] == 2
    assert queue.pusher.ok("remove_elements", "ADMIN", "Q", [moved])["Removed"] == 0
    assert queue.counts() == {"puts": 5, "reserves": 1, "removes": 3}
    assert queue.reader.query("SELECT body FROM messages.pop('GET', 'DEAD', 9)") == "m"
    sizes = queue.reader.ok("sizes", "GET", "DEAD")
    assert (sizes["Total"], sizes["Scheduled"]) == (1, 1)
    assert queue.pop(9) == ["stays"]


def test_removing_a_queue_removes_its_settings_keys_and_counts(queue: Queue):
    first = queue.push("x", key="k")
    queue.pusher.ok("configure_queue", "ADMIN", "Q", 3)
    queue.pusher.ok("pause", "ADMIN", "Q")
    assert queue.pusher.error("remove_queue", "ADMIN", "Q") == (66, "Queue Q has elements")
    assert queue.pusher.ok("drain", "BOSS", "Q")["Removed"] == 1
    assert queue.counts() == {"puts": 1, "removes": 1}
    queue.pusher.ok("remove_queue", "ADMIN", "Q")
    assert queue.pop() == queue.reserve() == []
    assert queue.reader.error("sizes", "GET", "Q")[0] == 62
    assert queue.pusher.error("remove_queue", "ADMIN", "Q")[0] == 62
    assert queue.world.owner.query("SELECT count(*) FROM messages.queues") == 0
    # A push makes it as new, and the same key can be used again.
    assert queue.push("y", key="k") > first
    assert queue.counts() == {"puts": 1}
    assert queue.pusher.ok("configure_queue", "ADMIN", "Q") == DEFAULTS
    assert queue.pop(5) == ["y"]
    assert queue.sizes()["Total"] == 0


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("function", ["push", "push_many"])
@pytest.mark.versions
def test_a_push_beside_a_removal_is_not_lost(queue: Queue, world: World, level: str, function: str):
    queue.wait()
    other = world.program("user1")
    body = {"push": "x", "push_many": ["x"]}[function]
    # The push comes first, and is committed after the removal.
    queue.pusher.execute(f"BEGIN ISOLATION LEVEL {level}")
    queue.pusher.ok(function, "PUT", "Q", body)
    other.ok("remove_queue", "ADMIN", "Q")
    queue.pusher.execute("COMMIT")
    assert queue.sizes()["Total"] == 1
    assert queue.pop(5) == ["x"]
    # The transaction of the push is older than the removal, which is committed in between.
    queue.wait()
    queue.pusher.execute(f"BEGIN ISOLATION LEVEL {level}")
    queue.pusher.query("SELECT count(*) FROM messages.errors")
    other.execute("BEGIN")
    other.ok("remove_queue", "ADMIN", "Q")
    queue.pusher.ok(function, "PUT", "Q", body)
    other.execute("COMMIT")
    queue.pusher.ok(function, "PUT", "Q", body)
    queue.pusher.execute("COMMIT")
    assert queue.pop(5) == ["x", "x"]


def test_an_open_removal_delays_no_push_and_no_reader(queue: Queue, world: World):
    queue.wait()
    other = world.program("user1")
    other.execute("BEGIN")
    other.ok("remove_queue", "ADMIN", "Q")
    queue.pusher.execute("SET lock_timeout = '1s'")
    queue.reader.execute("SET lock_timeout = '1s'")
    queue.push("x")
    queue.wait()
    assert queue.pop() == ["x"]
    other.execute("ROLLBACK")
    assert queue.sizes()["Total"] == 0
