"""Groups: a consumer commits what is done together, and a crash brings little of it again."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from psycopg.errors import DeadlockDetected

from psqlmessages import Element, Node
from psqlmessages.client import async_queue_consumer, queue_consumer
from psqlmessages.client.async_session import AsyncNodeSession
from psqlmessages.client.node_state import NodeCounters
from psqlmessages.client.session import NodeSession
from tests.client.nodes import end_backend
from tests.client.programs import PROMPTLY
from tests.conftest import TestedServer
from tests.django.processes import run_python
from tests.queues.client.conftest import HOURS, NOW, SOON, state
from tests.sql.conftest import World

Handle = Callable[[Element], bool | None]
Consume = Callable[..., NodeCounters]
WHOLE_BATCH: dict[str, Any] = {"group": SOON, "duration": HOURS}
TWENTY_MS_EACH = """
import os, sys
from time import monotonic
from psqlmessages import Node

with Node("READER", sys.argv[1]) as node:
    for element in node.consume("Q", batch=1000):
        begun_at = monotonic()
        print(element.body, begun_at, flush=True)
        if element.body == 100:
            os._exit(9)
        while monotonic() < begun_at + 0.02:
            pass
"""


def bodies(queues: World) -> list[str]:
    return [body for body, _, _ in state(queues)]


@pytest.fixture
def consume(either: Any) -> Consume:
    """Handle what READER consumes, until `handle` says to break."""

    def run(handle: Handle, **options: Any) -> NodeCounters:
        for element in either.consume("Q", idle=NOW, **options):
            if handle(element):
                break
        either.evaluate()  # An AsyncNode settles what was left before its next call.
        counters: NodeCounters = either.counters
        return counters

    return run


@pytest.mark.parametrize(
    ("seconds", "options", "numbers"), [
        ([0, 0, 0, 0], {}, [4, 4, 4, 4]), ([0, 0, 0, 0], {"batch": 2}, [4, 4, 2, 2]),
        ([0.06] * 4, {}, [4, 4, 2, 2]), ([0.1] * 4, {}, [4, 3, 2, 1]),
        ([0, 0, 0, 0], {"group": NOW}, [4, 3, 2, 1]),
        ([0.6] * 4, {"group": HOURS, "duration": timedelta(seconds=10)}, [4, 4, 2, 2]),
        ([9.2, 0, 0, 0], {"group": SOON, "duration": timedelta(seconds=10)}, [4, 3, 2, 1]),
    ],
    ids=["batch", "two batches", "quick", "slow", "no group", "tenth of a lease", "end of a lease"],
)  # fmt: skip
def test_finished_work_is_committed_in_groups(
    queues: World, writer: Node, consume: Consume, monkeypatch,
    seconds: list[float], options: dict[str, Any], numbers: list[int],
):  # fmt: skip
    clock = [1000.0]
    monkeypatch.setattr(queue_consumer, "monotonic", lambda: clock[0])
    writer.push_many("Q", ["a", "b", "c", "d"])
    seen = []

    def handle(element: Element) -> None:
        seen.append(len(bodies(queues)))
        clock[0] += seconds[len(seen) - 1]

    consume(handle, **{"batch": 4, **options})
    assert seen == numbers
    assert bodies(queues) == []


@pytest.mark.parametrize("leaves", [False, True])
def test_reconnects_lose_none(queues: World, writer: Node, consume: Consume, leaves: bool):
    writer.push_many("Q", ["a", "b", "c"])

    def handle(element: Element) -> bool:
        if element.body == "c":
            end_backend(queues, "READER")
        return leaves and element.body == "c"

    assert consume(handle, batch=3, **WHOLE_BATCH).lost_leases == 0
    assert bodies(queues) == (["c"] if leaves else [])


@pytest.mark.parametrize("leaves", [False, True])
def test_a_lease_lost_before_a_retry_counts(
    queues: World, writer: Node, either: Any, consume: Consume, monkeypatch, leaves: bool
):
    writer.push_many("Q", ["a", "b"])
    failed = []

    def fails(call: Any) -> bool:
        if "messages.commit" not in getattr(call, "sql", "") or failed:
            return False
        failed.append(call)
        queues.execute("DELETE FROM psqlmessages_element WHERE body = 'a'")
        return True

    run, submit = NodeSession.run, AsyncNodeSession.submit

    def run_or_fail(session: NodeSession, call: Any) -> Any:
        if fails(call):
            raise DeadlockDetected
        return run(session, call)

    def submit_or_fail(session: AsyncNodeSession, call: Any) -> Any:
        if not fails(call):
            return submit(session, call)
        future = asyncio.get_running_loop().create_future()
        future.set_exception(DeadlockDetected())
        return future

    for module in (queue_consumer, async_queue_consumer):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(NodeSession, "run", run_or_fail)
    monkeypatch.setattr(AsyncNodeSession, "submit", submit_or_fail)
    counters = consume(lambda element: leaves and element.body == "b", batch=2, **WHOLE_BATCH)
    deadline = monotonic() + PROMPTLY
    while counters.lost_leases == 0 and monotonic() < deadline:
        either.evaluate()
    assert counters.lost_leases == 1
    assert bodies(queues) == (["b"] if leaves else [])


def test_a_crash_brings_little_again(queues: World, writer: Node, server: TestedServer):
    writer.push_many("Q", range(1, 151))
    died = run_python("-c", TWENTY_MS_EACH, server.url("user2"))
    assert died.returncode == 9, died.stderr
    begun_at = {int(body): float(time) for body, time in map(str.split, died.stdout.splitlines())}
    assert set(begun_at) == set(range(1, 101))
    again = [int(body) for body in bodies(queues)]
    assert again == list(range(again[0], 151))
    assert 1 < again[0] <= 100
    # 100 ms, and what a busy machine adds to it; all that was done took two seconds.
    assert begun_at[100] - begun_at[again[0]] < 1
