"""Live traffic of the demo: a shop, a warehouse, a ticker and a board."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import psycopg

from psqlmessages.cli import status
from psqlmessages.cli.direct_calls import connect_as
from psqlmessages.cli.output import one_line
from psqlmessages.client.async_node import AsyncNode
from psqlmessages.client.messages import RECONNECTED, Message
from psqlmessages.exceptions import MessagesError

_RETRY_SECONDS: Final = 0.5

Handler = Callable[[Message], Any]


class Actor:
    """A node that connects and registers again after changes of its rules and server restarts.

    ``node`` is the current node, or the last one while the actor is disconnected.
    """

    def __init__(
        self,
        ident: str,
        dsn: str,
        *,
        listens: Iterable[str] = (),
        sends: Iterable[str] = (),
        on_topic: Handler | None = None,
        on_rpc: Handler | None = None,
    ) -> None:
        self.ident = ident
        self.is_registered = asyncio.Event()
        self._dsn = dsn
        self._wanted = frozenset(
            [("topic_listen", topic) for topic in listens]
            + [("topic_notify", topic) for topic in sends]
        )
        self._missing: set[tuple[str, str]] = set()
        self._is_disconnected = False
        self._on_topic, self._on_rpc = on_topic, on_rpc
        self.node = self._create_node()

    async def run(self) -> None:
        """Keep the node connected until cancelled; after an error, retry twice a second."""
        while True:
            self.node, self._is_disconnected = self._create_node(), False
            try:
                async with self.node:
                    self._missing = set(self._wanted)
                    await run_all(self.node.run(), self._register())
            except (MessagesError, psycopg.Error):
                self.is_registered.clear()
            await asyncio.sleep(_RETRY_SECONDS)

    def _create_node(self) -> AsyncNode:
        node = AsyncNode(self.ident, self._dsn)
        node.on_event("topic_unlisten", "topic_unnotify", "disconnect", RECONNECTED)(self._on_event)
        if self._on_topic is not None:
            # With a pattern, `node.run` listens to no topics: `_register` does this.
            node.on_topic("*")(self._on_topic)
        if self._on_rpc is not None:
            node.on_rpc(self._on_rpc)
        return node

    async def _register(self) -> None:
        """Register for the wanted topics; retry while a rule is missing."""
        while not self._is_disconnected:
            # Sorted, because sessions that lock topics in different orders could deadlock.
            for function, topic in sorted(self._missing, key=lambda registration: registration[1]):
                try:
                    await getattr(self.node, function)(topic)
                except MessagesError:
                    continue
                self._missing.discard((function, topic))
            if not self._missing:
                self.is_registered.set()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _on_event(self, event: Message) -> None:
        if event.event == RECONNECTED:
            # The node does not retry registrations that failed after the reconnect.
            self._missing = set(self._wanted)
        elif event.ident != self.ident:
            return
        elif event.event == "disconnect":
            self._is_disconnected = True
            self.is_registered.clear()
            self.node.stop()
        else:
            function = "topic_listen" if event.event == "topic_unlisten" else "topic_notify"
            if (function, event.topic) in self._wanted:
                self._missing.add((function, event.topic))


async def run_all(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines. If one fails, cancel the other ones and raise its error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


_TERMINAL_INTERVAL_SECONDS: Final = 1.0
_FILE_INTERVAL_SECONDS: Final = 10.0
# The line that is printed when the traffic starts begins with this text. Other programs may wait
# for this line.
STARTED_TEXT: Final = "Live traffic follows"
_ARTICLES: Final = ("apple", "pear", "plum", "quince")


class DemoTraffic:
    """Nodes that send to each other, and counters of their messages."""

    def __init__(self, dsn1: str, dsn2: str) -> None:
        self.shop = Actor("DEMO.SHOP", dsn1, sends=["DEMO.ORDERS"])
        self.ticker = Actor("DEMO.TICKER", dsn1, sends=["DEMO.PRICES"])
        self.warehouse = Actor(
            "DEMO.WAREHOUSE",
            dsn2,
            listens=["DEMO.ORDERS"],
            sends=["DEMO.STOCK"],
            on_topic=self._ship,
            on_rpc=lambda message: {"left": len(str(message.body)) * 7},
        )
        topics = ["DEMO.ORDERS", "DEMO.PRICES", "DEMO.STOCK"]
        self.board = Actor("DEMO.BOARD", dsn2, listens=topics, on_topic=self._count)
        self._actors = (self.warehouse, self.board, self.shop, self.ticker)
        self.received: Counter[str] = Counter()
        self.answers = 0
        self.failures = 0
        self._orders = 0

    async def run(self) -> None:
        """Send and receive until cancelled."""
        await run_all(*(actor.run() for actor in self._actors), self._send())

    async def _send(self) -> None:
        # Wait for the listeners of the topics before sending.
        for actor in self._actors:
            await actor.is_registered.wait()
        await run_all(self._repeat(self._order, 0.05, 0.4), self._repeat(self._quote, 0.02, 0.1))

    async def _repeat(self, action: Any, min_pause: float, max_pause: float) -> None:
        while True:
            if not await self._try(action()):
                await asyncio.sleep(1)
            await asyncio.sleep(random.uniform(min_pause, max_pause))  # noqa: S311 - nothing secret

    async def _try(self, action: Coroutine[Any, Any, None]) -> bool:
        try:
            await action
        except (MessagesError, psycopg.Error):
            # A rule was removed, or the server restarts: the nodes will return.
            self.failures += 1
            return False
        return True

    async def _order(self) -> None:
        self._orders += 1
        article = random.choice(_ARTICLES)  # noqa: S311 - nothing secret
        note = "a long note; " * 1500 if self._orders % 25 == 0 else ""
        order = {"id": self._orders, "article": article, "note": note}
        await self.shop.node.topic_send("DEMO.ORDERS", order)
        if self._orders % 5 == 0:
            await self.shop.node.call("DEMO.WAREHOUSE", article, timeout=timedelta(seconds=2))
            self.answers += 1

    async def _quote(self) -> None:
        price = {"article": random.choice(_ARTICLES), "cents": random.randint(90, 110)}  # noqa: S311
        await self.ticker.node.topic_send("DEMO.PRICES", price)

    async def _ship(self, message: Message) -> None:
        shipped = {"shipped": message.body["id"]}
        await self._try(self.warehouse.node.topic_send("DEMO.STOCK", shipped))

    async def _count(self, message: Message) -> None:
        self.received[message.topic] += 1


def run(dsn1: str, dsn2: str, *, status_dsn: str | None) -> None:
    """Send and receive until Ctrl-C; show rates and topics unless ``status_dsn`` is None."""
    try:
        asyncio.run(_run(dsn1, dsn2, status_dsn))
    except KeyboardInterrupt:
        print("\nThe demo has ended.")


async def _run(dsn1: str, dsn2: str, status_dsn: str | None) -> None:
    print(f"\n{STARTED_TEXT}; press Ctrl-C to stop.\n", flush=True)
    traffic = DemoTraffic(dsn1, dsn2)
    tasks = [traffic.run()]
    if status_dsn is not None:
        tasks.append(_show_rates(status_dsn, traffic))
    await run_all(*tasks)


async def _show_rates(dsn: str, traffic: DemoTraffic) -> None:
    is_terminal = sys.stdout.isatty()
    seconds = _TERMINAL_INTERVAL_SECONDS if is_terminal else _FILE_INTERVAL_SECONDS
    last_total, printed_lines, last_time = 0, 0, monotonic()
    while True:
        await asyncio.sleep(seconds)
        total, now = traffic.received.total(), monotonic()
        rate = (total - last_total) / (now - last_time)
        last_total, last_time = total, now
        line = (
            f"{total:,} messages received, {rate:,.0f}/s; {traffic.answers:,} calls answered;"
            f" {traffic.failures:,} failed"
        )
        if not is_terminal:
            print(line, flush=True)
            continue
        text = f"{await asyncio.to_thread(_describe_topics, dsn)}\n{line}"
        # Overwrite the previous output: move up by its lines, and clear to the end of the screen.
        print(f"\x1b[{printed_lines}F\x1b[J" if printed_lines else "", text, sep="", flush=True)
        printed_lines = text.count("\n") + 1


def _describe_topics(dsn: str) -> str:
    try:
        with connect_as(dsn, "status") as connection:
            topics = status.read_topics(connection)
            usage = status.read_queue_usage(connection)
    except (MessagesError, psycopg.Error) as error:
        return one_line(f"no status: {error}")
    return status.format_status([row for row in topics if row.topic.startswith("DEMO.")], usage)
