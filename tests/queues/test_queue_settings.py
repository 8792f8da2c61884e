"""Settings of a queue, and its removal: by whom, and beside pushes at the same moment."""

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import World

DEFAULTS = {"Err": "0", "MaxTries": 0, "DeadLetterQueue": "__deadletter__", "KeyTimeout": 86400}


def test_settings_change_one_by_one_and_zero_means_no_maximum(desk: Desk):
    desk.world.rules("user1 ADMIN Queue DEAD W 1")
    changes = (
        ((3,), {"MaxTries": 3}), ((None, "DEAD"), {"DeadLetterQueue": "DEAD"}),
        ((None, None, 60), {"KeyTimeout": 60}), ((), {}), ((0,), {"MaxTries": 0}),
    )  # fmt: skip
    expected = DEFAULTS
    for given, change in changes:
        expected = expected | change
        assert desk.pusher.ok("configure_queue", "ADMIN", "Q", *given) == expected
    row = "SELECT (max_tries, dead_letter_queue, key_timeout)::text FROM messages.queues"
    assert desk.world.owner.query(row) == "(,DEAD,60)"


def test_settings_send_no_elements_to_a_queue_that_the_node_may_not_push_to(desk: Desk):
    desk.push("x")
    for queue, number in ("OTHER", 2), ("", 1), ("Q*", 62), ("x" * 101, 54):
        refused = desk.pusher.error("configure_queue", "ADMIN", "Q", 1, queue)
        assert refused[0] == number, queue
    assert desk.pusher.ok("configure_queue", "ADMIN", "Q") == DEFAULTS


def test_mode_a_allows_what_rw_does(desk: Desk):
    desk.pusher.ok("push", "ADMIN", "Q", "x")
    desk.pusher.ok("pause", "ADMIN", "Q")
    desk.pusher.ok("resume", "ADMIN", "Q")
    assert desk.pusher.query("SELECT queue FROM messages.queues") == "Q"
    assert desk.pusher.query("SELECT body FROM messages.pop('ADMIN', 'Q')") == "x"
    # And RW does not allow what A does.
    for function in ("configure_queue", "remove_queue"):
        assert desk.pusher.error(function, "BOSS", "Q") == (3, "cannot auth A with Queue Q")


def test_chosen_elements_are_removed_or_moved_unless_they_are_reserved(desk: Desk):
    desk.world.rules("user1 ADMIN Queue DEAD W 1", "user2 GET Queue DEAD R 1")
    reserved, removed, moved = (desk.push(name) for name in ("r", "x", "m"))
    delayed = desk.push("delayed", delay=60.0)
    desk.push("stays")
    desk.lease()
    ids = [reserved, removed, 0]
    assert desk.pusher.ok("remove_elements", "ADMIN", "Q", ids)["Removed"] == 1
    ids = [reserved, removed, moved, delayed]
    assert desk.pusher.ok("move_elements", "ADMIN", "Q", "DEAD", ids)["Moved"] == 2
    assert desk.pusher.ok("remove_elements", "ADMIN", "Q", [moved])["Removed"] == 0
    assert desk.counts() == {"puts": 5, "reserves": 1, "removes": 3}
    assert desk.reader.query("SELECT body FROM messages.pop('GET', 'DEAD', 9)") == "m"
    sizes = desk.reader.ok("sizes", "GET", "DEAD")
    assert (sizes["Total"], sizes["Scheduled"]) == (1, 1)
    assert desk.pop(9) == ["stays"]


def test_removing_a_queue_removes_its_settings_keys_and_counts(desk: Desk):
    first = desk.push("x", key="k")
    desk.pusher.ok("configure_queue", "ADMIN", "Q", 3)
    desk.pusher.ok("pause", "ADMIN", "Q")
    assert desk.pusher.error("remove_queue", "ADMIN", "Q") == (66, "Queue Q has elements")
    assert desk.pusher.ok("drain", "BOSS", "Q")["Removed"] == 1
    assert desk.counts() == {"puts": 1, "removes": 1}
    desk.pusher.ok("remove_queue", "ADMIN", "Q")
    assert desk.pop() == desk.reserve() == []
    assert desk.reader.error("sizes", "GET", "Q")[0] == 62
    assert desk.pusher.error("remove_queue", "ADMIN", "Q")[0] == 62
    assert desk.world.owner.query("SELECT count(*) FROM messages.queues") == 0
    # A push makes it as new, and the same key can be used again.
    assert desk.push("y", key="k") > first
    assert desk.counts() == {"puts": 1}
    assert desk.pusher.ok("configure_queue", "ADMIN", "Q") == DEFAULTS
    assert desk.pop(5) == ["y"]
    assert desk.sizes()["Total"] == 0


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("function", ["push", "push_many"])
@pytest.mark.versions
def test_a_push_beside_a_removal_is_never_lost(desk: Desk, world: World, level: str, function: str):
    desk.wait()
    other = world.program("user1")
    body = {"push": "x", "push_many": ["x"]}[function]
    # The push comes first, and is committed after the removal.
    desk.pusher.execute(f"BEGIN ISOLATION LEVEL {level}")
    desk.pusher.ok(function, "PUT", "Q", body)
    other.ok("remove_queue", "ADMIN", "Q")
    desk.pusher.execute("COMMIT")
    assert desk.sizes()["Total"] == 1
    assert desk.pop(5) == ["x"]
    # The transaction of the push is older than the removal, which is committed in between.
    desk.wait()
    desk.pusher.execute(f"BEGIN ISOLATION LEVEL {level}")
    desk.pusher.query("SELECT count(*) FROM messages.errors")
    other.execute("BEGIN")
    other.ok("remove_queue", "ADMIN", "Q")
    desk.pusher.ok(function, "PUT", "Q", body)
    other.execute("COMMIT")
    desk.pusher.ok(function, "PUT", "Q", body)
    desk.pusher.execute("COMMIT")
    assert desk.pop(5) == ["x", "x"]


def test_an_open_removal_delays_no_push_and_no_reader(desk: Desk, world: World):
    desk.wait()
    other = world.program("user1")
    other.execute("BEGIN")
    other.ok("remove_queue", "ADMIN", "Q")
    desk.pusher.execute("SET lock_timeout = '1s'")
    desk.reader.execute("SET lock_timeout = '1s'")
    desk.push("x")
    desk.wait()
    assert desk.pop() == ["x"]
    other.execute("ROLLBACK")
    assert desk.sizes()["Total"] == 0
