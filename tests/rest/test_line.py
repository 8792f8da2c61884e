"""A line of readers, with how many calls it is served; and the connection that listens for all."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest

from psqlmessages.client import queue_listener, wakeups
from psqlmessages.client.connection import AsyncConnection
from psqlmessages.client.queue_listener import QueueListener
from psqlmessages.client.wakeups import QueueState
from psqlmessages.exceptions import ConnectionShared, ServerUnreachable
from psqlmessages.relay.revalidation import Credentials
from psqlmessages.rest.errors import ApiError
from psqlmessages.rest.pool import LeasedElement
from psqlmessages.rest.waiters import QueueWaiters, WaiterKey, WaitingRequest
from tests.client.nodes import in_a_loop
from tests.sql.conftest import World


class Shelf:
    """A queue in memory, which counts what a line asks of it."""

    def __init__(self) -> None:
        self.elements: list[int] = []
        self.reserves: list[tuple[str, int]] = []
        self.listens: list[str] = []
        self.is_listening = False

    async def reserve(self, key: WaiterKey, queue: str, count: int) -> list[LeasedElement]:
        self.reserves.append((key.ident, count))
        # Others run meanwhile, as while a server answers.
        await asyncio.get_running_loop().run_in_executor(None, int)
        taken, self.elements = self.elements[:count], self.elements[count:]
        return [LeasedElement(n, "", None, "{}", "", 0, f"lease {n}") for n in taken]

    async def listen(self, ident: str, queue: str) -> QueueState:
        self.listens.append(ident)
        is_new, self.is_listening = not self.is_listening, True
        return QueueState(None, monotonic() + 30, is_listening=True, is_new=is_new)

    def release(self, ident: str, elements: Sequence[LeasedElement]) -> None:
        raise AssertionError("every reader stays")


def reader_of_orders(*, may_wait: bool) -> WaitingRequest:
    now, who = datetime.now(UTC), Credentials(1, "")
    return WaitingRequest("tid", "orders", "worker", 120.0, False, may_wait, who, now, now)


class Scene:
    """A line on a shelf."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.has_ended = asyncio.Event()
        self.line = QueueWaiters("orders", self.shelf, lambda _: self.has_ended.set())

    def join(self, *, may_wait: bool = True) -> WaitingRequest:
        reader = reader_of_orders(may_wait=may_wait)
        self.line.add(reader)
        reader.result.add_done_callback(lambda _: self.line.remove(reader))
        return reader

    def push(self, *numbers: int) -> None:
        self.shelf.elements += numbers
        self.line.wake()

    async def settled(self) -> None:
        """Let the line come to rest: its task does nothing but wait for a stir."""
        for _ in range(50):
            await asyncio.get_running_loop().run_in_executor(None, int)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def played(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a scenario; all who still wait at its end are sent away."""

    @in_a_loop
    @functools.wraps(scenario)
    async def run(scene: Scene, **fixtures: Any) -> None:
        async with asyncio.timeout(60):
            await scenario(scene, **fixtures)
            for reader in list(scene.line.waiters):
                reader.cancel()
                with suppress(ApiError):
                    await reader.result
            await scene.has_ended.wait()

    return run


async def got(reader: WaitingRequest) -> int:
    return (await reader.result).id


@played
async def test_a_push_for_a_thousand_readers_is_cheap(scene: Scene, monkeypatch):
    # It looks when it is told to, however long the machine takes.
    monkeypatch.setattr(wakeups, "MIN_POLL_SECONDS", 3600.0)
    scene.line._schedule.reset()
    readers = [scene.join() for _ in range(1000)]
    await scene.settled()
    # One call before anybody listened and one after: not one for each reader.
    assert (len(scene.shelf.reserves), len(scene.shelf.listens)) == (2, 1)
    scene.push(7)
    assert await got(readers[0]) == 7
    await scene.settled()
    assert (len(scene.shelf.reserves), len(scene.shelf.listens)) == (3, 2)
    late = [scene.join() for _ in range(100)]
    await scene.settled()
    assert (len(scene.shelf.reserves), len(scene.shelf.listens)) == (3, 2)
    assert not any(reader.result.done() for reader in (*readers[1:], *late))
    # A lost connection, and a channel that has moved, are listened to anew.
    for _ in range(2):
        scene.shelf.is_listening = False
        scene.line.wake()
        await scene.settled()
    assert (len(scene.shelf.reserves), len(scene.shelf.listens)) == (7, 4)


@pytest.fixture
def listener(world: World) -> QueueListener:
    """A listener of a role whose node worker may use orders*."""
    world.rules("user1 worker Queue orders* RW 60")
    url = world.server.url("user1")
    return QueueListener(url, "rest listener", may_poll=True)


@in_a_loop
async def test_a_silent_pooler_is_asked_again(listener: QueueListener, monkeypatch):
    async def lent(_connection: AsyncConnection, _seconds: float) -> bool:
        return False

    answers = Mock(side_effect=[ServerUnreachable("no room"), ConnectionShared("by transaction")])
    monkeypatch.setattr(queue_listener, "set_statement_timeout", lent)
    monkeypatch.setattr(queue_listener, "refuse_shared_connections", answers)
    with pytest.raises(ServerUnreachable):
        await listener.listen("worker", "orders")
    state = await listener.listen("worker", "orders")
    # It looks for elements: whoever listened there would hear nothing.
    assert (state.next_at, state.is_listening) == (None, False)
    await listener.close()
