"""A queue under work: pushed to with keys, consumed by leases and popped in transactions."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psycopg

from psqlmessages import AsyncNode, ConnectionLost, Node, Options
from tests.reliability.restarts import until
from tests.sql.conftest import World

T = TypeVar("T")

PUSHERS, AT_ONCE = 2, 10
# What was reserved when a server went away comes again after so long.
LEASE = timedelta(seconds=5)
OPTIONS = Options(reconnect_wait=timedelta(seconds=60))
BROKEN = (psycopg.OperationalError, psycopg.InterfaceError)
EFFECTS = """
    CREATE TABLE IF NOT EXISTS psqlmessages_effects (body text);
    TRUNCATE psqlmessages_effects
"""
POP = "INSERT INTO psqlmessages_effects SELECT body FROM messages.pop('C.POP', 'Q', 5)"
IS_EMPTY = "SELECT NOT EXISTS (SELECT FROM psqlmessages_element)"
PUTS = "SELECT puts FROM messages.queues WHERE queue = 'Q'"


def insist(call: Callable[[], T]) -> tuple[T, int]:
    """Make a call until its answer comes; the answer, and how often it was made in vain."""
    vain = 0
    while True:
        try:
            return call(), vain
        except ConnectionLost:
            vain += 1


@dataclass(frozen=True)
class Outcome:
    """The counts; `lost`, `doubled` and `pushed_twice` should be 0."""

    pushed: int
    pushed_again: int
    pushed_twice: int
    lost: int
    popped: int
    doubled: int
    consumed: int
    came_again: int


class QueueFlow:
    """Two pushers, four consumers by lease and two by pop in a transaction."""

    def __init__(self, world: World, pushes: int) -> None:
        world.rules("psqlmessages P.* Queue Q W 60", "psqlmessages C.* Queue Q R 60")
        world.owner.connection.execute(EFFECTS)
        self._url = world.server.url()
        self._share = pushes // PUSHERS
        self.pushed: list[str] = []
        self._again = 0
        self.consumed: list[str] = []
        self._is_over = threading.Event()
        self._nodes: list[Node] = []
        self._failures: list[BaseException] = []

    def run(self) -> None:
        """Let it flow until all is pushed and taken."""
        pushing = [self._thread(self._push, number) for number in range(PUSHERS)]
        taking = [
            *(self._thread(self._consume, number) for number in range(2)),
            self._thread(lambda: asyncio.run(self._consume_async())),
            *(self._thread(self._pop) for _ in range(2)),
        ]
        for thread in (*pushing, *taking):
            thread.start()
        for thread in pushing:
            thread.join()
        self._wait_until_empty()
        self._is_over.set()
        for node in self._nodes:
            node.stop()
        for thread in taking:
            thread.join()
        assert not self._failures, self._failures

    def _thread(self, act: Callable[..., None], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                act(*arguments)
            except BaseException as failure:  # noqa: BLE001 - `run` fails by it
                self._failures.append(failure)

        return threading.Thread(target=run, daemon=True)

    def _wait_until_empty(self) -> None:
        def is_empty() -> bool:
            with suppress(*BROKEN), psycopg.connect(self._url, autocommit=True) as owner:
                return owner.execute(IS_EMPTY).fetchone() == (True,)
            return False

        until(lambda: self._failures or is_empty(), 120)

    # Pushing

    def _push(self, number: int) -> None:
        with Node(f"P.{number}", self._url, options=OPTIONS) as node:
            for start in range(0, self._share, AT_ONCE):
                bodies = [f"{number}.{start + each}" for each in range(AT_ONCE)]
                _, vain = insist(lambda: node.push_many("Q", bodies, keys=bodies))  # noqa: B023
                self._again += vain
                self.pushed += bodies

    # Taking

    def _consume(self, number: int) -> None:
        with Node(f"C.{number}", self._url, options=OPTIONS) as node:
            self._nodes.append(node)
            for element in node.consume("Q", duration=LEASE):
                self.consumed.append(element.body)

    async def _consume_async(self) -> None:
        async def work(node: AsyncNode) -> None:
            async for element in node.consume("Q", duration=LEASE):
                self.consumed.append(element.body)

        async def stop(node: AsyncNode) -> None:
            await asyncio.to_thread(self._is_over.wait)
            node.stop()

        async with AsyncNode("C.ASYNC", self._url, options=OPTIONS) as node:
            works: list[Coroutine[Any, Any, None]] = [work(node), work(node), stop(node)]
            await asyncio.gather(*works)

    def _pop(self) -> None:
        pause = threading.Event()
        connection: psycopg.Connection | None = None
        while not self._is_over.is_set():
            with suppress(*BROKEN):
                if connection is None or connection.closed:
                    connection = psycopg.connect(self._url, autocommit=True)
                connection.execute(POP)
            # It leaves some to the others.
            pause.wait(0.02)
        if connection is not None:
            connection.close()

    def outcome(self) -> Outcome:
        """Count."""
        with psycopg.connect(self._url) as owner:
            effects = Counter(
                body for (body,) in owner.execute("SELECT body FROM psqlmessages_effects")
            )
            (puts,) = owner.execute(PUTS).fetchone() or (0,)
            owner.execute("DROP TABLE psqlmessages_effects")
        consumed = Counter(self.consumed)
        taken = effects + consumed
        return Outcome(
            pushed=len(self.pushed),
            pushed_again=self._again * AT_ONCE,
            pushed_twice=puts - len(self.pushed),
            lost=len(set(self.pushed) - taken.keys()),
            popped=effects.total(),
            doubled=effects.total() - len(effects),
            consumed=consumed.total(),
            came_again=taken.total() - len(taken) - (effects.total() - len(effects)),
        )
