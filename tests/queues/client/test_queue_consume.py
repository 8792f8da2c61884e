"""Consumers: an element is committed when the loop comes back, and rolled back if it is left."""

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from psqlmessages import Node
from psqlmessages.client import queue_consumer
from tests.queues.client.conftest import HOURS, NOW, SOON, listened, state
from tests.sql.conftest import World


def test_a_turn_of_the_loop_commits_an_element(queues: World, writer: Node, either: Any):
    writer.push_many("Q", ["a", "b", "c"])
    seen = []
    for element in either.consume("Q", idle=NOW):
        seen.append(element.body)
        assert len(state(queues)) == 4 - len(seen)
    assert (seen, state(queues)) == (["a", "b", "c"], [])


@pytest.mark.usefixtures("no_polling")
def test_it_waits_until_the_node_is_stopped(queues: World, writer: Node, either: Any):
    seen: list[object] = []

    def work() -> None:
        for element in either.consume("Q", duration=timedelta(seconds=30)):
            seen.append(element.body)
            if element.body == "last":
                either.stop()

    with ThreadPoolExecutor() as pool:
        working = pool.submit(work)
        listened(queues)
        writer.push("Q", "first")
        writer.push_many("Q", ["last", "left"])
        working.result(SOON.total_seconds())
    assert (seen, state(queues)) == (["first", "last"], [("left", 0, False)])


def test_an_exception_rolls_back_with_more_delay(queues: World, writer: Node, either: Any):
    def fail(batch: int) -> None:
        for element in either.consume("Q", idle=NOW, batch=batch):
            if element.body == "b":
                raise ZeroDivisionError

    mature = "SELECT extract(epoch FROM mature_at - %s) FROM psqlmessages_element WHERE body = 'b'"
    writer.push_many("Q", ["a", "b", "c", "d"])
    for tries, seconds in ((1, 1), (2, 2), (3, 4), (10, 300)):
        if tries > 1:
            queues.execute("DELETE FROM messages._scan_start")
            queues.execute(
                "UPDATE psqlmessages_element SET tries = %s, mature_at = 'epoch',"
                " available_at = 'epoch' WHERE body = 'b'", (tries - 1,),
            )  # fmt: skip
        before = queues.owner.query("SELECT clock_timestamp()")
        with pytest.raises(ZeroDivisionError):
            fail(3 if tries == 1 else 1)
        either.evaluate()  # An AsyncNode settles what was left before its next call.
        took = queues.owner.query("SELECT extract(epoch FROM clock_timestamp() - %s)", before)
        assert state(queues) == [("b", tries, False), ("c", 0, False), ("d", 0, False)]
        assert seconds <= queues.owner.query(mature, before) <= seconds + took


def test_elements_acknowledged_in_the_loop_are_left(queues: World, writer: Node, reader: Node):
    writer.push_many("Q", ["first", "second", "commit", "rollback", "release", "lease"])
    act = {"commit": reader.commit, "rollback": reader.rollback, "release": reader.release}
    seen = []
    # Nothing is committed before the batch is done.
    for element in reader.consume("Q", batch=6, idle=NOW, group=SOON, duration=HOURS):
        seen.append(element)
        if element.body in act:
            assert act[element.body](element)
        if element.body == "lease":
            assert reader.commit(seen[0])
            assert reader.rollback(seen[1], delay=HOURS)
            break
    assert reader.counters.lost_leases == 0
    found = [row[:2] for row in state(queues)]
    assert found == [("second", 1), ("rollback", 1), ("release", 0), ("lease", 1)]


def test_lost_leases_are_reported(queues: World, writer: Node, reader: Node, caplog, monkeypatch):
    writer.push_many("Q", ["a", "b", "c"])
    seen = []
    for element in reader.consume("Q", batch=3, idle=NOW):
        seen.append((element.body, element.tries))
        if len(seen) == 1:
            # While it was handled, two minutes went by, and others took it.
            now = queue_consumer.monotonic()
            monkeypatch.setattr(queue_consumer, "monotonic", lambda now=now: now + 121)
            queues.execute("UPDATE psqlmessages_element SET available_at = now()")
            assert queues.program("user2").elements("pop", "READER", "Q")[0].body == "a"
    assert seen == [("a", 0), ("b", 1), ("c", 1)]
    assert reader.counters.lost_leases == 3
    assert "leases of queue Q had expired" in caplog.text
    assert state(queues) == []


def test_a_failed_release_is_reported(queues: World, writer: Node, reader: Node, caplog):
    writer.push_many("Q", ["a", "b"])

    def work() -> None:
        for _ in reader.consume("Q", batch=2):
            queues.execute("UPDATE messages.auth SET mode = 'W'")
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
        work()
    said = "could not commit or give back elements of queue Q; they return when their leases expire"
    assert said in caplog.text
    assert state(queues) == [("a", 0, True), ("b", 0, True)]
