"""PostgreSQL restarts under twenty nodes: each comes back as it was, once, and says little."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import ceil
from pathlib import Path
from time import monotonic

import psycopg
import pytest

from project.postgres import Server
from psqlmessages import AsyncNode, Message, Node, Options
from tests.own_server import own_server
from tests.servers import SERVER

ROOT = Path(__file__).parents[2]
SYNC = [f"SYNC.{number}" for number in range(10)]
ASYNC = [f"ASYNC.{number}" for number in range(10)]
LONG = timedelta(minutes=3)
# Twenty connections at once may keep a slow machine busy for longer than a probe takes by itself.
PATIENT = Options(probe_timeout=LONG)


RULES = (
    "('psqlmessages', 'SYNC.*', 'Topic', 'T', 'RW', 5),"
    " ('psqlmessages', 'ASYNC.*', 'Topic', 'T', 'RW', 5)"
)


@pytest.fixture
def restarted(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[Server]:
    """A server of its own, migrated, with rules for the nodes."""
    with own_server(tmp_path, pytestconfig.stash[SERVER].binaries, rules=RULES) as own:
        yield own.server


def heard(message: Message, seen: list[str]) -> bool:
    """Note what a node hears of itself; whether it has heard all it should."""
    if message.event == "reconnected":
        seen.append("reconnected")
    elif message.type == "Topic" and message.body == "last":
        return True
    return False


def sync_node(node: Node, seen: list[str]) -> None:
    for message in node.messages(timeout=LONG):
        if heard(message, seen):
            return


async def async_nodes(url: str, seen: dict[str, list[str]]) -> None:
    async def one(ident: str) -> None:
        async with AsyncNode(ident, url, options=PATIENT) as node:
            await node.topic_listen("T")
            await node.topic_notify("T")
            async for message in node.messages(timeout=LONG):
                if heard(message, seen[ident]):
                    return

    await asyncio.gather(*(one(ident) for ident in ASYNC))


def listeners(server: Server) -> list[str]:
    with psycopg.connect(server.url(), autocommit=True) as owner:
        row = owner.execute(
            "SELECT listeners FROM messages.topics WHERE topic = 'T' AND listeners = notifiers"
        ).fetchone()
    return row[0] if row else []


def wait_for_all(server: Server) -> float:
    """Wait until all nodes are registered, listening and notifying; the seconds it took."""
    began = monotonic()
    while len(listeners(server)) < len(SYNC + ASYNC):
        assert monotonic() - began < LONG.total_seconds(), listeners(server)
    return monotonic() - began


@pytest.mark.timeout(600)
# The other is nightly, as each has a server of its own.
@pytest.mark.parametrize("how", [pytest.param("fast", marks=pytest.mark.nightly), "immediate"])
def test_twenty_nodes_come_back_once_each_and_the_log_stays_short(
    restarted: Server, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.INFO, "psqlmessages")
    seen: dict[str, list[str]] = {ident: [] for ident in SYNC + ASYNC}
    url = restarted.url()
    nodes = [Node(ident, url, options=PATIENT) for ident in SYNC]
    with ThreadPoolExecutor(len(SYNC) + 1) as pool:
        for node in nodes:
            node.open()
            node.topic_listen("T")
            node.topic_notify("T")
        waits = [pool.submit(sync_node, node, seen[node.ident]) for node in nodes]
        waits.append(pool.submit(lambda: asyncio.run(async_nodes(url, seen))))
        wait_for_all(restarted)
        stopped_at = monotonic()
        restarted.stop(how)
        restarted.start()
        seconds = wait_for_all(restarted)
        nodes[0].topic_send("T", "last")
        for wait in waits:
            wait.result()
        for node in nodes:
            node.close()
    print(f"\n20 nodes were back {seconds:.1f} s after the server ({how})")
    assert seen == {ident: ["reconnected"] for ident in SYNC + ASYNC}
    # That it is lost and that it is back, and every ten seconds that there is nothing yet.
    tens = ceil((monotonic() - stopped_at) / 10)
    assert len(caplog.records) <= (2 + tens) * len(seen), caplog.text
