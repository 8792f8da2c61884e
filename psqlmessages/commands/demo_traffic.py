"""Live traffic of the demonstration: a shop, a warehouse, a ticker and a board."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Coroutine
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import psycopg

from psqlmessages.client.async_node import AsyncNode
from psqlmessages.client.messages import Message
from psqlmessages.client.options import conninfo
from psqlmessages.commands import status
from psqlmessages.commands.output import one_line
from psqlmessages.exceptions import MessagesError

_REFRESH_SECONDS: Final = 1.0
_PLAIN_SECONDS: Final = 10.0
_ARTICLES: Final = ("apple", "pear", "plum", "quince")


class Traffic:
    """A few nodes that send to each other, and what they have seen."""

    def __init__(self, dsn1: str, dsn2: str) -> None:
        self.shop = AsyncNode("DEMO.SHOP", dsn1)
        self.ticker = AsyncNode("DEMO.TICKER", dsn1)
        self.warehouse = AsyncNode("DEMO.WAREHOUSE", dsn2)
        self.board = AsyncNode("DEMO.BOARD", dsn2)
        self.received: Counter[str] = Counter()
        self.answers = 0
        self.failures = 0
        self._orders = 0

    async def run(self) -> None:
        """Send and receive until cancelled."""
        async with self.warehouse, self.board, self.shop, self.ticker:
            await self._register()
            await _together(
                self.warehouse.run(),
                self.board.run(),
                self._repeat(self._sell, 0.05, 0.4),
                self._repeat(self._tick, 0.02, 0.1),
            )

    async def _register(self) -> None:
        for topic in ("DEMO.ORDERS", "DEMO.PRICES", "DEMO.STOCK"):
            self.board.on_topic(topic)(self._count)
        self.warehouse.on_topic("DEMO.ORDERS")(self._ship)
        self.warehouse.on_rpc(lambda message: {"left": len(str(message.body)) * 7})
        await self.warehouse.topic_notify("DEMO.STOCK")
        # The topics have their listeners before anything is sent to them.
        for node, topics in (
            (self.board, ("DEMO.ORDERS", "DEMO.PRICES", "DEMO.STOCK")),
            (self.warehouse, ("DEMO.ORDERS",)),
        ):
            for topic in topics:
                await node.topic_listen(topic)
        await self.shop.topic_notify("DEMO.ORDERS")
        await self.ticker.topic_notify("DEMO.PRICES")

    async def _repeat(self, act: Any, least: float, most: float) -> None:
        while True:
            try:
                await act()
            except (MessagesError, psycopg.Error):
                # A rule was taken away, or the server is restarting: the nodes come back.
                self.failures += 1
                await asyncio.sleep(1)
            await asyncio.sleep(random.uniform(least, most))  # noqa: S311 - nothing secret

    async def _sell(self) -> None:
        self._orders += 1
        article = random.choice(_ARTICLES)  # noqa: S311 - nothing secret
        note = "a long note; " * 1500 if self._orders % 25 == 0 else ""
        order = {"id": self._orders, "article": article, "note": note}
        await self.shop.topic_send("DEMO.ORDERS", order)
        if self._orders % 5 == 0:
            await self.shop.call("DEMO.WAREHOUSE", article, timeout=timedelta(seconds=2))
            self.answers += 1

    async def _tick(self) -> None:
        price = {"article": random.choice(_ARTICLES), "cents": random.randint(90, 110)}  # noqa: S311
        await self.ticker.topic_send("DEMO.PRICES", price)

    async def _ship(self, message: Message) -> None:
        await self.warehouse.topic_send("DEMO.STOCK", {"shipped": message.body["id"]})

    def _count(self, message: Message) -> None:
        self.received[message.topic] += 1


def run(dsn: str, dsn1: str, dsn2: str) -> None:
    """Send and receive until Ctrl-C, which is the usual end; show the status meanwhile."""
    try:
        asyncio.run(_run(dsn, Traffic(dsn1, dsn2)))
    except KeyboardInterrupt:
        print("\nThe demonstration has ended.")


async def _run(dsn: str, traffic: Traffic) -> None:
    print("\nLive traffic follows; Ctrl-C ends it.\n", flush=True)
    await _together(traffic.run(), _show(dsn, traffic))


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one fails or all are cancelled; unlike gather, wait until each has ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _show(dsn: str, traffic: Traffic) -> None:
    is_terminal = sys.stdout.isatty()
    seconds = _REFRESH_SECONDS if is_terminal else _PLAIN_SECONDS
    before, shown_lines, at = 0, 0, monotonic()
    while True:
        await asyncio.sleep(seconds)
        total, now = traffic.received.total(), monotonic()
        rate = (total - before) / (now - at)
        before, at = total, now
        line = (
            f"{total:,} messages received, {rate:,.0f}/s; {traffic.answers:,} calls answered;"
            f" {traffic.failures:,} failed"
        )
        if not is_terminal:
            print(line, flush=True)
            continue
        text = f"{await asyncio.to_thread(_describe, dsn)}\n{line}"
        # Over what was shown before: up by so many lines, and clear to the end of the screen.
        print(f"\x1b[{shown_lines}F\x1b[J" if shown_lines else "", text, sep="", flush=True)
        shown_lines = text.count("\n") + 1


def _describe(dsn: str) -> str:
    try:
        with psycopg.connect(conninfo(dsn, "status"), autocommit=True) as connection:
            topics = status.read_topics(connection)
            usage = status.queue_usage(connection)
    except (MessagesError, psycopg.Error) as error:
        return one_line(f"no status: {error}")
    return status.describe([row for row in topics if row.topic.startswith("DEMO.")], usage)
