"""A crowd: many WebSockets of one user, what they receive, and one that stops reading."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import psycopg
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.conftest import TestedServer
from tests.web.site import Site

TOPIC, BULK = "CROWD", "CROWD.BULK"
RULES = (
    ("{owner}", "crowd.*", TOPIC + "*", "R"),
    ("{owner}", "sender", TOPIC + "*", "W"),
)
AT_ONCE = 50
BULK_BYTES = 4000


@dataclass
class Figures:
    """What was measured; seconds and bytes."""

    sockets: int = 0
    sessions: int = 0
    memory_before: int = 0
    memory_after: int = 0
    delivered: int = 0
    latencies: list[float] = field(default_factory=list)
    latencies_beside_slow: list[float] = field(default_factory=list)
    code_of_slow: int = 0


class Crowd:
    """The WebSockets of one site, and what each of them receives."""

    def __init__(self, site: Site, cookie: str, dsn: str) -> None:
        self._site = site
        self._cookie = cookie
        self._sender = psycopg.connect(dsn, autocommit=True)
        self._few_at_once = asyncio.Semaphore(AT_ONCE)
        self._stack = AsyncExitStack()
        self._received = 0
        self._arrived = asyncio.Condition()
        self._readers: list[asyncio.Task[None]] = []
        self.latencies: list[float] = []

    async def __aenter__(self) -> Crowd:
        for call in ("init('sender')", f"topic_notify('{TOPIC}')", f"topic_notify('{BULK}')"):
            self._sender.execute(f"SELECT messages.{call}")
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self._stack.aclose()
        self._sender.close()

    async def open(self, ident: str, topic: str, **options: Any) -> ClientConnection:
        """Open a WebSocket, register its node and listen."""
        async with self._few_at_once:
            opening = connect(
                f"{self._site.ws_url}/ws/node/",
                origin=self._site.url,
                additional_headers={"Cookie": f"sessionid={self._cookie}"},
                compression=None,
                proxy=None,
                open_timeout=120,
                **options,
            )
            opened = await self._stack.enter_async_context(opening)
            for request in (
                {"op": "init", "ident": ident, "events": False},
                {"op": "topic_listen", "topic": topic},
            ):
                await opened.send(json.dumps(request))
                answer = json.loads(await opened.recv())
                if answer["Err"] != "0":
                    raise RuntimeError(f"{request}: {answer}")
        return opened

    async def read(self, opened: ClientConnection) -> None:
        """Receive for as long as the crowd is there."""
        self._readers.append(asyncio.create_task(self._read(opened)))

    async def _read(self, opened: ClientConnection) -> None:
        async for text in opened:
            self.latencies.append(time() - float(json.loads(text)["Body"]))
            self._received += 1
            async with self._arrived:
                self._arrived.notify_all()

    async def send(self, messages: int, per_second: float) -> tuple[int, list[float]]:
        """Send at a rate and wait until all have received all: how many, and how late each."""
        self.latencies, self._received = [], 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(messages):
            is_due: asyncio.Future[None] = loop.create_future()
            loop.call_at(began + number / per_second, is_due.set_result, None)
            await is_due
            await self._run("SELECT messages.topic_send(%s, %s)", TOPIC, str(time()))
        async with asyncio.timeout(120), self._arrived:
            await self._arrived.wait_for(lambda: self._received >= messages * len(self._readers))
        return self._received, self.latencies

    async def flood(self, slow: ClientConnection) -> int:
        """Send to one that reads nothing until it is closed: by which code."""
        closing = asyncio.create_task(slow.wait_closed())
        bodies = ["x" * BULK_BYTES] * 20
        for _ in range(1000):
            sql = "SELECT messages.topic_send_many(%s, %s)"
            if (await self._run(sql, BULK, bodies))["Err"] != "0":
                break
        try:
            while True:
                await slow.recv()
        except ConnectionClosed as closed:
            closing.cancel()
            return closed.rcvd.code if closed.rcvd else 0

    async def _run(self, sql: str, *arguments: Any) -> Any:
        row = await asyncio.to_thread(lambda: self._sender.execute(sql, arguments).fetchone())
        return row[0]


async def measure(
    site: Site, server: TestedServer, cookie: str, *, sockets: int, messages: int, per_second: float
) -> Figures:
    """Measure a crowd of WebSockets of one user."""
    figures = Figures(sockets, memory_before=memory_bytes(site))
    async with Crowd(site, cookie, server.url()) as crowd:
        opening = (crowd.open(f"crowd.{number}", TOPIC) for number in range(sockets))
        for opened in await asyncio.gather(*opening):
            await crowd.read(opened)
        with psycopg.connect(server.url()) as owner:
            figures.sessions = owner.execute(
                "SELECT count(DISTINCT session_id) FROM psqlmessages_client"
                " WHERE ident LIKE 'crowd.%'"
            ).fetchone()[0]
        figures.delivered, figures.latencies = await crowd.send(messages, per_second)
        figures.memory_after = memory_bytes(site)
        slow = await crowd.open("crowd.slow", BULK, max_queue=1)
        flooding = asyncio.create_task(crowd.flood(slow))
        _, figures.latencies_beside_slow = await crowd.send(messages, per_second)
        figures.code_of_slow = await flooding
    return figures


def memory_bytes(site: Site) -> int:
    """Read the resident memory of a site's process."""
    pages = int(Path(f"/proc/{site.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def allow(server: TestedServer) -> None:
    """Add the rules of the crowd."""
    with psycopg.connect(server.url()) as owner:
        for role, ident, dest, mode in RULES:
            owner.execute(
                "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
                " VALUES (%s, %s, 'Topic', %s, %s, 60)",
                (role.format(owner=server.server.owner), ident, dest, mode),
            )
