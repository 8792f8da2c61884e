"""Benchmark of an idle system: how much WAL nodes, WebSockets and a handler worker cause.

python -m benchmarks.idle [--json FILE]

For ten minutes, 100 nodes, a worker and the 100 WebSockets of Daphne do nothing. Daphne also writes
the monitor's history. PostgreSQL's settings keep it from writing in the background. A quick run
measures nothing, because the history begins after minutes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from time import monotonic

import django
import psycopg

from benchmarks.results import Findings, Options, Row, run
from benchmarks.servers import temporary_server
from benchmarks.websocket_clients import WebSocketClients
from benchmarks.websocket_sites import relay_site
from benchmarks.websocket_users import TOPIC
from project.postgres import Server
from psqlmessages import AsyncNode, Node

NODES, SOCKETS = 100, 100
SECONDS, SETTLE_SECONDS, MAX_SETTLE_SECONDS = 600, 70, 300
SETTINGS = {
    "max_connections": "300", "wal_level": "minimal", "max_wal_senders": "0",
    "autovacuum": "off", "checkpoint_timeout": "1h",
}  # fmt: skip
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT current_user, a.ident, 'Topic', %s, 'R', 60
    FROM unnest('{NODE.*,WORKER}'::text[]) AS a (ident)
"""
POSITION = "SELECT pg_current_wal_insert_lsn() - '0/0'"


def measure(options: Options) -> Findings:
    """Measure the bytes of WAL in ten minutes."""
    if options.is_quick:
        return Findings()
    with temporary_server(SETTINGS) as server, ExitStack() as stack:
        site = stack.enter_context(relay_site(server, SOCKETS))
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(RULES, [TOPIC])
        sockets = stack.enter_context(WebSocketClients())
        sockets.open(site.name, SOCKETS, site.endpoint)
        stack.enter_context(run_worker(server))
        written = asyncio.run(measure_written(server))
    per_hour = written * 3600 / SECONDS
    row = Row.of(
        "idle: WAL",
        f"WAL of {NODES} idle nodes, {SOCKETS} WebSockets and a worker, per hour", "a byte",
        "bytes", [per_hour], [1.0], goal=1.0, is_lower_better=True,
        note=f"extrapolated from {SECONDS // 60} minutes; with the writer of the history",
    )  # fmt: skip
    return Findings([row])


@contextmanager
def run_worker(server: Server) -> Iterator[None]:
    """Run a handler worker in a thread."""
    os.environ |= {"DATABASE_URL": server.url(), "DJANGO_SETTINGS_MODULE": "project.settings"}
    django.setup()
    from psqlmessages.handler_registry import HandlerRegistry
    from psqlmessages.handler_worker import HandlerWorker

    registry = HandlerRegistry()
    registry.on_topic(TOPIC, node="WORKER")(lambda message: None)
    with Node("WORKER", server.url()) as node:
        worker = HandlerWorker(node, registry, using="default")
        worker.listen()
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield
        finally:
            worker.stop()
            thread.join()


async def measure_written(server: Server) -> int:
    """Open the nodes, wait until nothing more is written, and measure."""
    async with AsyncExitStack() as stack:
        for number in range(NODES):
            node = await stack.enter_async_context(AsyncNode(f"NODE.{number}", server.url()))
            await node.topic_listen(TOPIC)
        superuser = await psycopg.AsyncConnection.connect(server.superuser_url(), autocommit=True)
        await stack.enter_async_context(superuser)

        async def position() -> int:
            return int((await (await superuser.execute(POSITION)).fetchone())[0])  # type: ignore[index]

        # The start causes WAL for a while: hint bits, truncated tables, and the history.
        await superuser.execute("VACUUM")
        deadline, before = monotonic() + MAX_SETTLE_SECONDS, -1
        while (now := await position()) != before and monotonic() < deadline:
            before = now
            await asyncio.sleep(SETTLE_SECONDS)
        await asyncio.sleep(SECONDS)
        return await position() - now


if __name__ == "__main__":
    run(measure, __doc__)
