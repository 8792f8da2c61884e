"""Removing a queue: the owner's alone, with all it has, and with respect for those who use it."""

import threading

import psycopg
import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import PATIENCE_SECONDS, World


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
    thread.join(PATIENCE_SECONDS)
    assert desk.pop(5) == ["b"]
