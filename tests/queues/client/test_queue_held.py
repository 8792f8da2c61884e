"""Readers that wait for what a transaction holds, whose end notifies nobody."""

from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest

from psqlmessages import Node
from tests.queues.client.conftest import SOON, listened
from tests.reliability.counts import report
from tests.sql.conftest import World


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
    kind = type(either).__name__
    report(
        "a reader is killed between fetch and commit",
        f"an element that it had popped: time until a waiting {kind} gets it", elements=1, lost=0,
        seconds=round(seconds, 2),
    )  # fmt: skip
