"""Actors: nodes of the demonstration that take up again what an administrator gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

import psycopg

from psqlmessages.client.async_node import AsyncNode
from psqlmessages.client.messages import RECONNECTED, Message
from psqlmessages.exceptions import MessagesError

_AGAIN_SECONDS: Final = 0.5

Handler = Callable[[Message], Any]


class Actor:
    """One node. It stays or comes back, whatever happens to its rules and its server.

    ``run`` keeps it there; ``node`` is the present one, or the last one where it is away.
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
        self.is_there = asyncio.Event()
        self._dsn = dsn
        # In the order of their names: sessions that go about it differently could deadlock.
        self._wanted = frozenset(
            [("topic_listen", topic) for topic in listens]
            + [("topic_notify", topic) for topic in sends]
        )
        self._missing: set[tuple[str, str]] = set()
        self._is_gone = False
        self._on_topic, self._on_rpc = on_topic, on_rpc
        self.node = self._made()

    async def run(self) -> None:
        """Be there until cancelled; where no rule lets it, try again twice a second."""
        while True:
            self.node, self._is_gone = self._made(), False
            try:
                async with self.node:
                    self._missing = set(self._wanted)
                    await together(self.node.run(), self._keep())
            except (MessagesError, psycopg.Error):
                self.is_there.clear()
            await asyncio.sleep(_AGAIN_SECONDS)

    def _made(self) -> AsyncNode:
        node = AsyncNode(self.ident, self._dsn)
        node.on_event("topic_unlisten", "topic_unnotify", "disconnect", RECONNECTED)(self._heard)
        if self._on_topic is not None:
            # A pattern: which topics it listens to is our affair.
            node.on_topic("*")(self._on_topic)
        if self._on_rpc is not None:
            node.on_rpc(self._on_rpc)
        return node

    async def _keep(self) -> None:
        """Listen and send to what is wanted, again and again until it is allowed."""
        while not self._is_gone:
            for function, topic in sorted(self._missing, key=lambda wanted: wanted[1]):
                try:
                    await getattr(self.node, function)(topic)
                except MessagesError:
                    continue
                self._missing.discard((function, topic))
            if not self._missing:
                self.is_there.set()
            await asyncio.sleep(_AGAIN_SECONDS)

    def _heard(self, event: Message) -> None:
        if event.event == RECONNECTED:
            # What could not be registered again then was given up.
            self._missing = set(self._wanted)
        elif event.ident != self.ident:
            return
        elif event.event == "disconnect":
            self._is_gone = True
            self.is_there.clear()
            self.node.stop()
        else:
            function = "topic_listen" if event.event == "topic_unlisten" else "topic_notify"
            self._missing |= {(function, event.topic)} & self._wanted


async def together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one fails or all are cancelled; unlike gather, wait until each has ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
