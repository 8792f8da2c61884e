"""Leases: many of them are settled in one call, all or none where the call is wrong."""

from tests.queues.conftest import Desk


def test_one_malformed_lease_among_others_settles_none_of_them(desk: Desk) -> None:
    desk.push("a", "b")
    leases = [row.lease for row in desk.reserve(2)]
    assert desk.reader.error("commit", "GET", *leases, f"{leases[0]}0")[0] == 63
    assert desk.done("commit", *leases) == [True, True]


def test_a_queue_without_the_right_among_others_settles_none_of_them(desk: Desk) -> None:
    desk.push("a")
    desk.push("b", queue="NEW.1")
    leases = [desk.lease(), desk.lease(queue="NEW.1")]
    desk.world.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'NEW.*'")
    assert desk.reader.error("commit", "GET", *leases)[0] == 2
    assert desk.sizes()["Reserved"] == 1
    assert desk.done("commit", leases[0]) == [True]


def test_leases_of_several_queues_are_committed_and_counted_each(desk: Desk) -> None:
    desk.push("a", "b")
    desk.push("c", queue="NEW.1")
    leases = [row.lease for row in (*desk.reserve(2), *desk.reserve(queue="NEW.1"))]
    assert desk.done("commit", *leases, leases[0]) == [True] * 4
    assert (desk.counts()["commits"], desk.counts("NEW.1")["commits"]) == (2, 1)
