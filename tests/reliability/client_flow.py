"""Nodes that publish and nodes that read, in threads and in asyncio, while something happens."""

import asyncio
import threading
from collections import Counter
from datetime import timedelta

from psqlmessages import AsyncNode, ConnectionLost, Node, StreamMessage
from tests.reliability.queue_flow import OPTIONS, insist
from tests.sql.conftest import World

LONG = timedelta(minutes=10)
IDLE = timedelta(seconds=60)
LAST = "last"


class ClientFlow:
    """Two publishers and two readers, one of a thread and one of asyncio each."""

    def __init__(self, world: World, messages: int) -> None:
        world.rules("psqlmessages P.* Topic T W 60", "psqlmessages R.* Topic T R 60")
        self._url = world.server.url()
        self._share = messages // 2
        self.published: list[str] = []
        self.uncertain: list[str] = []
        self.read: dict[str, list[StreamMessage]] = {"R.1": [], "R.2": []}
        self._failures: list[BaseException] = []

    @property
    def tried(self) -> int:
        """How many publishes have ended, whatever became of them."""
        return len(self.published) + len(self.uncertain)

    def run(self) -> None:
        """Let it flow until all is published and read."""
        with Node("P.0", self._url, options=OPTIONS) as node:
            for ident in self.read:
                node.publish("T", "before")
                with Node(ident, self._url) as reader:
                    # Subscribed from now on, with the first reading.
                    list(reader.subscribe("T", LONG, idle=timedelta(0)))
            publishing = [self._thread(self._publish), self._thread(self._publish_async)]
            reading = [self._thread(self._read), self._thread(self._read_async)]
            for thread in (*publishing, *reading):
                thread.start()
            for thread in publishing:
                thread.join()
            insist(lambda: node.publish("T", LAST))
            for thread in reading:
                thread.join()
        assert not self._failures, self._failures

    def _thread(self, act: object) -> threading.Thread:
        def run() -> None:
            try:
                act() if not asyncio.iscoroutinefunction(act) else asyncio.run(act())
            except BaseException as failure:  # noqa: BLE001 - `run` fails by it
                self._failures.append(failure)

        return threading.Thread(target=run, daemon=True)

    def _publish(self) -> None:
        with Node("P.1", self._url, options=OPTIONS) as node:
            for number in range(self._share):
                body = f"1.{number}"
                try:
                    node.publish("T", body)
                except ConnectionLost:
                    # Whether it was published nobody knows.
                    self.uncertain.append(body)
                else:
                    self.published.append(body)

    async def _publish_async(self) -> None:
        async with AsyncNode("P.2", self._url, options=OPTIONS) as node:
            for number in range(self._share):
                body = f"2.{number}"
                try:
                    await node.publish("T", body)
                except ConnectionLost:
                    self.uncertain.append(body)
                else:
                    self.published.append(body)

    def _read(self) -> None:
        with Node("R.1", self._url, options=OPTIONS) as node:
            for message in node.subscribe("T", LONG, idle=IDLE):
                if message.body == LAST:
                    return
                self.read["R.1"].append(message)

    async def _read_async(self) -> None:
        async with AsyncNode("R.2", self._url, options=OPTIONS) as node:
            async for message in node.subscribe("T", LONG, idle=IDLE):
                if message.body == LAST:
                    return
                self.read["R.2"].append(message)

    def counts(self) -> tuple[int, int, int]:
        """How many were lost, came twice, and came though never published, of both readers."""
        lost = doubled = undead = 0
        for messages in self.read.values():
            times = Counter(message.body for message in messages)
            lost += len(set(self.published) - times.keys())
            doubled += sum(number - 1 for number in times.values())
            undead += len(times.keys() - {*self.published, *self.uncertain, "before"})
        return lost, doubled, undead
