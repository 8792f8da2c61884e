"""Readers that wait: woken at once, in their order, and ended at once; threads share a node."""

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import pytest

from psqlmessages import Node
from psqlmessages.exceptions import DestinationNotAuthorized, NodeClosed
from tests.client.nodes import end_backend
from tests.client.programs import PROMPTLY
from tests.queues.client.conftest import SOON, listened
from tests.reliability.counts import report
from tests.sql.conftest import World


def bodies(node: Any, count: int = 1) -> list[object]:
    return [element.body for element in node.pop("Q", count, timeout=SOON)]


@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize("take", ["pop", "reserve"])
def test_a_push_wakes_without_polling(queues: World, writer: Node, either: Any, take: str):
    with ThreadPoolExecutor() as pool:
        for body in range(3):
            waiting = pool.submit(getattr(either, take), "Q", timeout=SOON)
            listened(queues)
            assert not wait([waiting], timeout=0.1).done
            writer.push("Q", body)
            (element,) = waiting.result(SOON.total_seconds())
            assert (element.body, element.queue) == (body, "Q")
            assert bool(element.lease) == (take == "reserve")
        # Two pushes a moment apart are both received.
        for _ in range(10):
            both = [pool.submit(bodies, either) for _ in range(2)]
            listened(queues)
            writer.push("Q", "first")
            threading.Event().wait(0.01)
            writer.push("Q", "second")
            taken = [each.result(SOON.total_seconds()) for each in both]
            assert sorted(map(str, taken)) == ["['first']", "['second']"]


@pytest.mark.usefixtures("no_polling")
def test_mature_elements_come_without_polling(queues: World, writer: Node, reader: Node):
    began = datetime.now(UTC)
    second = timedelta(seconds=1)
    writer.push("Q", "later", mature=began + second)
    writer.push("Q", "late", mature=began + second / 2)
    assert (bodies(reader), bodies(reader)) == (["late"], ["later"])
    assert datetime.now(UTC) >= began + second
    writer.push("Q", "x")
    reader.reserve("Q", 1, second / 2)
    (element,) = reader.reserve("Q", timeout=SOON)
    assert (element.body, element.tries) == ("x", 1)
    reader.commit(element)
    # Pushed while one waits: it is known when to look next.
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bodies, reader)
        listened(queues)
        writer.push("Q", "late", delay=timedelta(seconds=0.5))
        assert waiting.result(SOON.total_seconds()) == ["late"]


def test_changes_without_a_notification_are_found_by_polling(queues: World, reader: Node):
    """A transaction that has pushed before anybody waited notifies nobody."""
    early = queues.program("user1")
    early.ok("push", "WRITER", "Q", "makes the queue")
    assert reader.drain("Q") == 1
    early.connection.execute("BEGIN")
    early.ok("push", "WRITER", "Q", "early")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bodies, reader)
        listened(queues)
        assert not wait([waiting], timeout=0.3).done
        early.connection.execute("COMMIT")
        assert waiting.result(SOON.total_seconds()) == ["early"]


def test_an_open_creation_of_the_queue_does_not_block_the_node(queues: World, reader: Node):
    maker = queues.program("user1")
    maker.connection.execute("BEGIN")
    maker.ok("push", "WRITER", "Q", "x")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bodies, reader)
        began, popped = monotonic(), 0
        while monotonic() - began < 1:
            called_at = monotonic()
            assert reader.pop("Q.1") == []
            popped += 1
            assert monotonic() - called_at < PROMPTLY
        assert not waiting.done()
        assert reader.counters.calls - popped < 100
        maker.connection.execute("COMMIT")
        assert waiting.result(SOON.total_seconds()) == ["x"]


@pytest.mark.parametrize(("end", "take"), [("stop", "reserve"), ("close", "pop")])
def test_stop_ends_all_waits(queues: World, writer: Node, either: Any, end: str, take: str):
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(getattr(either, take), "Q", timeout=timedelta.max) for _ in range(5)]
        listened(queues)
        began = monotonic()
        getattr(either, end)()
        for each in waiting:
            with pytest.raises(NodeClosed):
                each.result(SOON.total_seconds())
        assert monotonic() - began < PROMPTLY
    writer.push("Q", "x")
    assert queues.program("user2").elements("pop", "READER", "Q")[0].body == "x"


def test_a_stopped_node_takes_available_elements_without_waiting(writer: Node, reader: Node):
    writer.push("Q", "x")
    reader.stop()
    assert reader.pop("Q", timeout=SOON)[0].body == "x"
    with pytest.raises(NodeClosed, match="was stopped while it waited"):
        reader.pop("Q", timeout=SOON)
    assert reader.pop("Q") == []


@pytest.mark.usefixtures("no_polling")
def test_a_killed_sessions_elements_come_soon(queues: World, writer: Node, either: Any):
    writer.push("Q", "x")
    holder = queues.program("user2")
    holder.execute("BEGIN")
    assert [row.body for row in holder.elements("pop", "READER", "Q")] == ["x"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(either.reserve, "Q", timeout=SOON)
        listened(queues)
        queues.kill(holder)
        killed_at = monotonic()
        assert [element.body for element in waiting.result(SOON.total_seconds())] == ["x"]
        seconds = monotonic() - killed_at
    kind = "Node" if isinstance(either, Node) else "AsyncNode"
    report(
        "a reader is killed between fetch and commit",
        f"an element that it had popped: time until a waiting {kind} gets it", elements=1, lost=0,
        seconds=round(seconds, 2),
    )  # fmt: skip


@pytest.mark.usefixtures("no_polling")
def test_a_lost_right_ends_that_wait_alone(queues: World, writer: Node, reader: Node):
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(bodies, reader) for _ in range(3)]
        listened(queues)
        queues.execute("DELETE FROM messages.auth WHERE ident = 'READER.*'")
        listened(queues)
        writer.push("Q", "x")
        (done,), waiting = wait(waiting, SOON.total_seconds(), FIRST_COMPLETED)
        assert done.result() == ["x"]
        listened(queues)
        queues.execute("DELETE FROM messages.auth WHERE ident = 'READER' AND dest = 'Q'")
        for each in waiting:
            with pytest.raises(DestinationNotAuthorized):
                each.result(SOON.total_seconds())


@pytest.mark.usefixtures("no_polling")
def test_a_wait_goes_on_after_a_lost_connection(queues: World, writer: Node, reader: Node):
    with ThreadPoolExecutor() as pool:
        for body in range(2):
            waiting = [pool.submit(bodies, reader) for _ in range(2)]
            listened(queues)
            assert not wait(waiting, timeout=0.1).done
            end_backend(queues, "READER")
            writer.push("Q", body)
            found, left = wait(waiting, SOON.total_seconds(), FIRST_COMPLETED)
            # The node has reconnected; the other call waits until a push notifies it.
            assert not wait(left, timeout=0.3).done
            writer.push("Q", body)
            assert [each.result(SOON.total_seconds()) for each in (*found, *left)] == [[body]] * 2
    assert reader.counters.reconnects >= 1
