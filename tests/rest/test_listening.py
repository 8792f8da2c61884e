"""The connection that listens for all queues of a namespace, in the test's own loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import psycopg
import pytest

from psqlmessages.client.connections import AsyncConnection
from psqlmessages.exceptions import ConnectionShared, ServerUnreachable
from psqlmessages.rest import listening
from psqlmessages.rest.listening import QueueListener
from tests.sql.conftest import World

RULE = "user1 worker Queue orders* RW 60"


@pytest.fixture
def address(world: World) -> str:
    """The address of a role whose node worker may use orders*."""
    world.rules(RULE)
    return world.server.url("user1")


def play(address: str, scenario: Callable[[QueueListener], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a listener, which is disconnected at its end."""

    async def run() -> None:
        listener = QueueListener(address, "rest listens", lambda *_: None, lambda: None)
        try:
            async with asyncio.timeout(100):
                await scenario(listener)
        finally:
            listener._rest()

    asyncio.run(run())


def test_what_a_pooler_does_is_asked_again_where_it_did_not_answer(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [ServerUnreachable("no room"), ConnectionShared("by transaction")]

    async def lent(_connection: AsyncConnection, _seconds: float) -> bool:
        return False

    def probed(_dsn: str, _address: str) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(listening, "bound", lent)
    monkeypatch.setattr(listening, "refuse_shared", probed)

    async def scenario(listener: QueueListener) -> None:
        with pytest.raises(ServerUnreachable):
            await listener.listen("worker", "orders")
        heard = await listener.listen("worker", "orders")
        # It looks for elements: whoever listened there would hear nothing.
        assert (heard.seconds, heard.next) == (2.0, None)

    play(address, scenario)


def test_a_transaction_that_makes_a_queue_holds_up_no_other_queue(
    address: str, world: World
) -> None:
    async def scenario(listener: QueueListener) -> None:
        await listener.listen("worker", "orders")
        maker = world.program("user1")
        with maker.connection.transaction():
            maker.ok("push", "worker", "orders-new", "x")
            held = asyncio.create_task(listener.listen("worker", "orders-new"))
            async with asyncio.timeout(60):
                heard = await listener.listen("worker", "orders")
            assert heard.next is None
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await held
        assert (await listener.listen("worker", "orders-new")).next == 0

    play(address, scenario)
