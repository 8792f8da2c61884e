"""Guests: a Node and an AsyncNode that listen to T and stay, whatever becomes of the database."""

import asyncio
import threading
from types import TracebackType
from typing import Self

from psqlmessages import AsyncNode, Node
from tests.reliability.crowd import Ears
from tests.reliability.restarts import LONG, until
from tests.sql.conftest import World

RULES = (
    "user1 SYNC Topic T RW 60", "user2 ASYNC Topic T RW 60", "user1 PUB Topic * W 60",
)  # fmt: skip
LISTEN = (
    "SELECT (SELECT cardinality(t.listeners) FROM messages.topics AS t WHERE t.topic = 'T') = 2"
)


class Guests:
    """Both, in threads of their own."""

    def __init__(self, world: World) -> None:
        self._world, self._ears = world, Ears()
        url = world.server.url
        self.sync, self._async = Node("SYNC", url("user1")), AsyncNode("ASYNC", url("user2"))
        self._threads = (
            threading.Thread(target=self._listen),
            threading.Thread(target=lambda: asyncio.run(self._listen_async())),
        )

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: not self.are_here or self._world.owner.query(LISTEN))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.sync.stop()
        self._async.stop()
        for thread in self._threads:
            thread.join(LONG)

    def _listen(self) -> None:
        with self.sync as node:
            node.topic_listen("T")
            for message in node:
                self._ears.hear(node.ident, message.event or message.body)

    async def _listen_async(self) -> None:
        async with self._async as node:
            await node.topic_listen("T")
            async for message in node.messages():
                self._ears.hear(node.ident, message.event or message.body)

    @property
    def are_here(self) -> bool:
        """Whether neither has ended."""
        return all(thread.is_alive() for thread in self._threads)

    def hear(self, word: str) -> None:
        """Send to them, and wait until both have heard it, once."""
        self._world.program("user1").ok("topic_send_as", "PUB", "T", word)
        until(lambda: self._ears.counts(word) == {"SYNC": 1, "ASYNC": 1})

    @property
    def returns(self) -> int:
        """How often they had to come back: 0 where they stayed."""
        return sum(self._ears.counts("reconnected").values())
