"""Idle nodes, hubs and handler workers write no WAL."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

from psqlmessages import AsyncNode, Node, Options
from psqlmessages.client import calls
from psqlmessages.handler_registry import HandlerRegistry
from psqlmessages.handler_worker import HandlerWorker
from tests.reliability.counts import report, size
from tests.sql.conftest import Program, World
from tests.web.receivers import crowd, opened

# PostgreSQL itself then writes nothing in the background.
SERVER_SETTINGS = {
    "wal_level": "minimal", "max_wal_senders": "0", "autovacuum": "off", "checkpoint_timeout": "1h",
}  # fmt: skip
NODES, SOCKETS = size(20, 100), size(20, 100)
SHORT = Options(
    evaluate_interval=timedelta(milliseconds=100), probe_interval=timedelta(milliseconds=200)
)
RULES = "user1 N* Topic T RW 60", "user1 A* Topic T RW 60", "user1 WORKER Topic T R 60"


@pytest.fixture
def made(monkeypatch) -> Counter[str]:
    """Counts the periodic calls of nodes and hubs."""
    made: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            made[name] += 1
            return call(*arguments)

        return counted

    for name in ("evaluate", "probe", "probe_by_notify"):
        monkeypatch.setattr(calls, name, counting(name, getattr(calls, name)))
    return made


def written(superuser: Program) -> int:
    return int(superuser.query("SELECT pg_current_wal_insert_lsn() - '0/0'"))


async def idle(made: Counter[str], name: str, times: int) -> None:
    """Let the nodes make `times` periodic calls each, on average: their calls measure the time."""
    at_end = made[name] + times * NODES
    while made[name] < at_end:  # noqa: ASYNC110 - sessions have no event for it
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (SHORT, 0),
        pytest.param(Options(), 600, marks=pytest.mark.nightly),  # ten minutes
    ],
)
@pytest.mark.timeout(900)
def test_no_wal_while_idle(own_world: World, made: Counter[str], options: Options, seconds: int):
    own_world.rules(*RULES)
    superuser = own_world.superuser()
    url = own_world.server.url("user1")
    registry = HandlerRegistry()
    registry.on_topic("T", node="WORKER")(lambda message: None)

    async def bytes_written() -> int:
        async with AsyncExitStack() as stack, asyncio.timeout(seconds + 180):
            for place in range(NODES):
                node = await stack.enter_async_context(AsyncNode(f"N{place}", url, options=options))
                await node.topic_notify("T")
            hub = await stack.enter_async_context(opened(url, options))
            await crowd(hub, SOCKETS, "T")
            await idle(made, "probe", 1)
            # Hint bits and truncated tables write WAL for a while after the start.
            superuser.execute("VACUUM")
            before = -1
            while (now := written(superuser)) != before:
                before = now
                await idle(made, "evaluate", 20)
            await idle(made, "probe", max(5, int(seconds / options.probe_interval.total_seconds())))
            return written(superuser) - before

    with Node("WORKER", url, options=options) as node:
        worker = HandlerWorker(node, registry, using="default")
        worker.listen()
        running = threading.Thread(target=worker.run)
        running.start()
        try:
            found = asyncio.run(bytes_written())
        finally:
            worker.stop()
            running.join()
    report("idle nodes", f"WAL written by {NODES} nodes, a hub and a handler worker", bytes=found)
    assert found == 0
